# ruff: noqa: RUF005 (device code has no starred tuples)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Block-parallel attention for Hopper in 16-bit types, as device code; `attention_hopper` launches.

A program takes 64 rows for each of its one or two consumer warpgroups, all of one KV head. A
producer warpgroup copies tiles of keys and values to shared memory, cached tokens and in-flight
rows alike, from the last tile to the first. A consumer starts the scores of a tile, then the
product of the tile before, and computes its softmax while the latter runs (like FlashAttention-3;
Shah and others, 2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from effuse.kernels.attention_copies_gluon import (
    allow_kernel_after,
    await_kernel_before,
    produce,
)
from effuse.kernels.attention_splits_triton import tokens_per_split

ROWS = gl.constexpr(64)


# One kernel for all counts: a new kind of count must not compile while requests wait.
@gluon.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride"])
def hopper_attention_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    k_boxes,
    v_boxes,
    out,
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
    kc_token,
    kc_head,
    vc_page,
    vc_token,
    vc_head,
    out_token,
    out_head,
    scale,
    GROUPS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE_KEYS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    MAX_SEQS: gl.constexpr,
    SPLIT_STEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    kv_head = gl.program_id(0)
    sequence, first, first_row, num_rows, context, origin = _find_rows(
        cu_seqlens, context_lens, block_origins, num_seqs, gl.program_id(2), GROUPS,
        ROWS * CONSUMERS, MAX_SEQS,
    )  # fmt: skip
    if sequence >= num_seqs:
        return
    last = gl.minimum(first + ROWS * CONSUMERS, num_rows * GROUPS) - 1
    # The keys of this program are positions begin .. end - 1.
    begin = 0
    end = _seen_end(last // GROUPS, num_rows, context, origin, BLOCK_SIZE)
    num_splits = 1
    if SPLIT_STEP > 0:
        split = gl.program_id(1)
        share = tokens_per_split(context, num_rows, gl.num_programs(1), SPLIT_STEP)
        num_splits = gl.maximum(1, (context + share - 1) // share)
        if split >= num_splits:
            return
        begin = split * share
        if split < num_splits - 1:
            end = begin + share
    num_tiles = (end - begin + TILE_KEYS - 1) // TILE_KEYS
    # From this position on a consumer must mask.
    whole = _seen_end(first // GROUPS, num_rows, context, origin, BLOCK_SIZE)
    masked_tiles = num_tiles - (gl.minimum(whole, end) - begin) // TILE_KEYS
    # This many of the last tiles arrive in pieces, the others in boxes.
    boxes = (k_boxes, v_boxes) if k_boxes is not None else ()
    piece_tiles = num_tiles
    if len(boxes) == 2:
        piece_tiles -= (gl.minimum(context, end) - begin) // TILE_KEYS

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
    results = (out, partial_out, partial_lse, out_token, out_head, num_tokens, num_splits)
    await_kernel_before()
    consumer = (memory, barriers, rows, span, q, q_token, q_head, results, scale)
    producer = (memory, barriers, rows, span, sources, boxes, strides)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, GROUPS, BLOCK_SIZE, SPLIT_STEP) + consumer),
                (produce, (PAGE_SIZE, CHUNK) + producer),
            ],
            [4],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, GROUPS, BLOCK_SIZE, SPLIT_STEP) + consumer),
                (_consume, (1, GROUPS, BLOCK_SIZE, SPLIT_STEP) + consumer),
                (produce, (PAGE_SIZE, CHUNK) + producer),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # Not earlier: the following kernel would gather on the few processors that are free.
    allow_kernel_after()


@gluon.jit
def _find_rows(
    cu_seqlens,
    context_lens,
    block_origins,
    num_seqs,
    index,
    GROUPS: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    MAX_SEQS: gl.constexpr,
):
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
def _add(a, b):
    return a + b


@gluon.jit
def _seen_end(row, num_rows, context, origin, BLOCK_SIZE: gl.constexpr):
    """The end of the positions that an in-flight row sees: the end of its diffusion block."""
    position = context + row
    relative = position - origin
    block_end = gl.where(relative < 0, origin, position + BLOCK_SIZE - relative % BLOCK_SIZE)
    return gl.minimum(block_end, context + num_rows)


@gluon.jit
def _barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=ARRIVALS)
    return bars


@gluon.jit
def _consume(
    which: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SPLIT_STEP: gl.constexpr,
    memory,
    barriers,
    rows,
    span,
    q,
    q_token,
    q_head,
    results,
    scale,
):
    """All tiles for 64 rows, one warpgroup."""
    all_queries, keys, values = memory
    keys_full, keys_empty, values_full, _values_empty = barriers
    first, first_row, num_rows, kv_head, context, origin = rows
    begin, end, num_tiles, masked_tiles, piece_tiles = span
    queries = all_queries.index(which)
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    LANES: gl.constexpr = HEAD_DIM // 8
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)

    # Another thread reads a row than writes it, so its address need not be kept for so long.
    read_layout: gl.constexpr = gl.BlockedLayout([8, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    start = first + which * ROWS
    rows_read, valid = _row_offsets(
        start, first_row, num_rows, kv_head, q_token, q_head, GROUPS, read_layout
    )
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, read_layout))
    queries.store(gl.load(q + rows_read[:, None] + dim[None, :], mask=valid[:, None], other=0.0))
    fence_async_shared()

    row = start + gl.arange(0, ROWS, layout=row_layout)
    seen_end = gl.minimum(_seen_end(row // GROUPS, num_rows, context, origin, BLOCK_SIZE), end)
    peak = gl.full([ROWS], -1.0e30, gl.float32, layout=row_layout)
    total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    accumulator = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=result_layout)
    no_scores = gl.full([ROWS, TILE_KEYS], 0.0, gl.float32, layout=score_layout)

    mbarrier.wait(keys_full.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), no_scores, use_acc=False)
    mbarrier.arrive(keys_empty.index(0), count=1)
    limit = seen_end - (begin + (num_tiles - 1) * TILE_KEYS)
    scores = _masked(scores, limit)
    weights, total, peak, _shrink = _softmax(scores, total, peak, scale)
    operand: gl.constexpr = gl.DotOperandLayout(0, result_layout, 2)
    weights = gl.convert_layout(weights.to(q.dtype.element_ty), operand)
    mbarrier.wait(values_full.index(0), 0)
    for index in range(1, masked_tiles):
        limit = seen_end - (begin + (num_tiles - 1 - index) * TILE_KEYS)
        accumulator, weights, total, peak = _step(
            index, queries, keys, values, barriers, accumulator, weights, total, peak, scale,
            limit, no_scores, piece_tiles, STAGES, True,
        )  # fmt: skip
    for index in range(gl.maximum(masked_tiles, 1), num_tiles):
        accumulator, weights, total, peak = _step(
            index, queries, keys, values, barriers, accumulator, weights, total, peak, scale,
            seen_end, no_scores, piece_tiles, STAGES, False,
        )  # fmt: skip
    fence_async_shared()
    accumulator = warpgroup_mma(weights, values.index((num_tiles - 1) % STAGES), accumulator)

    out, partial_out, partial_lse, out_token, out_head, num_tokens, num_splits = results
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, result_layout))
    result = accumulator * inverse[:, None]
    if SPLIT_STEP > 0 and num_splits > 1:
        row_token = (first_row + row // GROUPS).to(gl.int64)
        row_head = kv_head * GROUPS + row % GROUPS
        row_valid = row < num_rows * GROUPS
        num_heads = gl.num_programs(0) * GROUPS
        part = (gl.program_id(1).to(gl.int64) * num_tokens + row_token) * num_heads + row_head
        gl.store(partial_lse + part, peak + gl.log2(total), mask=row_valid)
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, result_layout))
        part = gl.convert_layout(part * HEAD_DIM, gl.SliceLayout(1, result_layout))
        whole_row = gl.convert_layout(row_valid, gl.SliceLayout(1, result_layout))
        gl.store(partial_out + part[:, None] + column[None, :], result, mask=whole_row[:, None])
    else:
        queries.store(result.to(q.dtype.element_ty))
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        rows_written, exists = _row_offsets(
            start, first_row, num_rows, kv_head, out_token, out_head, GROUPS, wide
        )
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, wide))
        pointers = out + rows_written[:, None] + columns[None, :]
        gl.store(pointers, queries.load(wide), mask=exists[:, None])


@gluon.jit
def _row_offsets(
    start,
    first_row,
    num_rows,
    kv_head,
    token_stride,
    head_stride,
    GROUPS: gl.constexpr,
    layout: gl.constexpr,
):
    """(element offsets, whether they exist) of 64 packed rows from ``start`` on."""
    packed = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = (first_row + packed // GROUPS).to(gl.int64)
    head = kv_head * GROUPS + packed % GROUPS
    return token * token_stride + head * head_stride, packed < num_rows * GROUPS


@gluon.jit
def _step(
    index,
    queries,
    keys,
    values,
    barriers,
    accumulator,
    weights,
    total,
    peak,
    scale,
    limit,
    no_scores,
    piece_tiles,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores and weights of tile ``index``, while tile ``index - 1`` is added to the result."""
    keys_full, keys_empty, values_full, values_empty = barriers
    stage = index % STAGES
    behind = (index - 1) % STAGES
    mbarrier.wait(keys_full.index(stage), index // STAGES & 1)
    if index <= piece_tiles:
        # Threads wrote these keys, or the values before them; products read them differently.
        fence_async_shared()
    scores = warpgroup_mma(
        queries, keys.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    accumulator = warpgroup_mma(weights, values.index(behind), accumulator, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_empty.index(stage), count=1)
    if MASKED:
        scores = _masked(scores, limit)
    new_weights, total, peak, shrink = _softmax(scores, total, peak, scale)
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    # This wait comes one step early on purpose. ptxas moves no arithmetic over the loop that it is,
    # and so leaves the softmax in front of the wait for the product.
    mbarrier.wait(values_full.index(stage), index // STAGES & 1)
    accumulator, weights, new_weights = warpgroup_mma_wait(
        0, deps=[accumulator, weights, new_weights]
    )
    mbarrier.arrive(values_empty.index(behind), count=1)
    layout: gl.constexpr = accumulator.type.layout
    accumulator = accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
    return accumulator, new_weights, total, peak


@gluon.jit
def _masked(scores, limit):
    """Scores with -inf for all but the first ``limit`` keys of each row."""
    layout: gl.constexpr = scores.type.layout
    key = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(key[None, :] < limit[:, None], scores, float("-inf"))


@gluon.jit
def _softmax(scores, total, peak, scale):
    """One step of online softmax (Milakov and Gimelshein, 2018); peak in scaled log2 units."""
    # The peak starts finite, so a row that sees nothing here gives 0 and never NaN.
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    return weights, total * shrink + gl.sum(weights, 1), new_peak, shrink
