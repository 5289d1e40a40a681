"""The requests that denoise on a device: their slots, and their sequences, one step behind.

It gives requests slots, and pages before the device needs them, and follows the device's records.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from effuse.decode_worker.denoise import StepOutcome, StepPlan
from effuse.decode_worker.device_records import Record, apply_record, slot_row
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.request import DecodeRequest
from effuse.kernels.step_slots import RecordColumn, Status

_MOST_GENERATIONS = 2**31 - 1


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

    def __init__(self, stepper: DeviceStepper) -> None:
        self.stepper = stepper
        self.residents: dict[str, Resident] = {}  # by transfer id
        self._free_slots = list(range(stepper.layout.num_slots))
        self._generation = 0

    @property
    def num_ahead(self) -> int:
        """Steps that were launched but not read."""
        return self.stepper.num_ahead

    def has_ended(self) -> bool:
        """Whether a step can be read without waiting, and need not stay unread."""
        most_ahead = 1 if self.residents else 0
        return self.stepper.num_ahead > most_ahead and self.stepper.has_ended()

    def bring_up(self, request: DecodeRequest) -> None:
        """Makes sure that the request is on the device with all of its pages."""
        resident = self.residents.get(request.attempt.transfer_id)
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
        resident = self.residents.pop(request.attempt.transfer_id, None)
        if resident is None:
            return False
        self.stepper.leave(resident.slot)
        self._free_slots.append(resident.slot)
        return True

    def read(self) -> Iterator[tuple[DecodeRequest, StepPlan, StepOutcome | None]]:
        """Waits for the oldest step, and advances the sequences that took part to the device's
        state. Yields each with its plan and outcome; None if the model gave nothing finite.
        """
        records, layout = self.stepper.read(), self.stepper.layout
        for resident in list(self.residents.values()):
            request, record = resident.request, Record(records[resident.slot], layout)
            if record.column(RecordColumn.GENERATION) != resident.generation:
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
            request.sampling,
            generation=self._generation,
            pages=request.page_ids,
            page_size=self.stepper.step.page_size,
        )
        self.stepper.join(slot, row, request.boundary)
        resident = Resident(request, slot, self._generation, len(request.pages))
        self.residents[request.attempt.transfer_id] = resident
