# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel of attention over the distinct layout; `distinct_attention` is the way in.

As `attention_triton`, but for how cached tokens are read: K in pieces of 16 bytes, V dimension by
dimension, 16 bytes of tokens at a time. That needs whole tiles without a mask in the main loop, so
that the compiler sees the tokens of a page side by side; one ragged tile follows.

Work and bytes are those of `attention_triton`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.attention_triton import LOG2_E, PROGRAMS_PER_WAVE, tile_shape
from effuse.kernels.batch import AttentionBatch
from effuse.kernels.merge_triton import merge_splits, partial_results
from effuse.kernels.splits import SPLIT_STEP, most_splits
from effuse.kernels.splits_triton import tokens_per_split


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
    lse: Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Fill ``out`` [T, Hq, D] and, if given, ``lse`` [T, Hq] fp32 (natural log).

    k_cache is [pages, Hkv, D / x, page_size, x], v_cache [pages, Hkv, D, page_size].
    ``splits`` overrides `splits.most_splits`.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = q_heads // kv_heads
    num_seqs = len(batch.context_lens)
    if tokens == 0 or num_seqs == 0:
        return
    for tensor in (q, k, v, out):
        if tensor.stride(-1) != 1:
            raise ValueError(f"head_dim must have stride 1, got strides {tensor.stride()}")
    tile = tile_shape(q.dtype, head_dim)
    # At most one tile of a sequence is ragged, so this bounds the number of tiles.
    num_tiles = tokens * groups // tile.rows + num_seqs
    num_splits = splits or most_splits(num_tiles * kv_heads, PROGRAMS_PER_WAVE, batch.max_context)
    partial_out, partial_lse = partial_results(q, num_splits)
    _distinct_attention_kernel[(num_tiles, kv_heads, num_splits)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        out,
        lse if lse is not None else out,
        partial_out,
        partial_lse,
        batch.cu_seqlens,
        batch.context_lens,
        batch.page_table,
        batch.block_origins,
        num_seqs,
        tokens,
        batch.page_table.stride(0),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        *out.stride()[:2],
        scale * LOG2_E,
        GROUPS=groups,
        HEAD_DIM=head_dim,
        PAGE_SIZE=batch.page_size,
        PIECE=k_cache.shape[4],
        BLOCK_SIZE=batch.block_size,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        SPLIT_STEP=SPLIT_STEP if num_splits > 1 else 0,
        HAS_LSE=lse is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        merge_splits(partial_out, partial_lse, batch, out, lse)


@triton.jit
def _sequence_of(cu_seqlens, num_seqs, tile, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr):
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
def _block_at(position, origin, BLOCK_SIZE: tl.constexpr):
    """Diffusion block of a position; -1 for all that lies before the origin."""
    relative = position - origin
    return tl.where(relative < 0, -1, relative // BLOCK_SIZE)


@triton.jit
def _fold_in(scores, values, accumulator, total, peak, scale, PRECISION: tl.constexpr):
    """One step of online softmax (Milakov and Gimelshein, 2018); peak in scaled log2 units."""
    # The peak starts finite, so a row that sees nothing here gives 0 and never NaN.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision=PRECISION)
    return accumulator, total, new_peak


@triton.jit
def _pages_of(pages, start, key, last, PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """(page of each token as int64, its offset within) of tokens start .. start + TILE_KEYS - 1.

    What is past the ``last`` page of the sequence is read from that page. ``start`` is a multiple
    of the tile.
    """
    if PAGE_SIZE % TILE_KEYS == 0:
        page = tl.load(pages + start // PAGE_SIZE)
        offset = key
        if PAGE_SIZE > TILE_KEYS:
            offset += tl.multiple_of(start % PAGE_SIZE, TILE_KEYS)
    else:
        # Clamped, not masked: a mask would part the tokens of a page.
        if TILE_KEYS % PAGE_SIZE == 0:
            place = tl.minimum(start // PAGE_SIZE + key // PAGE_SIZE, last)
            offset = key % PAGE_SIZE
        else:
            place = tl.minimum((start + key) // PAGE_SIZE, last)
            offset = (start + key) % PAGE_SIZE
        page = tl.load(pages + place)
    return page.to(tl.int64), offset


@triton.jit
def _distinct_attention_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    out,
    lse,
    partial_out,
    partial_lse,
    cu_seqlens,
    context_lens,
    page_table,
    block_origins,
    num_seqs,
    num_tokens,
    table_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    kc_page,
    kc_head,
    vc_page,
    vc_head,
    out_token,
    out_head,
    scale,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(cu_seqlens, num_seqs, tile, GROUPS, TILE_ROWS)
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

    # Stage 1: cached tokens, all visible. Whole tiles need no mask, one ragged tile follows.
    k_head_start = k_cache + kv_head * kc_head
    v_head_start = v_cache + kv_head * vc_head
    k_dims = (dim // PIECE) * (PAGE_SIZE * PIECE) + dim % PIECE
    v_dims = dim * PAGE_SIZE
    last_page = (context - 1) // PAGE_SIZE
    whole_end = cached_begin + (cached_end - cached_begin) // TILE_KEYS * TILE_KEYS
    for start in tl.range(cached_begin, whole_end, TILE_KEYS):
        page, offset = _pages_of(pages, start, key, last_page, PAGE_SIZE, TILE_KEYS)
        k_tokens = page * kc_page + offset * PIECE
        keys = tl.load(k_head_start + (k_tokens[:, None] + k_dims[None, :]))
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        v_tokens = page * vc_page + offset
        values = tl.load(v_head_start + (v_dims[:, None] + v_tokens[None, :]))
        accumulator, total, peak = _fold_in(
            scores, tl.trans(values), accumulator, total, peak, scale, PRECISION
        )
    if whole_end < cached_end:
        present = whole_end + key < cached_end
        page, offset = _pages_of(pages, whole_end, key, last_page, PAGE_SIZE, TILE_KEYS)
        k_tokens = page * kc_page + offset * PIECE
        keys = tl.load(k_head_start + (k_tokens[:, None] + k_dims[None, :]))
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(present[None, :], scores, float("-inf"))
        v_tokens = page * vc_page + offset
        # A mask would part the tokens of a piece; what is not present may be NaN and is put out.
        values = tl.load(v_head_start + (v_dims[:, None] + v_tokens[None, :]))
        values = tl.where(present[None, :], values, 0.0)
        accumulator, total, peak = _fold_in(
            scores, tl.trans(values), accumulator, total, peak, scale, PRECISION
        )

    # Stage 2: in-flight rows, up to the end of the last block that this tile touches.
    if is_last:
        last_row = tl.minimum((first + TILE_ROWS - 1) // GROUPS, num_rows - 1)
        last_block = _block_at(context + last_row, origin, BLOCK_SIZE)
        visible = tl.minimum(origin + (last_block + 1) * BLOCK_SIZE - context, num_rows)
        row_block = _block_at(context + row, origin, BLOCK_SIZE)
        for start in tl.range(0, visible, TILE_KEYS):
            other = start + key
            present = other < visible
            k_rows = (first_row + other).to(tl.int64) * k_token + kv_head * k_head
            keys = tl.load(k + k_rows[:, None] + dim[None, :], mask=present[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            sees = row_block[:, None] >= _block_at(context + other, origin, BLOCK_SIZE)[None, :]
            scores = tl.where(sees & present[None, :], scores, float("-inf"))
            v_rows = (first_row + other).to(tl.int64) * v_token + kv_head * v_head
            values = tl.load(v + v_rows[:, None] + dim[None, :], mask=present[:, None], other=0.0)
            accumulator, total, peak = _fold_in(
                scores, values, accumulator, total, peak, scale, PRECISION
            )

    # Stage 3: normalise; every valid row has seen a key, except in no split at all.
    result = accumulator / total[:, None]
    row_lse = peak + tl.log2(total)
    if SPLIT_STEP > 0 and num_splits > 1:
        place = tl.program_id(2).to(tl.int64) * num_tokens + token
        place = place * (tl.num_programs(1) * GROUPS) + head
        tl.store(
            partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=valid[:, None]
        )
        tl.store(partial_lse + place, row_lse, mask=valid)
    else:
        out_rows = token * out_token + head * out_head
        tl.store(
            out + out_rows[:, None] + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None],
        )
        if HAS_LSE:
            place = token * (tl.num_programs(1) * GROUPS) + head
            tl.store(lse + place, row_lse * 0.6931471805599453, mask=valid)
