"""The decode engine whose denoising lives on the device: it launches a step, then reads the last.

Admission, prefill, handoffs and messages are `engine.py`'s. Here requests move into device slots,
get pages before the device needs them, and are followed through records, one step behind. What no
slot has room for (a very wide window, many stop ids) is denoised as `engine.py` does it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from effuse.decode_worker import scheduler
from effuse.decode_worker.boundary import Boundary
from effuse.decode_worker.device_mirror import apply_record
from effuse.decode_worker.device_slots import Record, row_fits, slot_row
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.engine import DecodeEngine, Forward, Work, work_of
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.request import Request
from effuse.decode_worker.scheduler import Demand
from effuse.kernels.step_slots import RecordColumn, Status
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.receiver import HandoffReceiver

LOG = logging.getLogger(__name__)

_MOST_GENERATIONS = 2**31 - 1
_MOST_FAILED_STEPS = 8  # in a row; then the device is taken for lost and the process ends


@dataclass(slots=True, eq=False)
class Resident:
    """A request in a slot of the device."""

    request: Request
    slot: int
    generation: int
    num_pages: int  # that the device knows of


class DeviceDecodeEngine(DecodeEngine):
    """An EngineCore with the messages of `DecodeEngine`, for the same tokens."""

    def __init__(
        self,
        forward: Forward,
        pool: PagePool,
        intake: Intake,
        handoffs: HandoffReceiver,
        boundary: Boundary,
        stepper: DeviceStepper,
        *,
        now: Callable[[], float],
        max_request_s: float,
    ) -> None:
        super().__init__(
            forward, pool, intake, handoffs, boundary, now=now, max_request_s=max_request_s
        )
        self._stepper = stepper
        self._residents: dict[str, Resident] = {}  # by transfer id
        self._free_slots = list(range(stepper.layout.num_slots))
        self._generation = 0
        self._failed_steps = 0

    def step(self) -> bool:
        """Hears of arrivals, admits, prefills, launches a step, and takes the last one's records.

        One step is launched while another runs, and neither is waited for: until the older one has
        ended, only arrivals are heard. While requests are on the device one step is left unread.
        """
        has_moved = self._hear() | self._admit() | self._read_ended()
        if self._stepper.num_ahead > 1:
            return has_moved
        has_worked = self._give_rows()
        has_launched = bool(self._residents)
        if has_launched:
            self._launch()
        return self._read_ended() or has_moved or has_worked or has_launched

    def is_working(self) -> bool:
        """Whether a step that was launched has not been read."""
        return self._stepper.num_ahead > 0

    # Before a step.

    def _give_rows(self) -> bool:
        """Preempts, runs what the host feeds, moves requests in, hands pages on.

        True if there was a forward.
        """
        running = list(self._seats.running)
        demands = [self._demand(request) for request in running]
        schedule = scheduler.schedule(demands, num_free=self._pool.num_free, limits=self._limits)
        if schedule.preempted and self._stepper.num_ahead:
            # What was launched must land before pages change hands; it may free some, too.
            self._read_all()
            return self._give_rows()
        for index in schedule.preempted:
            self._preempt(running[index])
        work: list[Work] = []
        for request, demand, rows in zip(running, demands, schedule.rows, strict=True):
            if not rows:
                continue
            self._take_pages(request, max(0, demand.pages_wanted - demand.pages_held))
            if request.num_to_prefill or not self._fits_slot(request):
                work.append(work_of(request, rows))
            else:
                self._bring_up(request)
        for item, result in zip(work, self._run(work) if work else [], strict=False):
            self._apply(item, result)
        self._is_stalled = not work and not self._residents
        return bool(work)

    def _demand(self, request: Request) -> Demand:
        """Of pages, all that two steps can store: the device is one step ahead of its records."""
        demand = request.demand(self._limits)
        if request.num_to_prefill or not self._fits_slot(request):
            return demand
        sequence = request.sequence
        end = min(sequence.in_flight_end, sequence.last_block_start)
        return replace(demand, pages_wanted=max(demand.pages_wanted, self._limits.pages_for(end)))

    def _fits_slot(self, request: Request) -> bool:
        return row_fits(self._stepper.layout, request.sequence, request.settings)

    def _bring_up(self, request: Request) -> None:
        """Sees to it that the request is on the device with all of its pages."""
        resident = self._residents.get(request.attempt.transfer_id)
        if resident is None:
            self._move_in(request)
            return
        first = resident.num_pages
        if first < len(request.pages):
            pages = np.asarray(request.page_ids[first:], dtype=np.int32)
            storable = len(request.pages) * self._limits.page_size
            self._stepper.grow(resident.slot, first, pages, storable)
            resident.num_pages = len(request.pages)

    def _move_in(self, request: Request) -> None:
        slot = self._free_slots.pop()
        self._generation = self._generation % _MOST_GENERATIONS + 1
        request.open_step()
        row = slot_row(
            self._stepper.layout,
            request.sequence,
            request.settings,
            request.sampling,
            generation=self._generation,
            pages=request.page_ids,
            page_size=self._limits.page_size,
        )
        self._stepper.join(slot, row, request.boundary)
        resident = Resident(request, slot, self._generation, len(request.pages))
        self._residents[request.attempt.transfer_id] = resident

    def _launch(self) -> None:
        """Launches a step; where that fails, only who was on the device fails."""
        self.counters.steps += 1
        try:
            self._stepper.launch()
        except Exception:
            LOG.exception("a step of %d requests failed", len(self._residents))
            self._failed_steps += 1
            if self._failed_steps >= _MOST_FAILED_STEPS:
                raise
            self._fail_residents()
            return
        self._failed_steps = 0

    def _fail_residents(self) -> None:
        failed = [resident.request for resident in self._residents.values()]
        for resident in list(self._residents.values()):
            self._move_out(resident)
        self._read_all()
        for request in failed:
            self._fail(request, "INTERNAL", "the model failed in this step", retryable=True)

    # After a step.

    def _read_ended(self) -> bool:
        """Takes the records of steps that have ended, but for the last one while requests are on
        the device; True if there were any."""
        has_read = False
        while self._stepper.num_ahead > (1 if self._residents else 0) and self._stepper.has_ended():
            has_read = True
            self._read()
        return has_read

    def _read_all(self) -> None:
        """Waits for all launched steps and takes their records."""
        while self._stepper.num_ahead:
            self._read()

    def _read(self) -> None:
        """Takes the records of the oldest step."""
        records = self._stepper.read()
        for resident in list(self._residents.values()):
            record = Record(records[resident.slot], self._stepper.layout)
            if record.column(RecordColumn.GENERATION) == resident.generation:
                self._follow(resident, record)

    def _follow(self, resident: Resident, record: Record) -> None:
        request = resident.request
        if record.status is Status.FAILED:
            self._move_out(resident)
            self._fail(request, "INTERNAL", "the model gave no finite probabilities")
            return
        if not record.column(RecordColumn.STEPPED):
            return
        plan = request.open_step()
        outcome = apply_record(request.sequence, plan, record)
        request.plan = None
        request.forward_passes += 1
        self.counters.rows += plan.end - plan.start
        self.counters.observe(outcome)
        if outcome.finish is not None:
            # The device has ended it in that very step: nothing in flight touches its pages.
            self._move_out(resident)
            self._end(request)
        self._outbox.progress(request, outcome)

    def _move_out(self, resident: Resident) -> None:
        del self._residents[resident.request.attempt.transfer_id]
        self._stepper.leave(resident.slot)
        self._free_slots.append(resident.slot)

    def _preempt(self, request: Request) -> None:
        resident = self._residents.get(request.attempt.transfer_id)
        if resident is not None:
            assert not self._stepper.num_ahead, "its last record has been read"
            self._move_out(resident)
        super()._preempt(request)

    def _end(self, request: Request) -> None:
        """As in `DecodeEngine`; what was launched for the request lands before its pages go."""
        resident = self._residents.get(request.attempt.transfer_id)
        if resident is not None:
            self._move_out(resident)
            self._read_all()
        super()._end(request)
