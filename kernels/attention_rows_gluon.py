# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A consumer warpgroup of `attention_gluon`: softmax and sums of 64 rows over tiles of keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from effuse.kernels.attention_copies_gluon import await_kernel_before
from effuse.kernels.attention_splits_triton import PEAK, add_part, lse_of, seen_end_of

ROWS = gl.constexpr(64)


@gluon.jit
def consume(
    which: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_STEP: gl.constexpr,
    PART_KEYS: gl.constexpr, CACHED_ONLY: gl.constexpr,
    memory, barriers, rows, span, q, q_token, q_head, results, scale,
):  # fmt: skip
    """All tiles for 64 rows, one warpgroup."""
    all_queries, keys, values = memory
    first, first_row, num_rows, kv_head, context, origin = rows
    begin, end, num_tiles, masked_tiles, piece_tiles = span
    queries = all_queries.index(which)
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
    seen_end = gl.minimum(seen_end_of(row // GROUPS, num_rows, context, origin, BLOCK_SIZE), end)
    tiles = (queries, keys, values, barriers, seen_end, scale, begin, num_tiles, piece_tiles)
    if PART_KEYS > 0 and SPLIT_STEP == 0:
        result, total, peak = _parts(PART_KEYS // TILE_KEYS, tiles, masked_tiles)
    else:
        result, total, peak = _part(tiles, 0, num_tiles, masked_tiles, False)

    (
        out, partial_out, partial_lse, out_token, out_head, num_tokens, num_splits, own_lse,
        beginning,
    ) = results  # fmt: skip
    if len(beginning) == 1:
        await_kernel_before()
        result, total, peak = _with_beginning(
            result, total, peak, beginning[0], partial_out, partial_lse, first_row + row // GROUPS,
            kv_head * GROUPS + row % GROUPS, row < num_rows * GROUPS, num_tokens, GROUPS,
        )  # fmt: skip
    divisor = total
    if CACHED_ONLY:
        divisor = gl.where(total > 0, total, 1.0)
    inverse = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, result_layout))
    normalised = result * inverse[:, None]
    if SPLIT_STEP > 0 and num_splits > 1:
        row_token = (first_row + row // GROUPS).to(gl.int64)
        row_head = kv_head * GROUPS + row % GROUPS
        row_valid = row < num_rows * GROUPS
        num_heads = gl.num_programs(0) * GROUPS
        part = (gl.program_id(1).to(gl.int64) * num_tokens + row_token) * num_heads + row_head
        if PART_KEYS > 0:
            normalised = result
            gl.store(partial_lse + part, peak, mask=row_valid)
            stride = gl.num_programs(1).to(gl.int64) * num_tokens * num_heads
            gl.store(partial_lse + stride + part, total, mask=row_valid)
        else:
            gl.store(partial_lse + part, lse_of(peak, total), mask=row_valid)
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, result_layout))
        part = gl.convert_layout(part * HEAD_DIM, gl.SliceLayout(1, result_layout))
        whole_row = gl.convert_layout(row_valid, gl.SliceLayout(1, result_layout))
        gl.store(partial_out + part[:, None] + column[None, :], normalised, mask=whole_row[:, None])
    else:
        if len(own_lse) == 3:
            token = (first_row + row // GROUPS).to(gl.int64)
            places = own_lse[0] + token * own_lse[1]
            places += (kv_head * GROUPS + row % GROUPS) * own_lse[2]
            gl.store(places, lse_of(peak, total), mask=row < num_rows * GROUPS)
        queries.store(normalised.to(q.dtype.element_ty))
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        rows_written, exists = _row_offsets(
            start, first_row, num_rows, kv_head, out_token, out_head, GROUPS, wide
        )
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, wide))
        pointers = out + rows_written[:, None] + columns[None, :]
        gl.store(pointers, queries.load(wide), mask=exists[:, None])


@gluon.jit
def _with_beginning(
    result, total, peak, num_splits, partial_out, partial_lse, token, head, valid, num_tokens,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """(sums [64, D], totals and peaks [64]) with the first ``num_splits`` results of the same rows
    over the beginning of their sequence."""
    HEAD_DIM: gl.constexpr = result.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, result.type.layout)
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, result.type.layout))
    exists = gl.convert_layout(valid, layout)[:, None]
    num_heads = gl.num_programs(0) * GROUPS
    for split in range(num_splits):
        part = (split * num_tokens + token).to(gl.int64) * num_heads + head
        part_lse = gl.load(partial_lse + part, mask=valid, other=0.0)
        place = gl.convert_layout(part * HEAD_DIM, layout)[:, None]
        values = gl.load(partial_out + place + column[None, :], mask=exists, other=0.0)
        new_peak = gl.maximum(peak, part_lse)
        shrink = gl.exp2(peak - new_peak)
        weight = gl.exp2(part_lse - new_peak)
        total = total * shrink + weight
        peak = new_peak
        shrink = gl.convert_layout(shrink, layout)[:, None]
        result = result * shrink + values * gl.convert_layout(weight, layout)[:, None]
    return result, total, peak


@gluon.jit
def _parts(TILES: gl.constexpr, tiles, masked_tiles):
    """(sums [64, D], totals and peaks [64]) over all parts of so many tiles, last first."""
    num_tiles = tiles[7]
    peak, total, result, _no_scores = _nothing(tiles[1])
    last = (num_tiles - 1) % TILES + 1
    for number in range((num_tiles + TILES - 1) // TILES):
        first = gl.where(number == 0, 0, last + (number - 1) * TILES)
        count = gl.where(number == 0, last, TILES)
        part, part_total, part_peak = _part(tiles, first, count, masked_tiles, True)
        shrink, weight, total, peak = add_part(total, peak, part_total, part_peak)
        layout: gl.constexpr = gl.SliceLayout(1, result.type.layout)
        shrink = gl.convert_layout(shrink, layout)[:, None]
        weight = gl.convert_layout(weight, layout)[:, None]
        result = gl.fma(part, weight.broadcast_to(part.shape), result * shrink)
    return result, total, peak


@gluon.jit
def _nothing(keys):
    """(peaks and totals [64], sums [64, D], scores [64, keys]) before the first tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys.shape[1], 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys.shape[2], 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    peak = gl.full([ROWS], PEAK, gl.float32, layout=row_layout)
    total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    sums = gl.full([ROWS, keys.shape[2]], 0.0, gl.float32, layout=result_layout)
    return peak, total, sums, gl.full([ROWS, keys.shape[1]], 0.0, gl.float32, layout=score_layout)


@gluon.jit
def _part(tiles, first, count, masked_tiles, HAS_MORE: gl.constexpr):
    """(sums [64, D], totals and peaks [64]) of ``count`` tiles from index ``first`` on."""
    queries, keys, values, barriers, seen_end, scale, begin, num_tiles, piece_tiles = tiles
    keys_full, keys_empty, values_full, values_empty = barriers
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    peak, total, accumulator, no_scores = _nothing(keys)
    stage = first % STAGES
    mbarrier.wait(keys_full.index(stage), first // STAGES & 1)
    fence_async_shared()
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), no_scores, use_acc=False)
    mbarrier.arrive(keys_empty.index(stage), count=1)
    limit = seen_end - (begin + (num_tiles - 1 - first) * TILE_KEYS)
    scores = _masked(scores, limit)
    weights, total, peak, _shrink = _softmax(scores, total, peak, scale)
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, 2)
    weights = gl.convert_layout(weights.to(queries.dtype), operand)
    mbarrier.wait(values_full.index(stage), first // STAGES & 1)
    end = first + count
    if HAS_MORE:
        masked_tiles = gl.minimum(masked_tiles, end)
    for index in range(first + 1, masked_tiles):
        limit = seen_end - (begin + (num_tiles - 1 - index) * TILE_KEYS)
        accumulator, weights, total, peak = _step(
            index, queries, keys, values, barriers, accumulator, weights, total, peak, scale,
            limit, no_scores, piece_tiles, STAGES, True,
        )  # fmt: skip
    for index in range(gl.maximum(masked_tiles, first + 1), end):
        accumulator, weights, total, peak = _step(
            index, queries, keys, values, barriers, accumulator, weights, total, peak, scale,
            seen_end, no_scores, piece_tiles, STAGES, False,
        )  # fmt: skip
    fence_async_shared()
    accumulator = warpgroup_mma(weights, values.index((end - 1) % STAGES), accumulator)
    if HAS_MORE:
        mbarrier.arrive(values_empty.index((end - 1) % STAGES), count=1)
    return accumulator, total, peak


@gluon.jit
def _row_offsets(
    start, first_row, num_rows, kv_head, token_stride, head_stride,
    GROUPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(element offsets, whether they exist) of 64 packed rows from ``start`` on."""
    packed = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = (first_row + packed // GROUPS).to(gl.int64)
    head = kv_head * GROUPS + packed % GROUPS
    return token * token_stride + head * head_stride, packed < num_rows * GROUPS


@gluon.jit
def _step(
    index, queries, keys, values, barriers, accumulator, weights, total, peak, scale, limit,
    no_scores, piece_tiles,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
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
