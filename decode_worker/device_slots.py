"""The requests that denoise on a device: their slots, and their sequences, one step behind.

It gives requests slots, and pages before the device needs them. A row of the slot table is written
when a request joins; from then on the device's state machine continues, and the host only reads its
records. The host's sequences follow them: the device makes the choice, and the rest of a step is
that of `denoise.py`, so that commits, drafts and resuming are the same.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np

from effuse.config.decoding import ALGORITHMS, DecodeSettings, Sampling
from effuse.decode_worker.denoise import StepOutcome, StepPlan, settle_step
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.replica_steps import ReplicaStepper
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.sequence import Block, Sequence
from effuse.kernels.step_slots import (
    NUM_COLUMNS,
    NUM_RECORD_COLUMNS,
    BlockColumn,
    Column,
    RecordColumn,
    SlotLayout,
    Status,
)
from effuse.kernels.values import ScoreCode

_MOST_GENERATIONS = 2**31 - 1
# By their numbers in a slot's column.
_REMASKINGS = ALGORITHMS["block_diffusion"].orders


@dataclass(slots=True, eq=False)
class Resident:
    """A request in a slot of the device."""

    request: DecodeRequest
    slot: int
    generation: int
    num_pages: int  # that the device knows


class DeviceSlots:
    """The requests in the slots of a device: a slot for each request with pages.

    While there are any, one step stays unread, so that the device has its next step before it ends
    this one.
    """

    def __init__(self, stepper: DeviceStepper | ReplicaStepper) -> None:
        self.stepper = stepper
        self.residents: dict[str, Resident] = {}  # by transfer id
        self._free_slots = list(range(stepper.layout.num_slots))
        self._generation = 0

    def has_ended(self) -> bool:
        """Whether a step can be read without waiting, and need not stay unread."""
        most_ahead = 1 if self.residents else 0
        return self.stepper.num_ahead > most_ahead and self.stepper.has_ended()

    def bring_up(self, request: DecodeRequest) -> None:
        """Makes sure that the request is on the device with all of its pages."""
        resident = self.residents.get(request.transfer_id)
        if resident is None:
            self._move_in(request)
            return
        first = resident.num_pages
        if first < len(request.pages):
            pages = np.asarray(request.page_ids[first:], dtype=np.int32)
            storable = len(request.pages) * self.stepper.step.page_size
            self.stepper.grow(resident.slot, first, pages, storable)
            resident.num_pages = len(request.pages)

    def remove(self, request: DecodeRequest) -> bool:
        """Frees the request's slot; False if it has none."""
        resident = self.residents.pop(request.transfer_id, None)
        if resident is None:
            return False
        self.stepper.leave(resident.slot)
        self._free_slots.append(resident.slot)
        return True

    def read(self) -> Iterator[tuple[DecodeRequest, StepPlan, StepOutcome | None]]:
        """Waits for the oldest step, and advances the sequences that took part to the device's
        state. Yields each with its plan and outcome; None if the model gave nothing finite."""
        records, layout = self.stepper.read(), self.stepper.layout
        for resident in list(self.residents.values()):
            request, record = resident.request, Record(records[resident.slot], layout)
            if record.column(Column.GENERATION) != resident.generation:
                continue  # of the slot's previous request
            if record.status is Status.FAILED:
                self.remove(request)
                yield request, request.open_step(), None
            elif record.column(RecordColumn.STEPPED):
                plan = request.close_step()
                outcome = apply_record(request.sequence, plan, record)
                if outcome.finish is not None:
                    # The device has ended it in that step: nothing in flight uses its pages.
                    self.remove(request)
                yield request, plan, outcome

    def _move_in(self, request: DecodeRequest) -> None:
        slot = self._free_slots.pop()
        self._generation = self._generation % _MOST_GENERATIONS + 1
        request.open_step()
        row = slot_row(
            self.stepper.layout,
            request.sequence,
            request.settings,
            request.asked.sampling,
            generation=self._generation,
            pages=request.page_ids,
            page_size=self.stepper.step.page_size,
        )
        self.stepper.join(slot, row, request.boundary)
        resident = Resident(request, slot, self._generation, len(request.pages))
        self.residents[request.transfer_id] = resident


@dataclass(frozen=True, slots=True)
class Record:
    """The state that a step left in one slot, with the next step opened, and its actions."""

    values: Integers  # [record_width]
    layout: SlotLayout

    def column(self, column: Column | RecordColumn) -> int:
        return int(self.values[column])

    @property
    def status(self) -> Status:
        return Status(self.column(Column.STATUS))

    @property
    def start(self) -> int:
        """First position in flight."""
        return self.column(Column.START)

    @property
    def tokens(self) -> Integers:
        """Of all blocks in flight from `start` on, with -1 for a mask."""
        num_tokens = self.column(Column.NUM_BLOCKS) * self.layout.block_size
        return self.values[NUM_RECORD_COLUMNS : NUM_RECORD_COLUMNS + num_tokens]


def apply_record(sequence: Sequence, plan: StepPlan, record: Record) -> StepOutcome:
    """`denoise.apply_step` with the device's choice: `record` is of the step of `plan`."""
    assert sequence.step_open
    sequence.step_open = False
    sequence.store(plan.num_stored)
    assert record.start == sequence.in_flight_start, "the device stored the rows of the plan"
    written: list[Block] = []
    for block in sequence.blocks:
        if block.masks_left:
            block.denoise_count += 1
            shown = record.tokens[block.start - record.start : block.end - record.start]
            is_new = (shown >= 0) & sequence.masked[block.start : block.end]
            if len(places := is_new.nonzero()[0]):
                sequence.write(block, places + block.start, shown[places].astype(np.int64))
                written.append(block)
    return settle_step(sequence, written)


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
    if settings.remasking in _REMASKINGS:  # a program with a window reads none
        row[Column.REMASKING] = _REMASKINGS.index(settings.remasking)
    row[Column.WINDOW] = settings.window
    row[Column.STEPS] = settings.denoising_steps
    row[Column.TOP_K] = sampling.top_k
    row[Column.ANSWER_INDEX] = sampling.answer_index
    row[Column.SCORE] = ScoreCode[settings.ranked_by.upper()]
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
