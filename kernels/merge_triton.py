# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The second half of split attention: one output from the parts that splits of the cache left.

Parts are combined in split order, so the result does not depend on which finished first.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.batch import AttentionBatch


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
        HAS_LSE=lse is not None,
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit
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
    HAS_LSE: tl.constexpr,
):
    """Combine one (token, head) over its splits, in split order."""
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
    place = token.to(tl.int64) * num_heads + head
    step = num_tokens.to(tl.int64) * num_heads
    peak = tl.load(partial_lse + place)
    total = 1.0
    result = tl.load(partial_out + place * HEAD_DIM + dim)
    for _split in range(1, num_splits):
        place += step
        split_lse = tl.load(partial_lse + place)
        new_peak = tl.maximum(peak, split_lse)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(split_lse - new_peak)
        values = tl.load(partial_out + place * HEAD_DIM + dim)
        result = result * shrink + values * weight
        total = total * shrink + weight
        peak = new_peak
    result = result / total
    row = out + token.to(tl.int64) * out_token + head * out_head
    tl.store(row + dim, result.to(out.dtype.element_ty))
    if HAS_LSE:
        place = token.to(tl.int64) * num_heads + head
        tl.store(lse + place, (peak + tl.log2(total)) * 0.6931471805599453)
