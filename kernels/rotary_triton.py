# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel of rotary embedding, with or without the KV store; call it through `rotary`.

Bytes: q and k read and written once; with the store, v read once and the stored rows written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.early_start import may_start_early
from effuse.kernels.pages_triton import slot_offset


@triton.jit
def _rotate_heads(
    source, head_stride, target, target_stride, cos, sin, HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate one token's heads; returns both halves [TILE_HEADS, HALF] in the storage dtype."""
    head = tl.arange(0, TILE_HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    mask = head < HEADS
    first = tl.load(source + head * head_stride + dim, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + head * head_stride + dim + HALF, mask=mask, other=0.0)
    second = second.to(tl.float32)
    low = (first * cos - second * sin).to(target.dtype.element_ty)
    high = (second * cos + first * sin).to(target.dtype.element_ty)
    tl.store(target + head * target_stride + dim, low, mask=mask)
    tl.store(target + head * target_stride + dim + HALF, high, mask=mask)
    return low, high


@triton.jit
def _copy_heads(
    source, head_stride, target, head_to, dim_to, HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    FROM: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Copy COUNT of one token's dimensions of each head, from FROM on."""
    head = tl.arange(0, TILE_HEADS)[:, None]
    dim = FROM + tl.arange(0, COUNT)[None, :]
    mask = head < HEADS
    values = tl.load(source + head * head_stride + dim, mask=mask)
    tl.store(target + head * head_to + dim * dim_to, values, mask=mask)


@triton.jit
def _rotary_kernel(
    q, k, v, q_out, k_out, cos_sin, positions, k_cache, v_cache, slot_mapping, q_token, q_head,
    k_token, k_head, v_token, v_head, kc_page, kc_token, kc_head, kc_dim,
    vc_page, vc_token, vc_head, vc_dim,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, STORES: tl.constexpr,
    ALLOWS_NEXT: tl.constexpr,
):  # fmt: skip
    if ALLOWS_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    dim = tl.arange(0, HALF)[None, :]
    table = cos_sin + position * (2 * HALF)
    # Rounded to the storage dtype first, like the models' own implementations.
    cos = tl.load(table + dim).to(q.dtype.element_ty).to(tl.float32)
    sin = tl.load(table + HALF + dim).to(q.dtype.element_ty).to(tl.float32)
    q_from, q_to = q + token * q_token, q_out + token * (Q_HEADS * DIM)
    k_from, k_to = k + token * k_token, k_out + token * (KV_HEADS * DIM)
    _rotate_heads(q_from, q_head, q_to, DIM, cos, sin, Q_HEADS, TILE_Q, HALF)
    low, high = _rotate_heads(k_from, k_head, k_to, DIM, cos, sin, KV_HEADS, TILE_KV, HALF)
    REST: tl.constexpr = DIM - 2 * HALF
    if REST:
        _copy_heads(q_from, q_head, q_to, DIM, 1, Q_HEADS, TILE_Q, 2 * HALF, REST)
        _copy_heads(k_from, k_head, k_to, DIM, 1, KV_HEADS, TILE_KV, 2 * HALF, REST)
    if STORES:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = tl.arange(0, TILE_KV)[:, None]
            mask = head < KV_HEADS
            k_slot = k_cache + slot_offset(slot, kc_page, kc_token, PAGE_SIZE)
            v_slot = v_cache + slot_offset(slot, vc_page, vc_token, PAGE_SIZE)
            k_target = k_slot + head * kc_head + dim * kc_dim
            tl.store(k_target, low, mask=mask)
            tl.store(k_target + HALF * kc_dim, high, mask=mask)
            if REST:
                _copy_heads(
                    k_from, k_head, k_slot, kc_head, kc_dim, KV_HEADS, TILE_KV, 2 * HALF, REST
                )
            v_from = v + token * v_token
            _copy_heads(v_from, v_head, v_slot, vc_head, vc_dim, KV_HEADS, TILE_KV, 0, DIM)


def launch(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    stored: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated q and k; ``stored`` is (v, k_cache, v_cache, slot_mapping) if K and V are stored."""
    tokens, q_heads, dim = q.shape
    kv_heads, rotary_dim = k.shape[1], cos_sin_cache.shape[1]
    for name, size in (("head_dim", dim), ("rotated dimensions", rotary_dim)):
        if size & (size - 1):
            raise ValueError(f"{name} must be a power of two, got {size}")
    if rotary_dim not in (dim, dim // 2):
        raise ValueError(
            f"cannot rotate {rotary_dim} of {dim} dimensions: expected all or half of them"
        )
    q_out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    v, k_cache, v_cache, slots = stored or (k, k_out[None], k_out[None], positions)
    _rotary_kernel[(tokens,)](
        q, k, v, q_out, k_out, cos_sin_cache, positions, k_cache, v_cache, slots, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride(), *v_cache.stride(),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, TILE_Q=triton.next_power_of_2(q_heads),
        TILE_KV=triton.next_power_of_2(kv_heads), DIM=dim, HALF=rotary_dim // 2,
        PAGE_SIZE=k_cache.shape[1], STORES=stored is not None,
        ALLOWS_NEXT=may_start_early(q.device), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return q_out, k_out
