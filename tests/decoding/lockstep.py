"""Random requests through the device's state machine and the pure one, step by step, side by side.

At every step the device's rows are compared with the pure machine's input to the forward, and its
records with the pure machine's state. Requests join and leave at any time, buckets are sometimes
too small, and pages sometimes come late. Slots are packed in any order, and runs of them share
beginnings.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from operators.torch_plan import Views
from torch import Tensor

from decoding.invariants import make_sequence
from decoding.runs import Runs
from decoding.scripts import Case, random_case
from effuse.config.decoding import Sampling
from effuse.decode_worker import denoise
from effuse.decode_worker.denoise import AnswerEnd
from effuse.decode_worker.device_slots import Record, apply_record, slot_row
from effuse.decode_worker.sequence import HostCandidates as Proposed
from effuse.decode_worker.sequence import Sequence
from effuse.kernels.step_slots import (
    BlockColumn,
    Column,
    Control,
    RecordColumn,
    SlotLayout,
    SlotTable,
    Status,
    StepRows,
)
from effuse.kernels.values import Candidates, ScoreCode
from effuse.models.packing import pack_parts
from effuse.models.part import Part

PAGE_SIZE = 4
NUM_PAGES = 64
NEVER = 1 << 20

Plan = Callable[[SlotTable, Tensor, StepRows, int, bool, bool], None]
Advance = Callable[[SlotTable, Tensor, Tensor, Candidates, Tensor], None]


@dataclass(frozen=True)
class Machine:
    """One implementation of the device's state machine."""

    plan: Plan  # table, control, rows, num_rows, shift, shares
    advance: Advance


@dataclass
class Seat:
    """A slot's request, in the pure machine."""

    case: Case
    sequence: Sequence
    sampling: Sampling
    pages: list[int]
    generation: int
    num_pages: int = 0  # that the device knows


@dataclass
class Seen:
    """How often a run met its rare cases."""

    steps: int = 0
    left_out: int = 0
    waited_for_pages: int = 0
    failed: int = 0
    stopped: int = 0
    ended: int = 0
    settled_together: int = 0
    semi_writes: int = 0
    shared: int = 0  # pages of beginnings that are read together
    split_runs: int = 0


@dataclass
class Lockstep:
    """Some slots, one device machine, one pure machine a request."""

    machine: Machine
    seed: int
    block_size: int
    shift: bool
    num_slots: int = 5
    num_requests: int = 12
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        self.draw = random.Random(f"lockstep/{self.seed}")
        self.layout = SlotLayout(
            self.num_slots, self.block_size, max_window=5, max_stops=3, max_pages=NUM_PAGES
        )
        device = torch.device("cpu")
        self.table = SlotTable(self.layout, device)
        self.rows = StepRows(self.layout, 256, device)
        self.control = torch.zeros(4, dtype=torch.int32)
        self.control[Control.FIRST_SLOT] = self.draw.randrange(self.num_slots)
        self.records = torch.full((self.num_slots, self.layout.record_width), -9).int()
        self.seats: list[Seat | None] = [None] * self.num_slots
        self.runs = Runs(self.num_slots, PAGE_SIZE)
        self.cases = iter(self._cases())

    def run(self) -> Seen:
        for _ in range(NEVER):
            self._join()
            if not any(self.seats):
                return self.seen
            self._step()
        raise AssertionError("never ends")

    def _cases(self) -> list[Case]:
        cases: list[Case] = []
        seed = self.seed * 1000
        while len(cases) < self.num_requests:
            seed += 1
            case = random_case(seed)
            if case.block_size == self.block_size:
                cases.append(case)
        return cases

    def _join(self) -> None:
        for slot, seat in enumerate(self.seats):
            if seat is None and self.draw.random() < 0.6:
                case = next(self.cases, None)
                if case is not None:
                    self._seat(slot, case)

    def _seat(self, slot: int, case: Case) -> None:
        sequence = make_sequence(case)
        denoise.open_step(sequence, case.settings)
        sampling = Sampling(
            temperature=self.draw.choice((0.0, 0.7)),
            top_p=self.draw.choice((1.0, 0.9)),
            top_k=self.draw.choice((0, 8)),
            seed=self.draw.randrange(2**64),
            answer_index=slot % 3,
        )
        pages = self.draw.sample(range(NUM_PAGES), NUM_PAGES // 2)
        seat = Seat(case, sequence, sampling, pages, generation=self.draw.randrange(2**31))
        seat.num_pages = -(-sequence.committed_len // PAGE_SIZE) + self.draw.choice((0, 4))
        row = slot_row(
            self.layout,
            sequence,
            case.settings,
            sampling,
            generation=seat.generation,
            pages=pages[: seat.num_pages],
            page_size=PAGE_SIZE,
        )
        self.table.rows[slot] = torch.from_numpy(row)
        self.seats[slot] = seat

    def _grow(self) -> None:
        for slot, seat in enumerate(self.seats):
            if seat is not None and self.draw.random() < 0.7:
                seat.num_pages = min(seat.num_pages + 2, len(seat.pages))
                self.table.storable[slot] = seat.num_pages * PAGE_SIZE
                pages = torch.tensor(seat.pages[: seat.num_pages])
                self.table.pages[slot, : seat.num_pages] = pages.int()

    def _step(self) -> None:
        num_rows = self.draw.choice((7, 10, 16, 32)) * self.block_size
        limit = self.draw.choice((num_rows, num_rows // 2, 6 * self.block_size))
        self.control[Control.MASK_LIMIT] = limit
        starts = [seat.sequence.in_flight_start if seat else None for seat in self.seats]
        shares = self.runs.draw(self.draw, starts, self.table)
        self.machine.plan(self.table, self.control, self.rows, num_rows, self.shift, shares)
        taken = self._check_rows(num_rows, limit)
        self.seen.steps += 1
        positions = self.rows.sampling.position
        counts = self.rows.sampling.denoise_count
        found = [self._propose(slot, positions, counts) for slot in taken]
        columns = zip(*((c.tokens, c.confidences, c.scores) for c in found), strict=True)
        joined = [torch.from_numpy(np.concatenate(column)) for column in columns]
        if not joined:
            joined = [torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0)]
        candidates = Candidates(*joined)
        first = self.rows.first_candidate.clone()
        self.machine.advance(self.table, self.control, first, candidates, self.records)
        own = dict(zip(taken, found, strict=True))
        for slot, seat in enumerate(self.seats):
            if seat is not None:
                self._check_record(slot, seat, own.get(slot))
        self._grow()

    def _propose(self, slot: int, positions: Tensor, counts: Tensor) -> Proposed:
        seat = self.seats[slot]
        assert seat is not None
        begin = int(self.rows.first_candidate[slot])
        end = begin + int(seat.sequence.masked.sum())
        found = seat.case.script.candidates(
            positions[begin:end].tolist(), counts[begin:end].tolist()
        )
        if self.draw.random() < 0.004:
            broken = self.draw.choice((found.confidences, found.scores))
            broken[self.draw.randrange(len(found))] = self.draw.choice(
                (float("nan"), float("inf"), float("-inf"))
            )
        return found

    def _check_rows(self, num_rows: int, limit: int) -> list[int]:
        """The rows are those of the pure machine's plans; the slots in them, in order."""
        part = self.rows.first_candidate.tolist()
        begin = self.runs.order.index(int(self.control[Control.FIRST_SLOT]))
        order = self.runs.order[begin:] + self.runs.order[:begin]
        taken = [slot for slot in order if part[slot] >= 0]
        self._check_fairness(order, taken, num_rows, limit)
        parts = [self._part(slot) for slot in taken]
        used = sum(len(part.token_ids) for part in parts)
        ends = np.cumsum([len(part.token_ids) for part in parts]).tolist()
        cu = self.rows.cu_seqlens.tolist()
        assert cu == [0, *ends] + [used] * (self.num_slots - len(parts))
        assert used <= num_rows
        if parts:
            self._check_packed(parts, taken, used)
        if self.runs.shares:
            self.runs.check(self.rows, self.table, begin, taken)
            self.seen.shared += sum(map(self.runs.pages_of, taken))
            self.seen.split_runs += self.runs.is_split(self.rows)
        assert (self.rows.slot_mapping[used:num_rows] == -1).all()
        assert (self.rows.token_ids[used:num_rows] == 0).all()
        return taken

    def _check_fairness(self, order: list[int], taken: list[int], rows: int, masks: int) -> None:
        """Slots are taken in turn until rows or candidates run out; the next is first next time."""
        left_out = []
        for slot in order:
            seat = self.seats[slot]
            if seat is None:
                assert slot not in taken
                continue
            plan = denoise.open_step(seat.sequence, seat.case.settings)
            if plan.start + plan.num_stored > seat.num_pages * PAGE_SIZE:
                assert slot not in taken
                self.seen.waited_for_pages += 1
                continue
            rows -= plan.end - plan.start
            masks -= len(plan.candidates)
            assert (slot in taken) == (rows >= 0 and masks >= 0)
            left_out += [] if slot in taken else [slot]
        self.seen.left_out += len(left_out)
        following = int(self.control[Control.NEXT_FIRST_SLOT])
        assert following == [*left_out, order[0]][0]

    def _part(self, slot: int) -> Part:
        seat = self.seats[slot]
        assert seat is not None
        plan = denoise.open_step(seat.sequence, seat.case.settings)
        return Part(
            token_ids=seat.sequence.token_ids[plan.start : plan.end].tolist(),
            start=plan.start,
            pages=seat.pages,
            num_stored=plan.num_stored,
            block_origin=seat.sequence.origin,
            candidates=plan.candidates.tolist(),
            boundary=torch.zeros(1),
            keep_boundary=plan.num_stored > 0,
            denoise_counts=plan.denoise_counts.tolist(),
            sampling=seat.sampling,
            score=ScoreCode[seat.case.settings.ranked_by.upper()],
        )

    def _check_packed(self, parts: list[Part], taken: list[int], used: int) -> None:
        packed, rows = pack_parts(parts, page_size=PAGE_SIZE, shift=self.shift), self.rows
        count = packed.num_candidates
        boundary = np.full(count, -1)
        for index, _ in packed.boundary_candidates:
            boundary[index] = taken[
                np.searchsorted(rows.first_candidate[taken].numpy(), index, "right") - 1
            ]
        shared = [self.runs.pages_of(slot) for slot in taken]
        apart = torch.tensor(shared) * PAGE_SIZE
        sampling = rows.sampling
        integers = (
            sampling.top_k,
            sampling.seed,
            sampling.answer_index,
            sampling.position,
            sampling.denoise_count,
            sampling.score,
        )
        pairs = [
            (rows.token_ids[:used], packed.token_ids),
            (rows.positions[:used], packed.positions),
            (rows.slot_mapping[:used], packed.slots),
            (rows.hidden_rows[:count], packed.wanted_rows[:count]),
            (rows.boundary_slots[:count], boundary),
            (sampling.temperature[:count], packed.sampling_floats[0]),
            (sampling.top_p[:count], packed.sampling_floats[1]),
            (rows.context_lens[: len(parts)] + apart, [part.start for part in parts]),
            (rows.block_origins[: len(parts)] + apart, [part.block_origin for part in parts]),
            *((ours[:count], theirs) for ours, theirs in zip(
                integers, packed.sampling_integers, strict=True)),
        ]  # fmt: skip
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours.numpy(), theirs)
        kept = [first + part.num_stored - 1 if part.num_stored else -1
                for first, part in zip(rows.cu_seqlens.tolist(), parts, strict=False)]  # fmt: skip
        assert rows.kept_rows[taken].tolist() == kept
        for index, part in enumerate(parts):
            own = list(part.pages[shared[index] : -(-part.start // PAGE_SIZE)])
            assert rows.page_table[index, : len(own)].tolist() == own

    def _check_record(self, slot: int, seat: Seat, found: Proposed | None) -> None:
        record = Record(self.records[slot].numpy(), self.layout)
        assert record.column(Column.GENERATION) == seat.generation
        assert record.column(RecordColumn.STEPPED) == (found is not None)
        sequence, settings = seat.sequence, seat.case.settings
        if found is None:
            assert record.status is Status.RUNNING
            assert self._same_state(slot, record, sequence)
            return
        if not found.is_finite():
            assert record.status is Status.FAILED
            self._leave(slot)
            self.seen.failed += 1
            return
        plan = denoise.open_step(sequence, settings)
        mirror = copy.deepcopy(sequence)
        outcome = denoise.apply_step(sequence, settings, plan, found)
        assert apply_record(mirror, plan, record) == outcome
        assert mirror.blocks == sequence.blocks
        assert mirror.frontier() == sequence.frontier()
        num_settled = record.column(Column.NUM_SETTLED)
        assert num_settled == outcome.num_settled
        assert record.column(RecordColumn.NUM_WRITTEN) == len(plan.candidates) - int(
            sequence.masked[plan.start : plan.end].sum()
        )
        assert final_len(record) == sequence.final_len
        self.seen.settled_together += outcome.num_settled > 1
        self.seen.semi_writes += any(not block.full for block in outcome.written)
        if outcome.finish is None:
            denoise.open_step(sequence, settings)
            assert record.status is Status.RUNNING
        else:
            stopped = outcome.finish is AnswerEnd.STOP
            assert record.status is (Status.STOPPED if stopped else Status.ENDED)
            self.seen.stopped += stopped
            self.seen.ended += not stopped
            self._leave(slot)
        assert self._same_state(slot, record, sequence)

    def _same_state(self, slot: int, record: Record, sequence: Sequence) -> bool:
        """Whether record and slot equal the sequence with its next step opened."""
        blocks, size = sequence.blocks, self.block_size
        span = slice(sequence.in_flight_start, sequence.in_flight_end)
        shown = np.where(sequence.masked[span], -1, sequence.token_ids[span])
        num_settled = len(blocks) - len(sequence.active)
        views = Views(self.table)
        places = [(block.start - sequence.origin) // size % self.layout.ring for block in blocks]
        full, counts = (
            views.blocks(x)[slot, places] for x in (BlockColumn.FULL, BlockColumn.COUNT)
        )
        return (
            record.start == sequence.in_flight_start
            and record.column(Column.NUM_SETTLED) == num_settled
            and record.column(Column.STOP_SEEN) == sequence.stop_seen
            and record.column(Column.NUM_MASKS) == sum(block.masks_left for block in blocks)
            and full.tolist() == [block.full for block in blocks]
            and counts.tolist() == [block.denoise_count for block in blocks]
            and np.array_equal(record.tokens, shown)
        )

    def _leave(self, slot: int) -> None:
        self.seats[slot] = None
        if self.draw.random() < 0.5:
            self.table.rows[slot, 0] = int(Status.EMPTY)


def final_len(record: Record) -> int:
    """Leading tokens that can no longer change."""
    return record.start + record.column(Column.NUM_SETTLED) * record.layout.block_size
