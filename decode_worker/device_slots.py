"""A sequence as a row of the device's slot table, and a record of the device as what it says.

Pure numpy. The row is written when a request joins; from then on the device's state machine goes
on and its records are all that the host reads.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from effuse.config.decoding import Algorithm, DecodeSettings, Remasking, Sampling
from effuse.decode_worker.sequence import Sequence
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

Row = npt.NDArray[np.int32]

# As a slot's columns number them.
_ALGORITHMS: tuple[Algorithm, ...] = ("d2f", "block_diffusion")
_REMASKINGS: tuple[Remasking, ...] = (
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
)


@dataclass(frozen=True, slots=True)
class Record:
    """What a step left in one slot: its state with the next step opened, and what it did."""

    values: Row  # [record_width]
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
    def tokens(self) -> Row:
        """Of all blocks in flight from `start` on, -1 for a mask."""
        begin = NUM_RECORD_COLUMNS + 3 * self.layout.ring
        return self.values[begin : begin + self.num_rows]

    @property
    def full(self) -> Row:
        """1 for each block in flight that must advance."""
        return self._blocks(0)

    @property
    def counts(self) -> Row:
        """Forwards that have denoised each block in flight."""
        return self._blocks(1)

    @property
    def written(self) -> Row:
        """1 for each block in flight that lost masks in this step."""
        return self._blocks(2)

    def _blocks(self, part: int) -> Row:
        begin = NUM_RECORD_COLUMNS + part * self.layout.ring
        return self.values[begin : begin + self.column(RecordColumn.NUM_BLOCKS)]


def slot_row(
    layout: SlotLayout,
    sequence: Sequence,
    settings: DecodeSettings,
    sampling: Sampling,
    *,
    generation: int,
    pages: Ids[int],
    page_size: int,
) -> Row:
    """The row [width] of a sequence whose step is open and whose cache is complete."""
    assert sequence.step_open, "a sequence joins with its step opened"
    assert row_fits(layout, sequence, settings), "others are denoised from the host"
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
    stops = sorted(sequence.stopping.stop_token_ids)
    row[layout.stops_at : layout.storable_at] = -1
    row[layout.stops_at : layout.stops_at + len(stops)] = stops
    row[layout.storable_at] = len(pages) * page_size
    row[layout.pages_at : layout.pages_at + len(pages)] = pages
    return row


def row_fits(layout: SlotLayout, sequence: Sequence, settings: DecodeSettings) -> bool:
    """False where a request needs more than a row of the slot table holds."""
    num_stops = len(sequence.stopping.stop_token_ids)
    return settings.most_active <= layout.max_window and num_stops <= layout.max_stops


def _put_settings(
    row: Row, sequence: Sequence, settings: DecodeSettings, sampling: Sampling
) -> None:
    row[Column.PROMPT_LEN] = sequence.prompt_len
    row[Column.ORIGIN] = sequence.origin
    row[Column.ANSWER_END] = sequence.answer_end
    row[Column.LAST_BLOCK_END] = sequence.last_block_end
    row[Column.ALGORITHM] = _ALGORITHMS.index(settings.algorithm)
    row[Column.REMASKING] = _REMASKINGS.index(settings.remasking)
    row[Column.WINDOW] = settings.window
    row[Column.STEPS] = settings.denoising_steps
    row[Column.TOP_K] = sampling.top_k
    row[Column.SCORE] = ScoreCode.named(settings.score)
    real = row.view(np.float32)
    real[Column.CONFIDENCE] = settings.confidence_threshold
    real[Column.ADD] = settings.block_add_threshold
    real[Column.FULL] = settings.full_activation_threshold
    real[Column.TEMPERATURE] = sampling.temperature
    real[Column.TOP_P] = sampling.top_p
    seed = np.array([sampling.seed], dtype=np.uint64).view(np.int32)
    row[[Column.SEED_LOW, Column.SEED_HIGH]] = seed


def _put_blocks(row: Row, layout: SlotLayout, sequence: Sequence) -> None:
    size, ring = layout.block_size, layout.ring
    blocks = row[NUM_COLUMNS : layout.tokens_at].reshape(len(BlockColumn), ring)
    tokens = row[layout.tokens_at : layout.masked_at].reshape(ring, size)
    masked = row[layout.masked_at : layout.stops_at].reshape(ring, size)
    for block in sequence.blocks:
        place = (block.start - sequence.origin) // size % ring
        blocks[:, place] = (block.masks_at_birth, block.masks_left, block.full, block.denoise_count)
        tokens[place] = sequence.token_ids[block.start : block.end]
        masked[place] = sequence.masked[block.start : block.end]
