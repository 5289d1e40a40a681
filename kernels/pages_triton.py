# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels that store K and V in pages, and mark progress; call them through `pages`.

Bytes: each stored row of K and V is read once and written once. In distinct pages one program takes
32 rows of a head, so that V is written with a block's tokens side by side: row by row, each element
of V would cost a sector of 32 bytes.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE_TOKENS = 32  # of a program for distinct pages


def launch_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write rows to their slots in pages of either layout; -1 stores nothing."""
    tokens, heads, dim = k.shape
    if k_cache.dim() == 5:  # the distinct layout
        _launch_distinct(k, v, k_cache, v_cache, slot_mapping)
    elif tokens:
        _store_kernel[(tokens,)](
            k, v, k_cache, v_cache, slot_mapping, *k.stride(), *v.stride(), *k_cache.stride(),
            *v_cache.stride(),
            PAGE_SIZE=k_cache.shape[1], HEADS=heads, HEAD_DIM=dim,
            TILE_HEADS=triton.next_power_of_2(heads), TILE_DIM=triton.next_power_of_2(dim),
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def _launch_distinct(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    tokens, heads, dim = k.shape
    if tokens:
        _store_distinct_kernel[(triton.cdiv(tokens, TILE_TOKENS), heads)](
            k, v, k_cache, v_cache, slot_mapping, tokens, *k.stride()[:2], *v.stride()[:2],
            *k_cache.stride()[:2], *v_cache.stride()[:2],
            PAGE_SIZE=v_cache.shape[3], PIECE=k_cache.shape[4], HEAD_DIM=dim,
            TILE_DIM=triton.next_power_of_2(dim), TILE_TOKENS=TILE_TOKENS, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


def launch_mark(number: Tensor, target: Tensor) -> None:
    """``target`` [1] int64 is memory that the device can write, such as pinned memory."""
    _mark_kernel[(1,)](number, target, num_warps=1)


@triton.jit
def slot_offset(slot, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Element offset of a slot (int64) in a cache view."""
    return (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * token_stride


@triton.jit
def _store_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_token, k_head, k_dim, v_token, v_head, v_dim,
    kc_page, kc_token, kc_head, kc_dim, vc_page, vc_token, vc_head, vc_dim,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def _places(slots, dim, kc_page, vc_page, PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr):
    """Element offsets of tokens' K [tokens, dims] and V [dims, tokens] within a head."""
    page = slots // PAGE_SIZE
    offset = slots % PAGE_SIZE
    k_tokens = page * kc_page + offset * PIECE
    k_dims = (dim // PIECE) * (PAGE_SIZE * PIECE) + dim % PIECE
    v_tokens = page * vc_page + offset
    return k_tokens[:, None] + k_dims[None, :], (dim * PAGE_SIZE)[:, None] + v_tokens[None, :]


# One kernel for all counts: a new kind of count must not compile while requests wait.
@triton.jit(do_not_specialize=["num_tokens"])
def _store_distinct_kernel(
    k, v, k_cache, v_cache, slot_mapping, num_tokens, k_token, k_head, v_token, v_head,
    kc_page, kc_head, vc_page, vc_head,
    PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    slots = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = slots >= 0
    if tl.max(stored.to(tl.int32), 0) == 0:
        return
    dim = tl.arange(0, TILE_DIM)
    mask = stored[:, None] & (dim < HEAD_DIM)[None, :]
    k_rows = (token * k_token + head * k_head)[:, None] + dim[None, :]
    v_rows = (token * v_token + head * v_head)[:, None] + dim[None, :]
    keys = tl.load(k + k_rows, mask=mask, other=0.0)
    values = tl.load(v + v_rows, mask=mask, other=0.0)
    k_places, v_places = _places(slots, dim, kc_page, vc_page, PAGE_SIZE, PIECE)
    tl.store(k_cache + head * kc_head + k_places, keys, mask=mask)
    # Blocks are mostly runs of 8 tokens from a multiple of 8 on, so this writes 16 bytes at a time.
    lane = tl.arange(0, TILE_TOKENS)
    begins = tl.load(slot_mapping + token - lane % 8, mask=token < num_tokens, other=-1)
    in_runs = (slots == begins + lane % 8) & (begins % 8 == 0)
    if (PAGE_SIZE % 8 == 0) & (tl.min(in_runs.to(tl.int32), 0) == 1):
        run = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS // 8) * 8
        begin = tl.load(slot_mapping + run).to(tl.int64)
        place = (begin // PAGE_SIZE) * vc_page + tl.multiple_of(begin % PAGE_SIZE, 8)
        rows = v_cache + head * vc_head + dim[:, None, None] * PAGE_SIZE
        runs = tl.reshape(tl.trans(values), (TILE_DIM, TILE_TOKENS // 8, 8))
        within = (dim < HEAD_DIM)[:, None, None]
        tl.store(rows + place[None, :, None] + tl.arange(0, 8), runs, mask=within)
    else:
        tl.store(v_cache + head * vc_head + v_places, tl.trans(values), mask=tl.trans(mask))


@triton.jit
def _mark_kernel(number, target):
    tl.store(target, tl.load(number))
