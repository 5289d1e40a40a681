# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel of block-parallel attention and the launch of all kernels; call it through
`attention`.

On Hopper, 16-bit types in unified pages use `attention_hopper`. This kernel covers other devices,
fp32, other head dims and strides, and the distinct layout. Both compute the same, on which tests
without a GPU rely. One program takes a tile of 64 rows (query, head in group) of one KV head: first
all cached pages of the sequence, then its in-flight rows under the block-causal mask, then the
output. `attention_pages_triton` reads the cached tokens of both layouts. Long caches are
split over programs and merged. Launch parameters depend only on shapes.

Work: 4 * D FLOP for each (row, visible key) pair; bytes: q and out once, K and V of a sequence once
for each tile (from L2 except for the first tile).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels import attention_hopper
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.attention_pages_triton import (
    load_keys,
    load_values,
    places_of,
    rows_at,
    rows_of_both,
)
from effuse.kernels.attention_splits_triton import (
    SPLIT_STEP,
    lse_of,
    merge_splits,
    most_splits,
    partial_results,
    tokens_per_split,
)
from effuse.kernels.pages import is_distinct

# Two resident programs on each of the 132 processors of an H100 or H200.
PROGRAMS_PER_WAVE = 264
# Splits of a beginning that the programs of the rest merge. From about 6 on a merge by itself is
# faster (`benchmarks/gpu_shared.py`).
MOST_MERGED = 4
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TileShape:
    """Launch parameters of one shape class. 64 rows on 4 warps are what wgmma needs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_shape(dtype: torch.dtype, head_dim: int) -> TileShape:
    """The one tile shape for a dtype and head dim."""
    if dtype == torch.float32:
        return TileShape(32 if head_dim <= 32 else 16, 32 if head_dim <= 64 else 16, 4, 2)
    return TileShape(64, 64, 4, 3)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    out: Tensor,
    splits: int | None = None,
    batch_invariant: bool = False,
    lse: Tensor | None = None,
    cached_only: bool = False,
    parts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill ``out`` [T, Hq, D], and ``lse`` [T, Hq] fp32 as in `attention.Partials`.

    Caches are views of either layout, as in `attention.block_attention`. ``splits`` overrides the
    number of programs for a sequence's keys. If the batch has shared beginnings, ``out`` has them
    too. With ``parts``, memory for that many splits as in `merge_splits`, all results go there
    instead, and the caller merges them. With both, on Hopper, ``parts`` has the results of the
    beginnings already. Raises ValueError for head dims that tensor cores do not support, and for
    rows whose D elements are not contiguous.
    """
    tokens, q_heads, head_dim = q.shape
    num_seqs = len(batch.context_lens)
    if tokens == 0 or num_seqs == 0:
        return
    for tensor in (q, k, v, k_cache, v_cache, out):
        if tensor.stride(-1) != 1:
            raise ValueError(f"head_dim must have stride 1, got strides {tensor.stride()}")
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim must be a power of two of at least 16, got {head_dim}")
    if batch.shared is not None and parts is None:
        assert lse is None and not batch_invariant, "only whole results share a beginning"
        inputs = q, k, v, k_cache, v_cache
        _launch_cascade(inputs, batch, batch.shared, scale, out, splits)
        return
    others = (k, v, k_cache, v_cache, out)
    distinct = is_distinct(k_cache)
    if _is_hopper(q, *others, batch.page_size):
        attention_hopper.launch(
            q, k, v, k_cache, v_cache, batch,
            scale=scale, out=out, splits=splits, batch_invariant=batch_invariant, lse=lse,
            cached_only=cached_only, parts=parts,
        )  # fmt: skip
        return
    if batch_invariant:
        splits = 1
    kv_heads = k.shape[1]
    groups = q_heads // kv_heads
    tile = tile_shape(q.dtype, head_dim)
    # At most one tile of a sequence is ragged, so this bounds the number of tiles.
    num_tiles = tokens * groups // tile.rows + num_seqs
    num_splits = splits or most_splits(num_tiles * kv_heads, PROGRAMS_PER_WAVE, batch.max_context)
    partial_out, partial_lse = parts or partial_results(q, num_splits)
    _attention_kernel[(num_tiles, kv_heads, num_splits)](
        q, k, v, k_cache, v_cache, out, lse, partial_out, partial_lse, batch.cu_seqlens,
        batch.context_lens, batch.page_table, batch.block_origins, num_seqs, tokens,
        batch.page_table.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *_page_strides(k_cache, distinct), *_page_strides(v_cache, distinct), *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()), scale * LOG2_E,
        GROUPS=groups, HEAD_DIM=head_dim, PAGE_SIZE=batch.page_size,
        PIECE=k_cache.shape[4] if distinct else 0, BLOCK_SIZE=batch.block_size, TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys, SPLIT_STEP=SPLIT_STEP if num_splits > 1 or parts else 0,
        CACHED_ONLY=cached_only, IS_PART=parts is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_ALIGNED=all(attention_hopper.is_aligned(one) for one in (k, v, k_cache, v_cache)),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if num_splits > 1 and parts is None:
        merge_splits(partial_out, partial_lse, batch, out, lse)


def _is_hopper(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, page_size: int
) -> bool:
    others = (k, v, k_cache, v_cache, out)
    return not is_distinct(k_cache) and attention_hopper.is_supported(q, others, page_size)


def _launch_cascade(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    batch: AttentionBatch,
    shared: AttentionBatch,
    scale: float,
    out: Tensor,
    splits: int | None,
) -> None:
    """Rows of a beginning share tiles of 128 (on Hopper); over the rest each sequence has its own,
    of 64. The last launch merges the results of both."""
    q, kv_heads = inputs[0], inputs[1].shape[1]
    tall = -(-len(q) * q.shape[1] // 128)
    short = len(batch.context_lens) * kv_heads
    first = splits or most_splits(tall, PROGRAMS_PER_WAVE // 2, shared.max_context)
    rest = splits or most_splits(short, PROGRAMS_PER_WAVE, batch.max_context)
    # A program that has all of a sequence's own keys also merges a few splits, one after another.
    merges = rest == 1 and first <= MOST_MERGED and _is_hopper(*inputs, out, batch.page_size)
    parts = partial_results(q, first + rest)
    of_shared = parts[0][:first], parts[1][:first]
    launch(*inputs, shared, scale=scale, out=out, splits=first, cached_only=True, parts=of_shared)
    if merges:
        launch(*inputs, batch, scale=scale, out=out, splits=rest, parts=of_shared)
        return
    own, of_own = replace(batch, shared=None), (parts[0][first:], parts[1][first:])
    launch(*inputs, own, scale=scale, out=out, splits=rest, parts=of_own)
    merge_splits(*parts, batch, out, shared_splits=first)


def _page_strides(cache: Tensor, distinct: bool) -> tuple[int, int | None, int]:
    """Of a page, of a token and of a head. Strides within a distinct page are fixed."""
    if distinct:
        return cache.stride(0), None, cache.stride(1)
    page, token, head, _ = cache.stride()
    return page, token, head


@triton.jit
def _find_sequence(cu_seqlens, num_seqs, tile, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Last s with first_tile(s) <= tile, where first_tile(s) = cu[s] * GROUPS // TILE_ROWS + s."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens + middle) * GROUPS // TILE_ROWS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _block_of(position, origin, BLOCK_SIZE: tl.constexpr):
    """Diffusion block of a position; -1 before the origin."""
    relative = position - origin
    return tl.where(relative < 0, -1, relative // BLOCK_SIZE)


@triton.jit
def _accumulate(scores, values, accumulator, total, peak, scale, PRECISION: tl.constexpr):
    """One step of online softmax (Milakov and Gimelshein, 2018); peak in scaled log2 units."""
    # The peak starts finite, so a row that sees nothing here gives 0 and never NaN.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision=PRECISION)
    return accumulator, total, new_peak


# One kernel for all counts: a new kind of count must not compile while requests wait.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride"])
def _attention_kernel(
    q, k, v, k_cache, v_cache, out, lse, partial_out, partial_lse, cu_seqlens, context_lens,
    page_table, block_origins, num_seqs, num_tokens, table_stride, q_token, q_head, k_token, k_head,
    v_token, v_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, out_token, out_head,
    lse_token, lse_head, scale,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLIT_STEP: tl.constexpr, CACHED_ONLY: tl.constexpr, IS_PART: tl.constexpr,
    PRECISION: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(cu_seqlens, num_seqs, tile, GROUPS, TILE_ROWS)
    first_row = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - first_row
    first = (tile - (first_row * GROUPS // TILE_ROWS + sequence)) * TILE_ROWS
    if first >= num_rows * GROUPS:
        return
    context = tl.load(context_lens + sequence)
    cached_begin = 0
    cached_end = context
    is_last = True
    num_splits = 1
    if SPLIT_STEP > 0:
        split = tl.program_id(2)
        share = tokens_per_split(context, num_rows, tl.num_programs(2), SPLIT_STEP)
        num_splits = tl.maximum(1, (context + share - 1) // share)
        if split >= num_splits:
            return
        cached_begin = split * share
        cached_end = tl.minimum(context, cached_begin + share)
        is_last = split == num_splits - 1
        if IS_PART:
            num_splits += 1  # of the other batch
    origin = tl.load(block_origins + sequence)
    pages = page_table + sequence.to(tl.int64) * table_stride

    packed = first + tl.arange(0, TILE_ROWS)
    row = packed // GROUPS
    head = kv_head * GROUPS + packed % GROUPS
    valid = packed < num_rows * GROUPS
    key = tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, HEAD_DIM)
    token = (first_row + row).to(tl.int64)
    q_rows = token * q_token + head * q_head
    queries = tl.load(q + q_rows[:, None] + dim[None, :], mask=valid[:, None], other=0.0)

    accumulator = tl.zeros([TILE_ROWS, HEAD_DIM], dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    peak = tl.full([TILE_ROWS], -1.0e30, dtype=tl.float32)

    # Up to the end of the last block that this tile touches.
    last_row = tl.minimum((first + TILE_ROWS - 1) // GROUPS, num_rows - 1)
    last_block = _block_of(context + last_row, origin, BLOCK_SIZE)
    visible = tl.minimum(origin + (last_block + 1) * BLOCK_SIZE - context, num_rows)
    if CACHED_ONLY:
        visible = 0
    row_block = _block_of(context + row, origin, BLOCK_SIZE)
    k += first_row.to(tl.int64) * k_token + kv_head * k_head
    v += first_row.to(tl.int64) * v_token + kv_head * v_head

    # Stage 1: whole tiles of cached tokens, all visible.
    whole_end = cached_begin + (cached_end - cached_begin) // TILE_KEYS * TILE_KEYS
    for start in tl.range(cached_begin, whole_end, TILE_KEYS):
        page, offset = places_of(pages, start, key, None, context, PAGE_SIZE, PIECE, TILE_KEYS)
        keys = load_keys(
            k_cache, page, offset, kv_head, dim, None, kc_page, kc_token, kc_head,
            PAGE_SIZE, PIECE,
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        values = load_values(
            v_cache, page, offset, kv_head, dim, None, vc_page, vc_token, vc_head,
            PAGE_SIZE, PIECE,
        )  # fmt: skip
        accumulator, total, peak = _accumulate(
            scores, values, accumulator, total, peak, scale, PRECISION
        )

    # Stage 2: the tile in which cached tokens end. Tiles begin at multiples of their size, so that
    # a result does not depend on which tokens are cached.
    flying = whole_end - context
    if whole_end < cached_end:
        present = whole_end + key < cached_end
        page, offset = places_of(
            pages, whole_end, key, present, context, PAGE_SIZE, PIECE, TILE_KEYS
        )
        other = flying + key
        flies = (other >= 0) & (other < visible)
        if PIECE == 0:
            keys = rows_of_both(
                k_cache + kv_head * kc_head, page, offset, k, other, dim, present, flies,
                kc_page, kc_token, k_token, IS_ALIGNED,
            )  # fmt: skip
        else:
            keys = rows_at(k, other, dim, flies, k_token)
            cached_keys = load_keys(
                k_cache, page, offset, kv_head, dim, present, kc_page, kc_token, kc_head,
                PAGE_SIZE, PIECE,
            )  # fmt: skip
            keys = tl.where(present[:, None], cached_keys, keys)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        sees = row_block[:, None] >= _block_of(context + other, origin, BLOCK_SIZE)[None, :]
        sees = present[None, :] | (sees & flies[None, :])
        scores = tl.where(sees, scores, float("-inf"))
        if PIECE == 0:
            values = rows_of_both(
                v_cache + kv_head * vc_head, page, offset, v, other, dim, present, flies,
                vc_page, vc_token, v_token, IS_ALIGNED,
            )  # fmt: skip
        else:
            values = rows_at(v, other, dim, flies, v_token)
            cached_values = load_values(
                v_cache, page, offset, kv_head, dim, present, vc_page, vc_token, vc_head,
                PAGE_SIZE, PIECE,
            )  # fmt: skip
            values = tl.where(present[:, None], cached_values, values)
        accumulator, total, peak = _accumulate(
            scores, values, accumulator, total, peak, scale, PRECISION
        )
        flying += TILE_KEYS

    # Stage 3: in-flight rows.
    if is_last:
        for start in tl.range(flying, visible, TILE_KEYS):
            other = start + key
            present = other < visible
            keys = rows_at(k, other, dim, present, k_token)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            sees = row_block[:, None] >= _block_of(context + other, origin, BLOCK_SIZE)[None, :]
            scores = tl.where(sees & present[None, :], scores, float("-inf"))
            values = rows_at(v, other, dim, present, v_token)
            accumulator, total, peak = _accumulate(
                scores, values, accumulator, total, peak, scale, PRECISION
            )

    # Stage 4: normalise; every valid row has seen a key, unless it is in no split.
    divisor = total
    if CACHED_ONLY:
        divisor = tl.where(total > 0, total, 1.0)
    result = accumulator / divisor[:, None]
    if SPLIT_STEP > 0 and num_splits > 1:
        place = tl.program_id(2).to(tl.int64) * num_tokens + token
        place = place * (tl.num_programs(1) * GROUPS) + head
        tl.store(
            partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=valid[:, None]
        )
        tl.store(partial_lse + place, lse_of(peak, total), mask=valid)
    else:
        out_rows = token * out_token + head * out_head
        if lse is not None:
            places = lse + token * lse_token + head * lse_head
            tl.store(places, lse_of(peak, total), mask=valid)
        tl.store(
            out + out_rows[:, None] + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None],
        )
