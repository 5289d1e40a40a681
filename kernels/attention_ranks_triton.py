# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel that joins the attention of ranks that hold different tokens of a sequence;
call it through `attention.merge_partials`.

Bytes: each partial result and log-sum-exp once, the output once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8


def launch_merge(dealt: Tensor, dealt_lse: Tensor, own: Tensor, own_lse: Tensor) -> Tensor:
    """[T, heads, D] of N partials, dealt [T, N * heads, D] with dealt_lse [T, N * heads] fp32, and
    of own [T, heads, D] with own_lse [T, heads], added last. D is contiguous and a power of two."""
    rows, heads, dim = own.shape
    out = torch.empty((rows, heads, dim), dtype=own.dtype, device=own.device)
    if rows == 0:
        return out
    _merge_kernel[(rows, triton.cdiv(heads, HEADS_AT_ONCE))](
        dealt, dealt_lse, own, own_lse, out, *dealt.stride()[:2], *dealt_lse.stride(),
        *own.stride()[:2], *own_lse.stride(),
        PARTS=dealt.shape[1] // heads, HEADS=heads, HEAD_DIM=dim, HEADS_AT_ONCE=HEADS_AT_ONCE,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit
def _merge_kernel(
    dealt, dealt_lse, own, own_lse, out, dealt_token, dealt_head, dealt_lse_token, dealt_lse_head,
    own_token, own_head, own_lse_token, own_lse_head,
    PARTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    exists = head < HEADS
    dim = tl.arange(0, HEAD_DIM)[None, :]
    lse = tl.load(own_lse + token * own_lse_token + head * own_lse_head, mask=exists, other=0.0)
    place = own + token * own_token + head[:, None] * own_head + dim
    value = tl.load(place, mask=exists[:, None], other=0.0)
    peak = lse
    weights = ()
    values = ()
    for part in tl.static_range(PARTS):
        at = part * HEADS + head
        weight = tl.load(
            dealt_lse + token * dealt_lse_token + at * dealt_lse_head, mask=exists, other=0.0
        )
        weights += (weight,)  # type: ignore[assignment]
        place = dealt + token * dealt_token + at[:, None] * dealt_head + dim
        values += (tl.load(place, mask=exists[:, None], other=0.0),)  # type: ignore[assignment]
        peak = tl.maximum(peak, weight)
    total = tl.zeros([HEADS_AT_ONCE], dtype=tl.float32)
    result = tl.zeros([HEADS_AT_ONCE, HEAD_DIM], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp2(weights[part] - peak)
        total += weight
        result += weight[:, None] * values[part].to(tl.float32)
    weight = tl.exp2(lse - peak)
    total += weight
    result += weight[:, None] * value.to(tl.float32)
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head[:, None]) * HEAD_DIM + dim, result, mask=exists[:, None])
