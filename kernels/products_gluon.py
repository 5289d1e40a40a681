# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Products whose rows do not depend on other rows, for Hopper in 16-bit types, as device code.

Each element is the sum of the same steps in the same order, whatever tile it is in. The weights
come first in each matrix instruction, so that a tile may have any number of rows. Its rows come in
up to three parts with an accumulator each, so that their number need not be a power of two.

A program computes one tile after another. A producer warp copies the next steps of weights and rows
to shared memory, also those of the next tile. Each consumer warpgroup multiplies 64 columns with
all rows of the tile. Tiles of 64 columns alternate between two warpgroups, so that one multiplies
while the other stores. The first weights are copied while the previous kernel still runs.

The sum may be cut into shares. Each has a tile of its own, and a later kernel adds them, or all are
turns of one tile, which adds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from effuse.kernels.attention_copies_gluon import await_kernel_before, copy_box

COLUMNS = gl.constexpr(64)  # of a consumer
DEPTH = gl.constexpr(64)  # of a step along the sum
GROUP = gl.constexpr(16)


# One kernel for all counts: a new kind of count must not compile while requests wait.
@gluon.jit(do_not_specialize=["rows", "num_columns", "num_rows", "steps", "shares", "has_bias"])
def product_kernel(
    weights, first_rows, second_rows, third_rows, bias, out, rows, columns, num_columns, num_rows,
    steps, shares, has_bias,
    CONSUMERS: gl.constexpr, TILE_ROWS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    sources = (first_rows,)
    if second_rows is not None:
        sources += (second_rows,)
    if third_rows is not None:
        sources += (third_rows,)
    dtype: gl.constexpr = weights.dtype
    shape: gl.constexpr = [STAGES * CONSUMERS, COLUMNS, DEPTH]
    held = gl.allocate_shared_memory(dtype, shape, weights.layout)
    parts = ()
    for part in gl.static_range(len(sources)):
        parts += (_stages_of(sources[part], STAGES),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)  # those that read a stage
    ended = empty
    if CONSUMERS == 1:
        # Not otherwise: the compiler gives the memory of a barrier without any wait to values,
        # and a GPU that interrupts a kernel for another process writes the barrier over them.
        ended = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for consumer in gl.static_range(2):
            mbarrier.init(ended.index(consumer), count=1)
    memory = (held, parts, full, empty, ended)
    spans = (num_columns, num_rows, steps, shares)
    target = (bias, has_bias, out, rows, columns)
    if CONSUMERS < 3:
        gl.warp_specialize(
            [
                (_consume, (0, CONSUMERS, TILE_ROWS, TURNS, memory, spans, target)),
                (_consume, (1, CONSUMERS, TILE_ROWS, TURNS, memory, spans, target)),
                (_produce, (CONSUMERS, TILE_ROWS, TURNS, memory, spans, weights, sources)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, CONSUMERS, TILE_ROWS, TURNS, memory, spans, target)),
                (_consume, (1, CONSUMERS, TILE_ROWS, TURNS, memory, spans, target)),
                (_consume, (2, CONSUMERS, TILE_ROWS, TURNS, memory, spans, target)),
                (_produce, (CONSUMERS, TILE_ROWS, TURNS, memory, spans, weights, sources)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _stages_of(source, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES, source.block_type.shape[0], DEPTH]
    return gl.allocate_shared_memory(source.dtype, shape, source.layout)


@gluon.jit
def _tile(index, spans):
    """(column of tiles, row of tiles): the columns of a group side by side, then their rows, so
    that both meet in the L2 cache."""
    num_columns, num_rows, _steps, _shares = spans
    group = index // (GROUP * num_rows)
    width = gl.minimum(GROUP, num_columns - group * GROUP)
    within = index - group * (GROUP * num_rows)
    return group * GROUP + within % width, within // width


@gluon.jit
def _share(index, turn, spans):
    """(tile, share of its sum, first step, number of steps) of an index in a turn. The shares of a
    tile are apart, or each is a turn."""
    num_columns, num_rows, steps, shares = spans
    share = turn + index // (num_columns * num_rows)
    first = share * steps // shares
    return index % (num_columns * num_rows), share, first, (share + 1) * steps // shares - first


@gluon.jit
def _num_tiles(spans, TURNS: gl.constexpr):
    num_columns, num_rows, _steps, shares = spans
    return num_columns * num_rows * (shares // TURNS)


@gluon.jit
def _produce(
    CONSUMERS: gl.constexpr, TILE_ROWS: gl.constexpr, TURNS: gl.constexpr,
    memory, spans, weights, sources,
):  # fmt: skip
    """Copies the steps of all tiles, each as soon as its stage is free."""
    _held, parts, _full, empty, _ended = memory
    STAGES: gl.constexpr = parts[0].shape[0]
    tile, _number, first, steps = _share(gl.program_id(0), 0, spans)
    column, row = _tile(tile, spans)
    ahead = gl.minimum(STAGES, steps)
    for step in range(ahead):
        _copy_weights(CONSUMERS, TILE_ROWS, memory, weights, column, first + step, step)
    await_kernel_before()
    for step in range(ahead):
        _copy_rows(memory, sources, row * TILE_ROWS, first + step, step)
    count = ahead
    for index in range(gl.program_id(0), _num_tiles(spans, TURNS), gl.num_programs(0)):
        for turn in gl.static_range(TURNS):
            tile, _number, first, steps = _share(index, turn, spans)
            column, row = _tile(tile, spans)
            copied = 0
            if turn == 0:
                copied = gl.where(index == gl.program_id(0), ahead, 0)
            for step in range(copied, steps):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
                _copy_weights(CONSUMERS, TILE_ROWS, memory, weights, column, first + step, stage)
                _copy_rows(memory, sources, row * TILE_ROWS, first + step, stage)
                count += 1


@gluon.jit
def _copy_weights(
    CONSUMERS: gl.constexpr, TILE_ROWS: gl.constexpr, memory, weights, column, step, stage
):
    held, _parts, full, _empty, _ended = memory
    copied = full.index(stage)
    mbarrier.expect(copied, (CONSUMERS * COLUMNS + TILE_ROWS) * DEPTH * 2)
    for which in gl.static_range(CONSUMERS):
        first = (column * CONSUMERS + which) * COLUMNS
        place = held.index(stage * CONSUMERS + which)
        copy_box(weights, [first, step * DEPTH], copied, place)


@gluon.jit
def _copy_rows(memory, sources, first, step, stage):
    _held, parts, full, _empty, _ended = memory
    for part in gl.static_range(len(parts)):
        copy_box(sources[part], [first, step * DEPTH], full.index(stage), parts[part].index(stage))
        first += parts[part].shape[1]


@gluon.jit
def _consume(
    which: gl.constexpr, CONSUMERS: gl.constexpr, TILE_ROWS: gl.constexpr, TURNS: gl.constexpr,
    memory, spans, target,
):  # fmt: skip
    """One warpgroup's columns of all tiles."""
    _held, parts, _full, _empty, ended = memory
    bias, has_bias, out, rows, columns = target
    ALTERNATES: gl.constexpr = CONSUMERS == 1
    held_by: gl.constexpr = 0 if ALTERNATES else which
    begin, stride, count = gl.program_id(0), gl.num_programs(0), 0
    if ALTERNATES:
        if which == 1:
            count = _steps_of(begin, spans, TURNS)
            begin += stride
        stride *= 2
    number = which
    for index in range(begin, _num_tiles(spans, TURNS), stride):
        if ALTERNATES:
            # Also because only waits for all phases of a barrier, one after another, are safe.
            mbarrier.wait(ended.index(1 - which), (number - 1) // 2 & 1, pred=number > 0)
        tile, share, _first, steps = _share(index, 0, spans)
        column, row = _tile(tile, spans)
        totals, count = _sums(held_by, CONSUMERS, memory, steps, count)
        for turn in gl.static_range(1, TURNS):
            _same, _number, _first, steps = _share(index, turn, spans)
            sums, count = _sums(held_by, CONSUMERS, memory, steps, count)
            totals = _added(totals, sums)
        if ALTERNATES:
            mbarrier.arrive(ended.index(which), count=1)
            number += 2
        into = out + share.to(gl.int64) * rows * columns
        first = (column * CONSUMERS + held_by) * COLUMNS
        first_row = row * TILE_ROWS
        for part in gl.static_range(len(parts)):
            place = (first, first_row, rows, columns)
            _store(into, bias, has_bias, totals[part], place)
            first_row += parts[part].shape[1]
        if ALTERNATES:
            count += _steps_of(index + gl.num_programs(0), spans, TURNS)


@gluon.jit
def _steps_of(index, spans, TURNS: gl.constexpr):
    """Steps of all turns of an index."""
    count = 0
    for turn in gl.static_range(TURNS):
        _tile_of, _number, _first, steps = _share(index, turn, spans)
        count += steps
    return count


@gluon.jit
def _added(totals, sums):
    results = ()
    for part in gl.static_range(len(totals)):
        results += (totals[part] + sums[part],)
    return results


@gluon.jit
def _sums(which: gl.constexpr, CONSUMERS: gl.constexpr, memory, steps, count):
    """(of each part the sums [64, rows] fp32 of a tile; steps so far)."""
    held, parts, full, empty, _ended = memory
    STAGES: gl.constexpr = parts[0].shape[0]
    totals = ()
    for part in gl.static_range(len(parts)):
        totals += (_zeros(parts[part]),)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        own = held.index(stage * CONSUMERS + which)
        started = ()
        for part in gl.static_range(len(parts)):
            values = parts[part].index(stage).permute((1, 0))
            started += (warpgroup_mma(own, values, totals[part], is_async=True),)
        # All products but those of this step have ended.
        totals = _awaited(started, len(parts))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    totals = _awaited(totals, 0)
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    return totals, count


@gluon.jit
def _zeros(part):
    size: gl.constexpr = part.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    return gl.full([COLUMNS, size], 0.0, gl.float32, layout=layout)


@gluon.jit
def _awaited(sums, pending: gl.constexpr):
    if len(sums) == 1:
        ended = (warpgroup_mma_wait(pending, deps=[sums[0]]),)
    elif len(sums) == 2:
        first, second = warpgroup_mma_wait(pending, deps=[sums[0], sums[1]])
        ended = (first, second)
    else:
        first, second, third = warpgroup_mma_wait(pending, deps=[sums[0], sums[1], sums[2]])
        ended = (first, second, third)
    return ended


@gluon.jit
def _store(out, bias, has_bias, total, place):
    """Stores a tile [64 columns, rows] of the product, row by row."""
    first, first_row, rows, columns = place
    SIZE: gl.constexpr = total.shape[1]
    layout: gl.constexpr = total.type.layout
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    added = gl.load(bias + column, mask=(column < columns) & (has_bias != 0), other=0.0)
    total += added.to(gl.float32)[:, None]
    # Values of 4 bytes fill whole sectors as they lie, and have no room in shared memory.
    is_wide: gl.constexpr = out.dtype.element_ty.primitive_bitwidth == 32
    wide: gl.constexpr = layout if is_wide else gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(total.to(out.dtype.element_ty), wide)
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, wide))
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(0, wide))
    # Offsets of 4 bytes take half of the registers that addresses would.
    at = out + first_row.to(gl.int64) * columns + (row[None, :] * columns + column[:, None])
    mask = (column < columns)[:, None] & (row < rows - first_row)[None, :]
    gl.store(at, result, mask=mask)
