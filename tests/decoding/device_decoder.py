"""Requests through the device stepper with a real model: prefill by the runner, then device steps.

Two steps are always in flight, like in the engine; there are fewer slots than requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decoding.engines import layout_of
from decoding.lockstep import final_len
from decoding.torch_step import TorchStep
from effuse.decode_worker.denoise import open_step
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_slots import Record, slot_row
from effuse.decode_worker.device_step import DeviceStep
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.request import DecodeRequest, prefill_part
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.step_slots import Column, RecordColumn, SlotLayout, Status
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import PageRef
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode


@dataclass(slots=True)
class Seat:
    request: DecodeRequest
    generation: int
    tokens: list[int] = field(default_factory=list)
    final_len: int = 0


class DeviceDecoder:
    """A few slots over one model; every request's pages are its slot's, given at once or late. All
    slots have the first `shared_pages` in common, for prompts that begin alike."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int = 4,
        page_size: int = 4,
        max_rows: int = 64,
        pages_come_late: bool = False,
        max_model_len: int = 128,
        shared_pages: int = 0,
        step_type: type[DeviceStep] = TorchStep,
    ) -> None:
        size = model.config.block_size
        pages = max_model_len // page_size
        self._layout = SlotLayout(num_slots, size, max_window=6, max_stops=16, max_pages=pages)
        self._page_size, self._late = page_size, pages_come_late
        memory = PageMemory(layout_of(model, page_size), num_slots * pages, model.device)
        order = torch.randperm(num_slots * pages, generator=torch.Generator().manual_seed(3))
        self._pages = order.view(num_slots, pages).int().numpy()
        self._pages[:, :shared_pages] = self._pages[0, :shared_pages]
        self._runner = ModelRunner(
            model, memory.layer_views(), page_size=page_size, block_size=size
        )
        kv = memory.layer_views()
        step = step_type(model, kv, self._layout, max_rows, page_size=page_size)
        self.stepper = DeviceStepper(step)
        self._intake = Intake(
            model.config,
            DecodeLimits(
                max_num_batched_tokens=4096,
                max_num_seqs=num_slots,
                max_model_len=max_model_len,
                num_pages=num_slots * pages,
                page_size=page_size,
                block_size=size,
            ),
        )
        self._seats: list[Seat | None] = [None] * num_slots
        self._storable = [0] * num_slots
        self.waits = 0

    def decode(self, messages: Sequence[StartDecode]) -> list[list[int]]:
        """The answers, in order."""
        waiting = deque(enumerate(messages))
        answers: dict[int, list[int]] = {}
        for _ in range(10_000):
            for slot, seat in enumerate(self._seats):
                if seat is None and waiting:
                    self._join(slot, *waiting.popleft())
            if not any(self._seats):
                return [answers[index] for index in range(len(messages))]
            while self.stepper.num_ahead < 2:
                self.stepper.launch()
            self._take(self.stepper.read(), answers)
        raise AssertionError("still decoding")

    def _join(self, slot: int, index: int, message: StartDecode) -> None:
        request = self._intake.make_request(message, arrival=index, now=0.0)
        sequence = request.sequence
        request.pages = [PageRef(int(page), 0) for page in self._pages[slot]]
        if sequence.first_block_start:
            part = prefill_part(request, sequence.first_block_start)
            request.boundary = self._runner.run([part])[0].boundary
            sequence.store(sequence.first_block_start)
        open_step(sequence, request.settings)
        given = -(-sequence.committed_len // self._page_size) if self._late else len(request.pages)
        row = slot_row(
            self._layout,
            sequence,
            request.settings,
            request.asked.sampling,
            generation=index + 1,
            pages=request.page_ids[:given],
            page_size=self._page_size,
        )
        self._storable[slot] = given
        self.stepper.join(slot, row, request.boundary)
        self._seats[slot] = Seat(request, index + 1, final_len=sequence.final_len)

    def _take(self, records: Integers, answers: dict[int, list[int]]) -> None:
        for slot, seat in enumerate(self._seats):
            record = Record(records[slot], self._layout)
            if seat is None or record.column(Column.GENERATION) != seat.generation:
                continue
            self._emit(seat, record)
            if record.status is Status.RUNNING:
                if record.column(RecordColumn.STEPPED) == 0:
                    self.waits += 1
                    self._grow(slot)
                continue
            assert record.status is not Status.FAILED
            answers[seat.generation - 1] = seat.tokens
            self._seats[slot] = None
            self.stepper.leave(slot)

    def _emit(self, seat: Seat, record: Record) -> None:
        sequence = seat.request.sequence
        begin = max(seat.final_len, sequence.prompt_len)
        end = min(final_len(record), sequence.answer_end)
        tokens = record.tokens[begin - record.start : max(begin, end) - record.start].tolist()
        seat.final_len = max(seat.final_len, final_len(record))
        for token in tokens:
            if token in sequence.stopping.stop_token_ids:
                assert record.status is Status.STOPPED
                return
            seat.tokens.append(token)

    def _grow(self, slot: int) -> None:
        given = self._storable[slot]
        if self._late and given < self._pages.shape[1]:
            self.stepper.grow(
                slot, given, self._pages[slot, given : given + 1], (given + 1) * self._page_size
            )
            self._storable[slot] += 1
