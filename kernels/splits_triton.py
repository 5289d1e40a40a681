# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The rule of `splits` as device code: attention cuts by it, and the merge puts together by it."""

import triton
import triton.language as tl


@triton.jit
def tokens_per_split(context, num_rows, splits, SPLIT_STEP: tl.constexpr):
    """Tokens of each split but the last, which also has the in-flight rows: as even as steps allow.

    A sequence has ``ceil(context / tokens_per_split)`` splits, and no fewer than one. Takes numbers
    or tensors of them.
    """
    steps = splits * SPLIT_STEP
    # Fewer rows than a step are no reason for longer splits.
    counted = context + num_rows // SPLIT_STEP * SPLIT_STEP
    return tl.maximum(1, (counted + steps - 1) // steps) * SPLIT_STEP
