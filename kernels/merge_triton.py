# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The second half of split attention: one output from the parts that splits of the cache left.

Parts are combined in split order, so the result does not depend on which finished first.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.batch import AttentionBatch

# Splits whose loads are under way together: a merge is short, and waiting is most of it. One
# number for all launches, so that a result does not depend on what else is merged with it.
SPLITS_AT_ONCE = 8


def merge_splits(
    partial_out: Tensor,
    partial_lse: Tensor,
    batch: AttentionBatch,
    tokens_per_split: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Fill ``out`` [T, Hq, D] and ``lse`` [T, Hq] for sequences of more than one split.

    ``partial_out`` [splits, T, Hq, D] fp32 holds normalised outputs, ``partial_lse``
    [splits, T, Hq] fp32 their base-2 log-sum-exp.
    """
    _, tokens, heads, head_dim = partial_out.shape
    _merge_kernel[(tokens, heads)](
        partial_out,
        partial_lse,
        out,
        lse if lse is not None else out,
        batch.cu_seqlens,
        batch.context_lens,
        len(batch.context_lens),
        tokens,
        *out.stride()[:2],
        HEAD_DIM=head_dim,
        SPLIT_TOKENS=tokens_per_split,
        SPLITS_AT_ONCE=SPLITS_AT_ONCE,
        HAS_LSE=lse is not None,
        num_warps=2,
        enable_fp_fusion=True,
    )


# One kernel for all of them: a new kind of count must not compile while requests wait.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    cu_seqlens,
    context_lens,
    num_seqs,
    num_tokens,
    out_token,
    out_head,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Combine one (token, head) over its splits, a fixed number at a time and in split order."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) <= token:
            low = middle
        else:
            high = middle
    context = tl.load(context_lens + low)
    num_splits = (context + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    if num_splits <= 1:
        return
    dim = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, SPLITS_AT_ONCE)
    place = token.to(tl.int64) * num_heads + head
    step = num_tokens.to(tl.int64) * num_heads
    peak = -1.0e30
    total = 0.0
    result = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for begin in range(0, num_splits, SPLITS_AT_ONCE):
        present = begin + split < num_splits
        parts = (begin + split) * step + place
        split_lse = tl.load(partial_lse + parts, mask=present, other=float("-inf"))
        rows = partial_out + parts[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(rows, mask=present[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(split_lse, 0))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(split_lse - new_peak)
        result = result * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        peak = new_peak
    result = result / total
    row = out + token.to(tl.int64) * out_token + head * out_head
    tl.store(row + dim, result.to(out.dtype.element_ty))
    if HAS_LSE:
        place = token.to(tl.int64) * num_heads + head
        tl.store(lse + place, (peak + tl.log2(total)) * 0.6931471805599453)
