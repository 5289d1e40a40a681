"""Translates a sequence to a row of the device's slot table, and a device record to a step's
result.

Pure numpy. The row is written when a request joins; from then on the device's state machine
continues, and the host only reads its records. The host's sequence follows them: the device makes
the choice, and the rest of a step is that of `denoise.py`, so that commits, drafts and resuming are
the same.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np

from effuse.config.decoding import ALGORITHMS, DecodeSettings, Sampling
from effuse.decode_worker.denoise import StepOutcome, StepPlan, settle_step
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.sequence import Block, Sequence
from effuse.kernels.sampling import ScoreCode
from effuse.kernels.step_slots import (
    NUM_COLUMNS,
    NUM_RECORD_COLUMNS,
    BlockColumn,
    Column,
    RecordColumn,
    SlotLayout,
    Status,
)

# By their numbers in a slot's column.
_REMASKINGS = ALGORITHMS["block_diffusion"].orders


@dataclass(frozen=True, slots=True)
class Record:
    """The state that a step left in one slot, with the next step opened, and its actions."""

    values: Integers  # [record_width]
    layout: SlotLayout

    def column(self, column: RecordColumn) -> int:
        return int(self.values[column])

    @property
    def status(self) -> Status:
        return Status(self.column(RecordColumn.STATUS))

    @property
    def start(self) -> int:
        """First position in flight."""
        return self.column(RecordColumn.START)

    @property
    def num_rows(self) -> int:
        """Rows of the slot's next step."""
        return self.column(RecordColumn.NUM_BLOCKS) * self.layout.block_size

    @property
    def final_len(self) -> int:
        """Leading tokens that can no longer change."""
        return self.start + self.column(RecordColumn.NUM_SETTLED) * self.layout.block_size

    @property
    def tokens(self) -> Integers:
        """Of all blocks in flight from `start` on, with -1 for a mask."""
        begin = NUM_RECORD_COLUMNS + 3 * self.layout.ring
        return self.values[begin : begin + self.num_rows]

    @property
    def full(self) -> Integers:
        """1 for each block in flight that must advance."""
        return self._blocks(0)

    @property
    def counts(self) -> Integers:
        """Forwards that have denoised each block in flight."""
        return self._blocks(1)

    @property
    def written(self) -> Integers:
        """1 for each block in flight that lost masks in this step."""
        return self._blocks(2)

    def _blocks(self, part: int) -> Integers:
        begin = NUM_RECORD_COLUMNS + part * self.layout.ring
        return self.values[begin : begin + self.column(RecordColumn.NUM_BLOCKS)]


def apply_record(sequence: Sequence, plan: StepPlan, record: Record) -> StepOutcome:
    """`denoise.apply_step` with the device's choice: `record` is of the step of `plan`."""
    assert sequence.step_open
    sequence.step_open = False
    sequence.store(plan.num_stored)
    assert record.start == sequence.in_flight_start, "the device stored the rows of the plan"
    written: list[Block] = []
    num_semi_writes = 0
    for block in sequence.blocks:
        if not block.masks_left:
            continue
        block.denoise_count += 1
        num_written = _take_over(sequence, block, record)
        if num_written:
            written.append(block)
            num_semi_writes += 0 if block.full else num_written
    return settle_step(sequence, written, num_semi_writes)


def _take_over(sequence: Sequence, block: Block, record: Record) -> int:
    """Writes masked tokens of the block from the record; returns their number."""
    span = slice(block.start, block.end)
    shown = record.tokens[block.start - record.start : block.end - record.start]
    positions = ((shown >= 0) & sequence.masked[span]).nonzero()[0]
    if len(positions):
        sequence.write(block, positions + block.start, shown[positions].astype(np.int64))
    return len(positions)


def slot_row(
    layout: SlotLayout,
    sequence: Sequence,
    settings: DecodeSettings,
    sampling: Sampling,
    *,
    generation: int,
    pages: Ids[int],
    page_size: int,
) -> Integers:
    """The row [width] of a sequence whose step is open and whose cache is complete."""
    assert sequence.step_open, "a sequence joins with its step open"
    stops = sorted(sequence.stopping.stop_token_ids)
    assert settings.most_active <= layout.max_window, "intake refuses wider ones"
    assert len(stops) <= layout.max_stops, "intake refuses more of them"
    row = np.zeros(layout.width, dtype=np.int32)
    _put_settings(row, sequence, settings, sampling)
    row[Column.STATUS] = Status.RUNNING
    row[Column.GENERATION] = generation
    row[Column.START] = sequence.in_flight_start
    row[Column.NUM_BLOCKS] = len(sequence.blocks)
    row[Column.NUM_SETTLED] = sequence.num_settled_tokens // layout.block_size
    row[Column.NUM_MASKS] = sum(block.masks_left for block in sequence.blocks)
    row[Column.STOP_SEEN] = sequence.stop_seen
    _put_blocks(row, layout, sequence)
    row[layout.stops_at : layout.storable_at] = -1
    row[layout.stops_at : layout.stops_at + len(stops)] = stops
    row[layout.storable_at] = len(pages) * page_size
    row[layout.pages_at : layout.pages_at + len(pages)] = pages
    return row


def _put_settings(
    row: Integers, sequence: Sequence, settings: DecodeSettings, sampling: Sampling
) -> None:
    row[Column.PROMPT_LEN] = sequence.prompt_len
    row[Column.ORIGIN] = sequence.origin
    row[Column.ANSWER_END] = sequence.answer_end
    row[Column.LAST_BLOCK_END] = sequence.last_block_end
    program = ALGORITHMS[settings.algorithm].slot_program
    assert program is not None, "the host feeds the other algorithms"
    row[Column.ALGORITHM] = program
    row[Column.REMASKING] = _REMASKINGS.index(settings.remasking)
    row[Column.WINDOW] = settings.window
    row[Column.STEPS] = settings.denoising_steps
    row[Column.TOP_K] = sampling.top_k
    row[Column.ANSWER_INDEX] = sampling.answer_index
    row[Column.SCORE] = ScoreCode.named(settings.ranked_by)
    real = row.view(np.float32)
    real[Column.CONFIDENCE] = settings.confidence_threshold
    real[Column.ADD] = settings.block_add_threshold
    real[Column.FULL] = settings.full_activation_threshold
    real[Column.ENTROPY] = settings.entropy_bound
    real[Column.TEMPERATURE] = sampling.temperature
    real[Column.TOP_P] = sampling.top_p
    seed = np.array([sampling.seed], dtype=np.uint64).view(np.int32)
    row[[Column.SEED_LOW, Column.SEED_HIGH]] = seed


def _put_blocks(row: Integers, layout: SlotLayout, sequence: Sequence) -> None:
    size, ring = layout.block_size, layout.ring
    blocks = row[NUM_COLUMNS : layout.tokens_at].reshape(len(BlockColumn), ring)
    tokens = row[layout.tokens_at : layout.masked_at].reshape(ring, size)
    masked = row[layout.masked_at : layout.stops_at].reshape(ring, size)
    for block in sequence.blocks:
        place = (block.start - sequence.origin) // size % ring
        blocks[:, place] = (block.masks_at_birth, block.masks_left, block.full, block.denoise_count)
        tokens[place] = sequence.token_ids[block.start : block.end]
        masked[place] = sequence.masked[block.start : block.end]
