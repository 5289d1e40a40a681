# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel that stores K and V in unified pages; call it through `pages`.

Bytes: each stored row of K and V is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor


def launch_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write rows to their slots; -1 stores nothing."""
    tokens, heads, dim = k.shape
    if tokens:
        _store_kernel[(tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            *k.stride(),
            *v.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            PAGE_SIZE=k_cache.shape[1],
            HEADS=heads,
            HEAD_DIM=dim,
            TILE_HEADS=triton.next_power_of_2(heads),
            TILE_DIM=triton.next_power_of_2(dim),
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def slot_offset(slot, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Element offset of a slot (int64) in a cache view."""
    return (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * token_stride


@triton.jit
def _store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token,
    k_head,
    k_dim,
    v_token,
    v_head,
    v_dim,
    kc_page,
    kc_token,
    kc_head,
    kc_dim,
    vc_page,
    vc_token,
    vc_head,
    vc_dim,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, TILE_HEADS)[:, None]
    dim = tl.arange(0, TILE_DIM)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM)
    keys = tl.load(k + token * k_token + head * k_head + dim * k_dim, mask=mask)
    values = tl.load(v + token * v_token + head * v_head + dim * v_dim, mask=mask)
    k_slot = k_cache + slot_offset(slot, kc_page, kc_token, PAGE_SIZE)
    v_slot = v_cache + slot_offset(slot, vc_page, vc_token, PAGE_SIZE)
    tl.store(k_slot + head * kc_head + dim * kc_dim, keys, mask=mask)
    tl.store(v_slot + head * vc_head + dim * vc_dim, values, mask=mask)
