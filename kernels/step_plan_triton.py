# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels that lay out the rows of a denoise step from the slot table: slots that take
part, ids, positions, page slots, attention's inputs, and the rows that need a candidate.

Slots are packed in turn until the rows or the candidates of the bucket are used up; a slot without
room is first in the next step. One program for each slot, and one for the unused rows. Every
program scans the slots by itself, so that one launch is enough; the host reads nothing back.

Bytes: the blocks in flight once, the page lists of the slots once, about 70 B for each row. The
kernels that gather a step's last rows and exchange boundaries read and write each such row once.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.step_slots import (
    NUM_COLUMNS,
    NUM_RUNS,
    BlockColumn,
    Column,
    Control,
    SlotTable,
    Status,
    StepRows,
    sequences_in,
)

STATUS = tl.constexpr(int(Column.STATUS))
START = tl.constexpr(int(Column.START))
NUM_BLOCKS = tl.constexpr(int(Column.NUM_BLOCKS))
NUM_SETTLED = tl.constexpr(int(Column.NUM_SETTLED))
NUM_MASKS = tl.constexpr(int(Column.NUM_MASKS))
ORIGIN = tl.constexpr(int(Column.ORIGIN))
TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
TOP_P = tl.constexpr(int(Column.TOP_P))
TOP_K = tl.constexpr(int(Column.TOP_K))
SEED_LOW = tl.constexpr(int(Column.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Column.SEED_HIGH))
ANSWER_INDEX = tl.constexpr(int(Column.ANSWER_INDEX))
SCORE = tl.constexpr(int(Column.SCORE))
RUNNING = tl.constexpr(int(Status.RUNNING))
BLOCKS_AT = tl.constexpr(NUM_COLUMNS)
COUNT = tl.constexpr(int(BlockColumn.COUNT))
FIRST_SLOT = tl.constexpr(int(Control.FIRST_SLOT))
NEXT_FIRST_SLOT = tl.constexpr(int(Control.NEXT_FIRST_SLOT))
MASK_LIMIT = tl.constexpr(int(Control.MASK_LIMIT))
RUNS = tl.constexpr(NUM_RUNS)
RUNS_TILE = tl.constexpr(triton.next_power_of_2(2 * NUM_RUNS))
PAGES_TILE = tl.constexpr(256)
FILL_TILE = tl.constexpr(512)
GATHER_TILE = 1024


def launch(
    table: SlotTable,
    control: Tensor,
    rows: StepRows,
    num_rows: int,
    page_size: int,
    mask_token_id: int,
    shift: bool,
    shares: bool,
) -> None:
    """Fill ``rows`` for the coming step; ``control`` [4] int32 gives limits and the first slot.

    A slot takes part with all its blocks in flight, if it runs, if its pages cover the rows that
    the step stores, and if no more than ``num_rows`` rows and the control's number of candidates
    are used. Rows and candidates beyond those in use are harmless: token 0 at position 0, not
    stored. With ``shift``, position p is predicted by the row of p - 1, or by the slot's boundary
    vector. With ``shares``, sequences have their pages after the beginning that their run shares.
    """
    layout, sampling = table.layout, rows.sampling
    _plan_kernel[(layout.num_slots + 1 + (NUM_RUNS if shares else 0),)](
        table.rows, table.sharing, control, rows.shared_cu_seqlens, rows.shared_context_lens,
        rows.shared_page_table, rows.cu_seqlens, rows.context_lens, rows.page_table,
        rows.block_origins, rows.first_candidate, rows.kept_rows, rows.token_ids, rows.positions,
        rows.slot_mapping, rows.hidden_rows, rows.boundary_slots, sampling.temperature,
        sampling.top_p, sampling.top_k, sampling.seed, sampling.answer_index, sampling.position,
        sampling.denoise_count, sampling.score, num_rows, sequences_in(layout, num_rows),
        mask_token_id,
        NUM_SLOTS=layout.num_slots, TILE_SLOTS=triton.next_power_of_2(layout.num_slots + 1),
        RING=layout.ring, SIZE=layout.block_size,
        TILE_SIZE=triton.next_power_of_2(layout.block_size), TOKENS_AT=layout.tokens_at,
        MASKED_AT=layout.masked_at, STORABLE_AT=layout.storable_at, PAGES_AT=layout.pages_at,
        WIDTH=layout.width, MAX_PAGES=layout.max_pages, PAGE_SIZE=page_size, SHIFT=int(shift),
        SHARES=shares,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _plan_kernel(
    table, sharing, control, shared_cu_seqlens, shared_context_lens, shared_page_table, cu_seqlens,
    context_lens, page_table, block_origins, first_candidate, kept_rows,
    token_ids, positions, slot_mapping, hidden_rows, boundary_slots, temperatures, top_ps, top_ks,
    seeds, answer_indexes, sample_positions, denoise_counts, scores, num_rows, num_seqs,
    mask_token_id,
    NUM_SLOTS: tl.constexpr, TILE_SLOTS: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr,
    TILE_SIZE: tl.constexpr, TOKENS_AT: tl.constexpr, MASKED_AT: tl.constexpr,
    STORABLE_AT: tl.constexpr, PAGES_AT: tl.constexpr, WIDTH: tl.constexpr, MAX_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SHIFT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    leaders = sharing + 2 * NUM_SLOTS
    if SHARES and slot > NUM_SLOTS:
        run = slot - NUM_SLOTS - 1
        source = table + tl.load(leaders + run) * WIDTH + PAGES_AT
        count = tl.load(leaders + RUNS + run)
        for start in range(0, count, PAGES_TILE):
            entry = start + tl.arange(0, PAGES_TILE)
            page = tl.load(source + entry, mask=entry < count, other=0)
            place = shared_page_table + run * MAX_PAGES + entry
            tl.store(place, page, mask=entry < count)
            tl.store(place + RUNS * MAX_PAGES, page, mask=entry < count)
        return

    # The slots that take part: in turn from the first one, while there are rows and candidates.
    first_slot = tl.load(control + FIRST_SLOT)
    turn = tl.arange(0, TILE_SLOTS)
    is_slot = turn < NUM_SLOTS
    ordered = tl.load(sharing + turn, mask=is_slot, other=-1)
    first_place = tl.sum(tl.where(ordered == first_slot, turn, 0), 0)
    place = (first_place + turn) % NUM_SLOTS
    order = tl.load(sharing + place)
    column = table + order * WIDTH
    settled_rows = tl.load(column + NUM_SETTLED, mask=is_slot, other=0) * SIZE
    cached = tl.load(column + START, mask=is_slot, other=0)
    storable = tl.load(column + STORABLE_AT, mask=is_slot, other=0)
    runs = is_slot & (tl.load(column + STATUS, mask=is_slot, other=0) == RUNNING)
    runs = runs & (cached + settled_rows <= storable)
    own_rows = tl.where(runs, tl.load(column + NUM_BLOCKS, mask=is_slot, other=0) * SIZE, 0)
    own_masks = tl.where(runs, tl.load(column + NUM_MASKS, mask=is_slot, other=0), 0)
    rows_end = tl.cumsum(own_rows, 0)
    masks_end = tl.cumsum(own_masks, 0)
    fits = (rows_end <= num_rows) & (masks_end <= tl.load(control + MASK_LIMIT))
    taken = runs & fits
    used = tl.sum(tl.where(taken, own_rows, 0), 0)
    # Runs in packed order; the one in which the step begins may come again at the end.
    run = tl.load(sharing + NUM_SLOTS + place)
    run = tl.where(first_place + turn < NUM_SLOTS, run, run + RUNS)

    if slot == NUM_SLOTS:
        # The rest: sequences without rows, and unused rows and candidates.
        left_out = tl.min(tl.where(runs & (fits == 0), turn, NUM_SLOTS), 0)
        next_first = tl.sum(tl.where(turn == left_out, order, 0), 0)
        next_first = tl.where(left_out < NUM_SLOTS, next_first, first_slot)
        tl.store(control + NEXT_FIRST_SLOT, next_first)
        num_taken = tl.sum(taken.to(tl.int32), 0)
        ended = (turn >= num_taken) & (turn < num_seqs)
        tl.store(cu_seqlens + 1 + turn, tl.zeros_like(turn) + used, mask=ended)
        tl.store(context_lens + turn, tl.zeros_like(turn), mask=ended)
        tl.store(block_origins + turn, tl.zeros_like(turn), mask=ended)
        tl.store(cu_seqlens, 0)
        if SHARES:
            number = tl.arange(0, RUNS_TILE)
            within = (run[None, :] <= number[:, None]) & taken[None, :]
            ends = tl.sum(tl.where(within, own_rows[None, :], 0), 1)
            tl.store(shared_cu_seqlens, 0)
            tl.store(shared_cu_seqlens + 1 + number, ends, mask=number < 2 * RUNS)
            shared = tl.load(leaders + RUNS + number % RUNS) * PAGE_SIZE
            tl.store(shared_context_lens + number, shared, mask=number < 2 * RUNS)
        num_wanted = tl.sum(tl.where(taken, own_masks, 0), 0)
        lane = tl.arange(0, FILL_TILE)
        zero = tl.zeros_like(lane)
        for start in range(0, num_rows, FILL_TILE):
            row = start + lane
            unused = (row >= used) & (row < num_rows)
            tl.store(token_ids + row, zero.to(tl.int64), mask=unused)
            tl.store(positions + row, zero.to(tl.int64), mask=unused)
            tl.store(slot_mapping + row, zero.to(tl.int64) - 1, mask=unused)
            unwanted = (row >= num_wanted) & (row < num_rows)
            tl.store(hidden_rows + row, zero.to(tl.int64), mask=unwanted)
            tl.store(boundary_slots + row, zero - 1, mask=unwanted)
            tl.store(temperatures + row, zero.to(tl.float32), mask=unwanted)
            tl.store(top_ps + row, zero.to(tl.float32) + 1.0, mask=unwanted)
            tl.store(top_ks + row, zero, mask=unwanted)
            tl.store(seeds + row, zero.to(tl.int64), mask=unwanted)
            tl.store(answer_indexes + row, zero, mask=unwanted)
            tl.store(sample_positions + row, zero, mask=unwanted)
            tl.store(denoise_counts + row, zero, mask=unwanted)
            tl.store(scores + row, zero.to(tl.int8), mask=unwanted)
        return

    own = order == slot
    own = own & is_slot
    if tl.sum((own & taken).to(tl.int32), 0) == 0:
        tl.store(first_candidate + slot, -1)
        tl.store(kept_rows + slot, tl.full((), -1, tl.int64))
        return

    sequence = tl.sum(tl.where(own, tl.cumsum(taken.to(tl.int32), 0) - 1, 0), 0)
    first_row = tl.sum(tl.where(own, rows_end - own_rows, 0), 0)
    first_wanted = tl.sum(tl.where(own, masks_end - own_masks, 0), 0)
    fields = table + slot * WIDTH
    context = tl.load(fields + START)
    origin = tl.load(fields + ORIGIN)
    num_blocks = tl.load(fields + NUM_BLOCKS)
    num_stored = tl.load(fields + NUM_SETTLED) * SIZE
    tl.store(cu_seqlens + 1 + sequence, first_row + num_blocks * SIZE)
    shared = 0
    if SHARES:
        shared = tl.load(leaders + RUNS + tl.sum(tl.where(own, run, 0), 0) % RUNS)
    tl.store(context_lens + sequence, context - shared * PAGE_SIZE)
    tl.store(block_origins + sequence, origin - shared * PAGE_SIZE)
    tl.store(first_candidate + slot, first_wanted)
    kept = tl.where(num_stored > 0, first_row + num_stored - 1, -1)
    tl.store(kept_rows + slot, kept.to(tl.int64))
    num_pages = (context + PAGE_SIZE - 1) // PAGE_SIZE
    for start in range(shared, num_pages, PAGES_TILE):
        entry = start + tl.arange(0, PAGES_TILE)
        page = tl.load(fields + PAGES_AT + entry, mask=entry < num_pages, other=0)
        target = page_table + sequence * MAX_PAGES + entry - shared
        tl.store(target, page, mask=entry < num_pages)

    # Its rows.
    block = tl.arange(0, RING)
    cell = tl.arange(0, TILE_SIZE)
    place = ((context - origin) // SIZE + block) % RING
    exists = (block < num_blocks)[:, None] & (cell < SIZE)[None, :]
    offset = block[:, None] * SIZE + cell[None, :]
    source = fields + place[:, None] * SIZE + cell[None, :]
    token = tl.load(source + TOKENS_AT, mask=exists, other=0)
    masked = tl.load(source + MASKED_AT, mask=exists, other=0)
    is_masked = masked == 1
    position = context + offset
    row = first_row + offset
    tl.store(token_ids + row, tl.where(is_masked, mask_token_id, token).to(tl.int64), mask=exists)
    tl.store(positions + row, position.to(tl.int64), mask=exists)
    is_stored = exists & (offset < num_stored)
    page = tl.load(fields + PAGES_AT + position // PAGE_SIZE, mask=is_stored, other=0)
    page_slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slot_mapping + row, tl.where(is_stored, page_slot, -1), mask=exists)

    # Its masks, each of which needs a candidate.
    of_block = tl.sum(masked, 1)
    before = (tl.cumsum(of_block, 0) - of_block)[:, None] + tl.cumsum(masked, 1) - masked
    wanted = first_wanted + before
    is_first = (offset == 0) & (SHIFT == 1)
    hidden = tl.where(is_first, row, row - SHIFT)
    zero = tl.zeros_like(row)
    count = tl.load(fields + BLOCKS_AT + COUNT * RING + place)
    low = tl.load(fields + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    seed = (tl.load(fields + SEED_HIGH).to(tl.int64) << 32) | low
    temperature = tl.load(fields + TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(fields + TOP_P).to(tl.float32, bitcast=True)
    tl.store(hidden_rows + wanted, hidden.to(tl.int64), mask=is_masked)
    tl.store(boundary_slots + wanted, tl.where(is_first, slot, -1), mask=is_masked)
    tl.store(temperatures + wanted, zero.to(tl.float32) + temperature, mask=is_masked)
    tl.store(top_ps + wanted, zero.to(tl.float32) + top_p, mask=is_masked)
    tl.store(top_ks + wanted, zero + tl.load(fields + TOP_K), mask=is_masked)
    tl.store(seeds + wanted, zero.to(tl.int64) + seed, mask=is_masked)
    tl.store(answer_indexes + wanted, zero + tl.load(fields + ANSWER_INDEX), mask=is_masked)
    tl.store(sample_positions + wanted, position, mask=is_masked)
    tl.store(denoise_counts + wanted, zero + count[:, None], mask=is_masked)
    tl.store(scores + wanted, (zero + tl.load(fields + SCORE)).to(tl.int8), mask=is_masked)


def launch_gather(
    mixed: Tensor, residual: Tensor, wanted: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows ``wanted`` [R] and then ``kept`` [S] (-1: any row) of mixed [T, Q] and residual [T, H],
    both contiguous."""
    num_wanted, num_rows = len(wanted), len(wanted) + len(kept)
    outs = (
        mixed.new_empty(num_rows, mixed.shape[1]),
        residual.new_empty(num_rows, residual.shape[1]),
    )
    widest = max(mixed.shape[1], residual.shape[1])
    _gather_kernel[(num_rows, triton.cdiv(widest, GATHER_TILE))](
        mixed, residual, *outs, wanted, kept, num_wanted, mixed.shape[1], residual.shape[1],
        TILE=GATHER_TILE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return outs


def launch_exchange(hidden: Tensor, boundary_slots: Tensor, kept: Tensor, boundary: Tensor) -> None:
    """Exchanges rows between hidden [R + S, H] of `launch_gather` and boundary [S, H], in place.

    Row i takes the boundary of slot ``boundary_slots`` [R] unless that is -1; slot s takes row R +
    s unless ``kept`` [S] is -1. No slot does both, because a slot that stores has its first
    candidate after the stored rows.
    """
    width = hidden.shape[1]
    _exchange_kernel[(len(hidden), triton.cdiv(width, GATHER_TILE))](
        hidden, boundary_slots, kept, boundary, len(boundary_slots), width,
        TILE=GATHER_TILE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    mixed, residual, mixed_out, residual_out, wanted, kept, num_wanted, mixed_width, residual_width,
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    if place < num_wanted:
        row = tl.load(wanted + place)
    else:
        row = tl.maximum(tl.load(kept + place - num_wanted), 0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = tl.load(mixed + row * mixed_width + column, mask=column < mixed_width)
    tl.store(mixed_out + place * mixed_width + column, values, mask=column < mixed_width)
    values = tl.load(residual + row * residual_width + column, mask=column < residual_width)
    tl.store(residual_out + place * residual_width + column, values, mask=column < residual_width)


@triton.jit
def _exchange_kernel(
    hidden, boundary_slots, kept, boundary, num_wanted, width, TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = hidden + place * width + column
    if place < num_wanted:
        slot = tl.load(boundary_slots + place).to(tl.int64)
        if slot >= 0:
            vector = tl.load(boundary + slot * width + column, mask=column < width)
            tl.store(own, vector, mask=column < width)
    else:
        slot = place - num_wanted
        if tl.load(kept + slot) >= 0:
            vector = tl.load(own, mask=column < width)
            tl.store(boundary + slot * width + column, vector, mask=column < width)
