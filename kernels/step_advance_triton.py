# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel of unmask-and-advance: from a step's candidates to the next step's state, for
all slots. Stores, writes, settles, ends, appends and activates exactly like the decode worker's
pure machine (arXiv 2508.09192 and SDAR), directly in the slot table.

One program for each slot has its blocks in flight in registers, in order. The same lane loads and
stores each element, so the ring needs no second copy. The host reads nothing back.

Bytes: the blocks in flight read and written once, 12 B for each candidate, the record written.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.step_slots import (
    NUM_COLUMNS,
    NUM_RECORD_COLUMNS,
    BlockColumn,
    Column,
    Control,
    RecordColumn,
    SlotTable,
    Status,
)
from effuse.kernels.values import Candidates

STATUS = tl.constexpr(int(Column.STATUS))
GENERATION = tl.constexpr(int(Column.GENERATION))
START = tl.constexpr(int(Column.START))
NUM_BLOCKS = tl.constexpr(int(Column.NUM_BLOCKS))
NUM_SETTLED = tl.constexpr(int(Column.NUM_SETTLED))
NUM_MASKS = tl.constexpr(int(Column.NUM_MASKS))
STOP_SEEN = tl.constexpr(int(Column.STOP_SEEN))
PROMPT_LEN = tl.constexpr(int(Column.PROMPT_LEN))
ORIGIN = tl.constexpr(int(Column.ORIGIN))
ANSWER_END = tl.constexpr(int(Column.ANSWER_END))
LAST_BLOCK_END = tl.constexpr(int(Column.LAST_BLOCK_END))
ALGORITHM = tl.constexpr(int(Column.ALGORITHM))
REMASKING = tl.constexpr(int(Column.REMASKING))
WINDOW = tl.constexpr(int(Column.WINDOW))
STEPS = tl.constexpr(int(Column.STEPS))
CONFIDENCE = tl.constexpr(int(Column.CONFIDENCE))
ADD = tl.constexpr(int(Column.ADD))
FULL = tl.constexpr(int(Column.FULL))
ENTROPY = tl.constexpr(int(Column.ENTROPY))
BLOCKS_AT = tl.constexpr(NUM_COLUMNS)
BLOCK_BIRTH = tl.constexpr(int(BlockColumn.BIRTH))
BLOCK_LEFT = tl.constexpr(int(BlockColumn.LEFT))
BLOCK_FULL = tl.constexpr(int(BlockColumn.FULL))
BLOCK_COUNT = tl.constexpr(int(BlockColumn.COUNT))
STOPPED = tl.constexpr(int(Status.STOPPED))
ENDED = tl.constexpr(int(Status.ENDED))
FAILED = tl.constexpr(int(Status.FAILED))
FIRST_SLOT = tl.constexpr(int(Control.FIRST_SLOT))
NEXT_FIRST_SLOT = tl.constexpr(int(Control.NEXT_FIRST_SLOT))
STEPPED = tl.constexpr(int(RecordColumn.STEPPED))
NUM_WRITTEN = tl.constexpr(int(RecordColumn.NUM_WRITTEN))
RECORD_TOKENS_AT = tl.constexpr(NUM_RECORD_COLUMNS)


def launch(
    table: SlotTable,
    control: Tensor,
    first_candidate: Tensor,
    candidates: Candidates,
    records: Tensor,
) -> None:
    """Apply ``candidates`` [R] to ``table`` and open the next step; ``records`` [S, record_width]
    int32 report it to the host.

    ``first_candidate`` [S] int32 is each slot's first entry in the candidates, one entry for each
    mask in ascending order; -1 if the slot took no part. A slot with a candidate that is not finite
    becomes FAILED and keeps its state.
    """
    layout = table.layout
    # Progress is compared with thresholds: no contraction may change it.
    _advance_kernel[(layout.num_slots,)](
        table.rows, control, first_candidate, candidates.token, candidates.confidence,
        candidates.score, records,
        RING=layout.ring, SIZE=layout.block_size,
        TILE_SIZE=triton.next_power_of_2(layout.block_size), NUM_STOPS=layout.max_stops,
        TOKENS_AT=layout.tokens_at, MASKED_AT=layout.masked_at, STOPS_AT=layout.stops_at,
        WIDTH=layout.width, RECORD_WIDTH=layout.record_width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _progress(birth, left):
    """Share of its masks that a block has written, correctly rounded."""
    at_birth = tl.maximum(birth, 1).to(tl.float32)
    return tl.div_rn((birth - left).to(tl.float32), at_birth)


@triton.jit
def _is_stop(tokens, stops, NUM_STOPS: tl.constexpr):
    """Which tokens are stop ids."""
    found = tokens != tokens
    for index in range(NUM_STOPS):
        found = found | (tokens == tl.load(stops + index))
    return found


@triton.jit
def _rank_by_score(score, masked, cell, SIZE: tl.constexpr):
    """Rank of each cell among its block's masks by score, ties by position."""
    rank = tl.zeros_like(masked)
    for other in range(SIZE):
        is_other = cell[None, :] == other
        other_score = tl.sum(tl.where(is_other, score, 0.0), 1)[:, None]
        other_masked = tl.sum(tl.where(is_other, masked, 0), 1)[:, None]
        beats = (other_score > score) | ((other_score == score) & (other < cell[None, :]))
        rank += tl.where(beats, other_masked, 0)
    return rank


@triton.jit
def _within_entropy(score, masked, rank, bound, SIZE: tl.constexpr):
    """How many of each block's masks, surest first, have entropies that add up to less than
    ``bound``; at least one. Summed in fp64 by rank."""
    num_masked = tl.sum(masked, 1)
    total = tl.sum(score * 0.0, 1).to(tl.float64)
    below = num_masked * 0
    for place in range(SIZE):
        own = tl.where((rank == place) & (masked == 1), score, 0.0)
        total -= tl.sum(own, 1).to(tl.float64)
        below += ((place < num_masked) & (total < bound)).to(tl.int32)
    return tl.maximum(below, 1)


@triton.jit
def _choose(
    fields, score, confidence, masked, left, full, count, cell, SIZE: tl.constexpr
):  # fmt: skip
    """Cells that the slot's rule writes, bool [RING, TILE_SIZE]."""
    is_masked = masked == 1
    threshold = tl.load(fields + CONFIDENCE).to(tl.float32, bitcast=True)
    above = is_masked & (confidence > threshold)
    num_above = tl.sum(above.to(tl.int32), 1)
    rank = _rank_by_score(score, masked, cell, SIZE)
    best = is_masked & (rank == 0) & (full == 1)[:, None]
    surest = ((num_above > 0)[:, None] & above) | ((num_above == 0)[:, None] & best)
    steps = tl.maximum(tl.load(fields + STEPS), 1)
    step = tl.minimum(count, steps - 1)
    share = SIZE // steps + (step < SIZE % steps).to(tl.int32)
    share = tl.minimum(tl.maximum(share, 1), left)
    top = is_masked & (rank < share[:, None])
    leftmost = is_masked & (tl.cumsum(masked, 1) - masked < share[:, None])
    enough = (num_above >= share)[:, None]
    dynamic = (enough & above) | ((enough == 0) & top)
    rule = tl.load(fields + REMASKING)
    if rule == 3:
        bound = tl.load(fields + ENTROPY).to(tl.float32, bitcast=True)
        share = _within_entropy(score, masked, rank, bound.to(tl.float64), SIZE)
        top = is_masked & (rank < share[:, None])
        rule = 1
    diffused = ((rule == 0) & dynamic) | ((rule == 1) & top) | ((rule == 2) & leftmost)
    has_window = tl.load(fields + ALGORITHM) == 0
    return (has_window & surest) | ((has_window == 0) & diffused)


@triton.jit
def _advance_kernel(
    table, control, first_candidate, candidate_tokens, candidate_confidences, candidate_scores,
    records,
    RING: tl.constexpr, SIZE: tl.constexpr, TILE_SIZE: tl.constexpr, NUM_STOPS: tl.constexpr,
    TOKENS_AT: tl.constexpr, MASKED_AT: tl.constexpr, STOPS_AT: tl.constexpr, WIDTH: tl.constexpr,
    RECORD_WIDTH: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    if slot == 0:
        tl.store(control + FIRST_SLOT, tl.load(control + NEXT_FIRST_SLOT))
    fields = table + slot * WIDTH
    first = tl.load(first_candidate + slot)
    stepped = first >= 0
    status = tl.load(fields + STATUS)
    start = tl.load(fields + START)
    num_blocks = tl.load(fields + NUM_BLOCKS)
    settled = tl.load(fields + NUM_SETTLED)
    stop_seen = tl.load(fields + STOP_SEEN)
    prompt_len = tl.load(fields + PROMPT_LEN)
    answer_end = tl.load(fields + ANSWER_END)
    has_window = tl.load(fields + ALGORITHM) == 0

    # The blocks in flight, in order; with one more place than may be in use.
    block = tl.arange(0, RING)
    cell = tl.arange(0, TILE_SIZE)
    place = ((start - tl.load(fields + ORIGIN)) // SIZE + block) % RING
    exists = block < num_blocks
    in_block = (cell < SIZE)[None, :]
    blocks = fields + BLOCKS_AT + place
    birth = tl.load(blocks + BLOCK_BIRTH * RING)
    left = tl.load(blocks + BLOCK_LEFT * RING, mask=exists, other=0)
    full = tl.load(blocks + BLOCK_FULL * RING)
    count = tl.load(blocks + BLOCK_COUNT * RING)
    cells = fields + place[:, None] * SIZE + cell[None, :]
    token = tl.load(cells + TOKENS_AT, mask=in_block & (block >= 0)[:, None], other=0)
    masked = tl.load(cells + MASKED_AT, mask=in_block & exists[:, None], other=0)
    position = start + block[:, None] * SIZE + cell[None, :]

    # The forward's proposal for each mask.
    of_block = tl.sum(masked, 1)
    before = (tl.cumsum(of_block, 0) - of_block)[:, None] + tl.cumsum(masked, 1) - masked
    asks = tl.where(stepped, masked, 0) == 1
    proposal = first + before
    new_token = tl.load(candidate_tokens + proposal, mask=asks, other=0).to(tl.int32)
    confidence = tl.load(candidate_confidences + proposal, mask=asks, other=0.0)
    score = tl.load(candidate_scores + proposal, mask=asks, other=0.0)
    is_finite = (tl.abs(confidence) < float("inf")) & (tl.abs(score) < float("inf"))
    num_broken = tl.sum(tl.sum((is_finite == 0).to(tl.int32), 1), 0)
    goes = stepped & (num_broken == 0)

    # Store and write.
    chosen = _choose(fields, score, confidence, masked, left, full, count, cell, SIZE)
    chosen = chosen & goes
    num_chosen = tl.sum(chosen.to(tl.int32), 1)
    written = tl.sum(num_chosen, 0)
    count += ((left > 0) & goes).to(tl.int32)
    left -= num_chosen
    token = tl.where(chosen, new_token, token)
    masked = tl.where(chosen, 0, masked)
    stops = fields + STOPS_AT
    is_stop = _is_stop(token, stops, NUM_STOPS)
    num_stops_written = tl.sum(tl.sum((chosen & is_stop).to(tl.int32), 1), 0)
    stop_seen = tl.where(num_stops_written > 0, 1, stop_seen)

    # Settle in order, and end.
    pending = tl.min(tl.where(left > 0, block, num_blocks), 0)
    done = tl.where(goes, tl.minimum(pending, num_blocks), settled)
    stored = tl.where(goes, settled, 0)
    final_len = start + done * SIZE
    is_new = (position >= tl.maximum(start + stored * SIZE, prompt_len)) & in_block
    is_new = is_new & (position < tl.minimum(final_len, answer_end))
    num_stops_final = tl.sum(tl.sum((is_new & is_stop).to(tl.int32), 1), 0)
    is_stopped = goes & (num_stops_final > 0)
    is_ended = goes & (is_stopped == 0) & (final_len >= answer_end)
    status = tl.where(stepped & (goes == 0), FAILED, status)
    status = tl.where(is_stopped, STOPPED, status)
    status = tl.where(is_ended, ENDED, status)
    opens = goes & (is_stopped == 0) & (is_ended == 0)

    # Open the next step: append, then activate.
    progress = _progress(birth, left)
    last = tl.sum(tl.where(block == num_blocks - 1, progress, 0.0), 0)
    is_far = last >= tl.load(fields + ADD).to(tl.float32, bitcast=True)
    num_active = num_blocks - done
    wants = has_window & (num_active < tl.load(fields + WINDOW)) & is_far
    wants = wants | (num_active == 0)
    has_more = start + num_blocks * SIZE < tl.load(fields + LAST_BLOCK_END)
    appends = opens & wants & has_more & (stop_seen == 0)
    is_new_block = (block == num_blocks) & appends
    born = is_new_block[:, None] & in_block & (position >= prompt_len)
    num_born = tl.sum(born.to(tl.int32), 1)
    masked = tl.where(born, 1, masked)
    birth = tl.where(is_new_block, num_born, birth)
    left = tl.where(is_new_block, num_born, left)
    full = tl.where(is_new_block, 0, full)
    count = tl.where(is_new_block, 0, count)
    num_after = num_blocks + appends.to(tl.int32)
    far = (_progress(birth, left) >= tl.load(fields + FULL).to(tl.float32, bitcast=True)).to(
        tl.int32
    )
    is_before = block[None, :] + 1 == block[:, None]
    after_far = tl.sum(tl.where(is_before, far[None, :], 0), 1) > 0
    fills = after_far | (block == stored) | (has_window == 0)
    fills = fills & opens & (block >= stored) & (block < num_after)
    full = tl.where(fills, 1, full)

    # Write back everything that may have changed.
    kept = block < num_after
    tl.store(blocks + BLOCK_BIRTH * RING, birth, mask=kept)
    tl.store(blocks + BLOCK_LEFT * RING, left, mask=kept)
    tl.store(blocks + BLOCK_FULL * RING, full, mask=kept)
    tl.store(blocks + BLOCK_COUNT * RING, count, mask=kept)
    tl.store(cells + TOKENS_AT, token, mask=kept[:, None] & in_block)
    tl.store(cells + MASKED_AT, masked, mask=kept[:, None] & in_block)
    new_start = start + stored * SIZE
    num_masks = tl.sum(left, 0)
    tl.store(fields + STATUS, status)
    tl.store(fields + START, new_start)
    tl.store(fields + NUM_BLOCKS, num_after - stored)
    tl.store(fields + NUM_SETTLED, done - stored)
    tl.store(fields + NUM_MASKS, num_masks)
    tl.store(fields + STOP_SEEN, stop_seen)

    # Report to the host.
    record = records + slot * RECORD_WIDTH
    tl.store(record + STATUS, status)
    tl.store(record + GENERATION, tl.load(fields + GENERATION))
    tl.store(record + START, new_start)
    tl.store(record + NUM_BLOCKS, num_after - stored)
    tl.store(record + NUM_SETTLED, done - stored)
    tl.store(record + NUM_MASKS, num_masks)
    tl.store(record + STOP_SEEN, stop_seen)
    tl.store(record + STEPPED, stepped.to(tl.int32))
    tl.store(record + NUM_WRITTEN, written)
    shown = (block >= stored) & (block < num_after)
    target = record + RECORD_TOKENS_AT + (block - stored)[:, None] * SIZE + cell[None, :]
    shown_token = tl.where(masked == 1, -1, token)
    tl.store(target, shown_token, mask=shown[:, None] & in_block)
