"""Runs denoise steps on the device: launches one, then reads the records of the previous one.

It moves requests into device slots, gives them pages before the device needs them, and follows
their records, one step behind. The host feeds prompts and canvases beside the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_slots import Record, apply_record, slot_row
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.executor import (
    NOT_FINITE,
    Broken,
    Denoised,
    HostExecutor,
    Share,
    StepResult,
)
from effuse.decode_worker.request import DecodeRequest
from effuse.kernels.step_slots import RecordColumn, Status
from effuse.worker.engine_process import ForwardFailed, ForwardGuard

_MOST_GENERATIONS = 2**31 - 1


@dataclass(slots=True, eq=False)
class Resident:
    """A request in a slot of the device."""

    request: DecodeRequest
    slot: int
    generation: int
    num_pages: int  # that the device knows


class DeviceExecutor:
    """An Executor with the same tokens as `HostExecutor`. While requests are on the device, one
    step stays unread, so that the device has its next step before it ends this one.
    """

    runs_ahead = True

    def __init__(self, prompts: HostExecutor, stepper: DeviceStepper) -> None:
        """`prompts` runs the host's forwards; there is a slot for each request with pages."""
        self.counters = prompts.counters
        self._prompts = prompts
        self._stepper = stepper
        self._guard = ForwardGuard()
        self._residents: dict[str, Resident] = {}  # by transfer id
        self._free_slots = list(range(stepper.layout.num_slots))
        self._generation = 0
        self._results: list[StepResult] = []  # that are in no record

    @property
    def is_full(self) -> bool:
        return self._stepper.num_ahead > 1

    @property
    def is_running(self) -> bool:
        return bool(self._results) or self._stepper.num_ahead > 0

    def launch(self, shares: Sequence[Share]) -> bool:
        """As in `Executor`; requests that were once granted rows take part until they end."""
        from_host = [share for share in shares if share.request.runs_from_host]
        for share in shares:
            if not share.request.runs_from_host:
                self._bring_up(share.request)
        has_prompts = self._prompts.launch(from_host)
        self._results += self._prompts.read()
        if not self._residents:
            return has_prompts
        self._launch_step()
        return True

    def has_results(self) -> bool:
        self._prompts.has_results()  # none are left, but layers may have ended
        if self._results:
            return True
        most_ahead = 1 if self._residents else 0
        return self._stepper.num_ahead > most_ahead and self._stepper.has_ended()

    def read(self) -> list[StepResult]:
        if self._results:
            results, self._results = self._results, []
            return results
        return self._read_records()

    def remove(self, request: DecodeRequest) -> bool:
        self._prompts.remove(request)
        resident = self._residents.get(request.attempt.transfer_id)
        if resident is not None:
            self._move_out(resident)
        return resident is not None

    def copy_page(self, source: int, target: int) -> None:
        self._prompts.copy_page(source, target)

    # Before a step.

    def _bring_up(self, request: DecodeRequest) -> None:
        """Makes sure that the request is on the device with all of its pages."""
        resident = self._residents.get(request.attempt.transfer_id)
        if resident is None:
            self._move_in(request)
            return
        first = resident.num_pages
        if first < len(request.pages):
            pages = np.asarray(request.page_ids[first:], dtype=np.int32)
            storable = len(request.pages) * self._stepper.page_size
            self._stepper.grow(resident.slot, first, pages, storable)
            resident.num_pages = len(request.pages)

    def _move_in(self, request: DecodeRequest) -> None:
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
            page_size=self._stepper.page_size,
        )
        self._stepper.join(slot, row, request.boundary)
        resident = Resident(request, slot, self._generation, len(request.pages))
        self._residents[request.attempt.transfer_id] = resident

    def _move_out(self, resident: Resident) -> None:
        del self._residents[resident.request.attempt.transfer_id]
        self._stepper.leave(resident.slot)
        self._free_slots.append(resident.slot)

    def _launch_step(self) -> None:
        """Launches a step; if that fails, only the requests on the device fail."""
        self.counters.steps += 1
        self.counters.requests += len(self._residents)
        try:
            self._guard.run(self._stepper.launch, len(self._residents))
        except ForwardFailed as failure:
            for resident in list(self._residents.values()):
                self._move_out(resident)
                self._results.append(Broken(resident.request, str(failure), is_retryable=True))
            while self._stepper.num_ahead:
                self._read_step()  # none of its work may still run when pages are released

    # After a step.

    def _read_step(self) -> Integers:
        """Records of the oldest step; waits for it, and shows signs of life meanwhile."""
        self._prompts.wait(self._stepper.has_ended)
        return self._stepper.read()

    def _read_records(self) -> list[StepResult]:
        records = self._read_step()
        results: list[StepResult] = []
        for resident in list(self._residents.values()):
            record = Record(records[resident.slot], self._stepper.layout)
            if record.column(RecordColumn.GENERATION) != resident.generation:
                continue  # of the slot's previous request
            if record.status is Status.FAILED:
                self._move_out(resident)
                results.append(Broken(resident.request, NOT_FINITE, is_retryable=False))
            elif record.column(RecordColumn.STEPPED):
                results.append(self._follow(resident, record))
        return results

    def _follow(self, resident: Resident, record: Record) -> Denoised:
        """Advances a request's sequence to the device's state."""
        request = resident.request
        plan = request.close_step()
        outcome = apply_record(request.sequence, plan, record)
        self.counters.rows += plan.end - plan.start
        if outcome.finish is not None:
            # The device has ended it in that step: nothing in flight uses its pages.
            self._move_out(resident)
        return Denoised(request, outcome)
