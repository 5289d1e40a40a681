# ruff: noqa: RUF005 (device code has no starred tuples)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Block-parallel attention for Hopper in 16-bit types, as device code; `attention_hopper` launches.

A program takes 64 rows for each of its one or two consumer warpgroups, all of one KV head. A
producer warpgroup copies tiles of keys and values to shared memory, cached tokens and in-flight
rows alike, from the last tile to the first. A consumer starts the scores of a tile, then the
product of the tile before, and computes its softmax while the latter runs (like FlashAttention-3;
Shah and others, 2024).

With PART_KEYS a sequence's keys fall into parts at fixed positions. Each part has a softmax of its
own, and the parts are added last first, in registers or by `merge_parts`, with the same operations.
So a row's bits do not depend on the number of programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from effuse.kernels.attention_copies_gluon import allow_kernel_after, await_kernel_before, produce
from effuse.kernels.attention_rows_gluon import ROWS, consume
from effuse.kernels.attention_splits_triton import seen_end_of, tokens_per_split


# One kernel for all counts: a new kind of count must not compile while requests wait.
@gluon.jit(
    do_not_specialize=["num_seqs", "num_shared", "shared_splits", "num_tokens", "table_stride"]
)
def hopper_attention_kernel(
    q, k, v, k_cache, v_cache, k_boxes, v_boxes, out, lse, partial_out, partial_lse, cu_seqlens,
    context_lens, page_table, block_origins, num_seqs, shared_cu_seqlens, shared_lens, num_shared,
    shared_splits, num_tokens, table_stride, q_token, q_head, k_token, k_head, v_token, v_head,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, out_token, out_head, lse_token,
    lse_head, scale,
    GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    CONSUMERS: gl.constexpr, TILE_KEYS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    MAX_SEQS: gl.constexpr, SPLIT_STEP: gl.constexpr, PART_KEYS: gl.constexpr,
    CACHED_ONLY: gl.constexpr, IS_PART: gl.constexpr, SHARED_STEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    # Of the parts of a batch with shared beginnings, the first lets the second begin as soon as the
    # kernel before both has ended. The second needs nothing of the first until it merges or ends.
    IS_FIRST: gl.constexpr = IS_PART and CACHED_ONLY
    IS_SECOND: gl.constexpr = IS_PART and not CACHED_ONLY
    kv_head = gl.program_id(0)
    sequence, first, first_row, num_rows, context, origin = _find_rows(
        cu_seqlens, context_lens, block_origins, num_seqs, gl.program_id(2), GROUPS,
        ROWS * CONSUMERS, MAX_SEQS,
    )  # fmt: skip
    if sequence >= num_seqs:
        if IS_FIRST:
            await_kernel_before()
        return
    last = gl.minimum(first + ROWS * CONSUMERS, num_rows * GROUPS) - 1
    # The keys of this program are positions begin .. end - 1.
    begin = 0
    end = seen_end_of(last // GROUPS, num_rows, context, origin, BLOCK_SIZE)
    if CACHED_ONLY:
        end = context
    num_splits = 1
    if SPLIT_STEP > 0 and PART_KEYS > 0:
        num_splits = (context + num_rows + PART_KEYS - 1) // PART_KEYS
        begin = gl.program_id(1) * PART_KEYS
        if begin >= end:
            return
        end = gl.minimum(end, begin + PART_KEYS)
    elif SPLIT_STEP > 0:
        split = gl.program_id(1)
        share = tokens_per_split(context, num_rows, gl.num_programs(1), SPLIT_STEP)
        num_splits = gl.maximum(1, (context + share - 1) // share)
        if split >= num_splits:
            if IS_FIRST:
                await_kernel_before()
            return
        begin = split * share
        if split < num_splits - 1:
            end = begin + share
        if IS_PART:
            num_splits += 1  # of the other batch
    num_tiles = (end - begin + TILE_KEYS - 1) // TILE_KEYS
    if CACHED_ONLY:
        num_tiles = gl.maximum(num_tiles, 1)  # without any key it is masked
    # From this position on a consumer must mask.
    whole = seen_end_of(first // GROUPS, num_rows, context, origin, BLOCK_SIZE)
    if PART_KEYS > 0:
        whole = gl.maximum(whole, begin)
    masked_tiles = num_tiles - (gl.minimum(whole, end) - begin) // TILE_KEYS
    # This many of the last tiles arrive in pieces, the others in boxes.
    boxes = (k_boxes, v_boxes) if k_boxes is not None else ()
    piece_tiles = num_tiles
    if len(boxes) == 2:
        cached_end = gl.minimum(context, end)
        if PART_KEYS > 0:
            cached_end = gl.maximum(cached_end, begin)
        piece_tiles -= (cached_end - begin) // TILE_KEYS

    dtype: gl.constexpr = q.dtype.element_ty
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KEYS, HEAD_DIM], dtype)
    queries = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], row_layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, HEAD_DIM], tile_layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, HEAD_DIM], tile_layout)
    keys_full = _barriers(STAGES, 1)
    keys_empty = _barriers(STAGES, CONSUMERS)
    values_full = _barriers(STAGES, 1)
    values_empty = _barriers(STAGES, CONSUMERS)
    memory = (queries, keys, values)
    barriers = (keys_full, keys_empty, values_full, values_empty)
    rows = (first, first_row, num_rows, kv_head, context, origin)
    span = (begin, end, num_tiles, masked_tiles, piece_tiles)
    pages = page_table + sequence.to(gl.int64) * table_stride
    sources = (k, v, k_cache, v_cache, pages)
    strides = (
        k_token, k_head, v_token, v_head,
        kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    )  # fmt: skip
    own_lse = (lse, lse_token, lse_head) if lse is not None else ()
    beginning = ()
    if SHARED_STEP > 0:
        beginning = (
            _count_splits(
                shared_cu_seqlens, shared_lens, num_shared, first_row, shared_splits, SHARED_STEP
            ),
        )  # type: ignore[assignment]
    results = (
        out, partial_out, partial_lse, out_token, out_head, num_tokens, num_splits, own_lse,
        beginning,
    )  # fmt: skip
    if not IS_SECOND and SHARED_STEP == 0:
        await_kernel_before()
    if IS_FIRST:
        allow_kernel_after()
    consumer = (memory, barriers, rows, span, q, q_token, q_head, results, scale)
    producer = (memory, barriers, rows, span, sources, boxes, strides)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (0, GROUPS, BLOCK_SIZE, SPLIT_STEP, PART_KEYS, CACHED_ONLY) + consumer),
                (produce, (PAGE_SIZE, CHUNK) + producer),
            ],
            [4],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, GROUPS, BLOCK_SIZE, SPLIT_STEP, PART_KEYS, CACHED_ONLY) + consumer),
                (consume, (1, GROUPS, BLOCK_SIZE, SPLIT_STEP, PART_KEYS, CACHED_ONLY) + consumer),
                (produce, (PAGE_SIZE, CHUNK) + producer),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    if IS_SECOND:
        await_kernel_before()
    # Not earlier: the following kernel would gather on the few processors that are free.
    if not IS_FIRST:
        allow_kernel_after()


@gluon.jit
def _find_rows(
    cu_seqlens, context_lens, block_origins, num_seqs, index,
    GROUPS: gl.constexpr, TILE_ROWS: gl.constexpr, MAX_SEQS: gl.constexpr,
):  # fmt: skip
    """(sequence, first packed row, first token, tokens, context, origin) of the index-th tile.

    The sequence is ``num_seqs`` or more if there are fewer tiles. Every warp computes it by itself
    from one round of loads; nothing runs in parallel.
    """
    layout: gl.constexpr = gl.BlockedLayout([MAX_SEQS // 32], [32], [gl.num_warps()], [0])
    place = gl.arange(0, MAX_SEQS, layout=layout)
    present = place < num_seqs
    begins = gl.load(cu_seqlens + place, mask=present, other=0)
    ends = gl.load(cu_seqlens + place + 1, mask=present, other=0)
    contexts = gl.load(context_lens + place, mask=present, other=0)
    origins = gl.load(block_origins + place, mask=present, other=0)
    stops = gl.associative_scan(((ends - begins) * GROUPS + TILE_ROWS - 1) // TILE_ROWS, 0, _add)
    passed = stops <= index
    sequence = gl.sum(passed.to(gl.int32), 0)
    first = (index - gl.max(gl.where(passed, stops, 0), 0)) * TILE_ROWS
    is_it = place == sequence
    first_row = gl.sum(gl.where(is_it, begins, 0), 0)
    num_rows = gl.sum(gl.where(is_it, ends, 0), 0) - first_row
    context = gl.sum(gl.where(is_it, contexts, 0), 0)
    return sequence, first, first_row, num_rows, context, gl.sum(gl.where(is_it, origins, 0), 0)


@gluon.jit
def _count_splits(
    cu_seqlens, context_lens, num_seqs, token, splits, SPLIT_STEP: gl.constexpr
):  # fmt: skip
    """The splits of the beginning that holds this token, of at most 32; 0 outside of all."""
    place = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    present = place < num_seqs
    begins = gl.load(cu_seqlens + place, mask=present, other=0)
    ends = gl.load(cu_seqlens + place + 1, mask=present, other=0)
    contexts = gl.load(context_lens + place, mask=present, other=0)
    shares = tokens_per_split(contexts, ends - begins, splits, SPLIT_STEP)
    is_it = (begins <= token) & (token < ends)
    return gl.sum(gl.where(is_it, (contexts + shares - 1) // shares, 0), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=ARRIVALS)
    return bars
