"""Planted bugs, each a patch of product code: a simulation is worth as many as it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast
from unittest.mock import PropertyMock, patch

from msgspec.structs import replace

from effuse.decode_worker import engine as decode_engine
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.intake import Boundary, step_events
from effuse.decode_worker.request import BlockCost, DecodeRequest
from effuse.kvtransfer import reception
from effuse.kvtransfer.handoff import (
    RECEIVER,
    SENDER,
    Expected,
    Machine,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
    SenderDo,
    SenderEvent,
    SenderState,
)
from effuse.kvtransfer.messages import Envelope, Reservation
from effuse.kvtransfer.push import Push
from effuse.kvtransfer.reception import Receptions
from effuse.placement import leases as fleet
from effuse.placement.records import MalformedRecord, PlacementRecord
from effuse.placement.writer import PlacementWriter
from effuse.prefill_worker.prompts import Prompt
from effuse.router import shared_request
from effuse.router.shared_request import SharedRequest
from effuse.v1.generation_pb2 import GenerateStreamResponse
from effuse.worker.messages import Committed, CoreEvent

Patch = AbstractContextManager[object]
_identified = Receptions._identified
_expect = Receptions.expect
_fence = Receptions.fence
_is_overdue = Machine.is_overdue
_first_record = SharedRequest._first_record
_send = SharedRequest.send
_end = SharedRequest.end


def digests_not_compared() -> Patch:
    return patch.object(reception, "check_digest", lambda *_: None)


def pages_and_generations_not_compared() -> Patch:
    return patch.object(reception, "check_span", lambda *_: None)


def attempt_not_compared() -> Patch:
    def identified(self: Receptions, one: Envelope) -> Expected:
        expected = self._expected.get(one.attempt.transfer_id)
        ours = one.attempt if expected is None else expected.reservation.attempt
        return _identified(self, replace(one, attempt=ours))

    return patch.object(Receptions, "_identified", identified)


def incarnation_not_compared() -> Patch:
    def identified(self: Receptions, one: Envelope) -> Expected:
        return _identified(self, replace(one, destination=self._own.incarnation))

    return patch.object(Receptions, "_identified", identified)


def any_writer_let_in() -> Patch:
    def expect(self: Receptions, reservation: Reservation, writer: str | None) -> None:
        _expect(self, reservation, None)

    return patch.object(Receptions, "expect", expect)


def fence_skipped() -> Patch:
    def fence(self: Receptions, transfer_id: str, *, has_drained: bool) -> None:
        _fence(self, transfer_id, has_drained=True)

    return patch.object(Receptions, "fence", fence)


def prompt_not_compared() -> Patch:
    return patch.object(Boundary, "accept", lambda *_: None)


def pages_freed_at_abort() -> Patch:
    instructions = ReceiverDo.FORGET, ReceiverDo.QUARANTINE_PAGES, ReceiverDo.FREE_PAGES
    key = ReceiverState.RECEIVING, ReceiverEvent.ABORTED
    table = cast(dict[object, object], RECEIVER)
    return patch.dict(table, {key: (ReceiverState.RELEASED, instructions)})


def pages_freed_when_the_lease_ends() -> Patch:
    instructions = (
        *(ReceiverDo.FORGET, ReceiverDo.QUARANTINE_PAGES),
        *(ReceiverDo.FREE_PAGES, ReceiverDo.REPORT_FAILED),
    )
    key = ReceiverState.RECEIVING, ReceiverEvent.EXPIRED
    table = cast(dict[object, object], RECEIVER)
    return patch.dict(table, {key: (ReceiverState.RELEASED, instructions)})


def source_freed_at_abort() -> Patch:
    end = SenderState.ENDED, (SenderDo.CANCEL, SenderDo.FREE_PAGES)
    states = SenderState.PUSHING, SenderState.FINISHING
    table = cast(dict[object, object], SENDER)
    return patch.dict(table, {(state, SenderEvent.ABORTED): end for state in states})


def drained_before_writes_are_over() -> Patch:
    return patch.object(Push, "is_quiet", PropertyMock(return_value=True))


def running_forward_forgotten() -> Patch:
    return patch.object(Prompt, "is_being_written", PropertyMock(return_value=False))


def handoff_lease_judged_early() -> Patch:
    def is_overdue(self: Machine[ReceiverState, ReceiverEvent, ReceiverDo], now: float) -> bool:
        return _is_overdue(self, now + 1.98)

    return patch.object(Machine, "is_overdue", is_overdue)


def leases_judged_while_stale() -> Patch:
    return patch.object(fleet.Snapshot, "is_stale", lambda *_: False)


def no_grace_after_staleness() -> Patch:
    return patch.object(fleet, "GRACE_S", 0.0)


def committed_twice() -> Patch:
    def events(request: DecodeRequest, outcome: object) -> list[CoreEvent]:
        said = step_events(request, outcome, BlockCost())  # type: ignore[arg-type]
        return [*(one for one in said if isinstance(one, Committed)), *said]

    return patch.object(decode_engine, "step_events", events)


def freed_pages_released_again() -> Patch:
    def end(self: DecodeEngine, request: DecodeRequest) -> None:
        if self._handoffs.is_open(request.transfer_id):
            self._handoffs.abort(request.transfer_id)
            request.pages.clear()
        self.roster.remove(request)

    return patch.object(DecodeEngine, "_end", end)


def ids_not_claimed() -> Patch:
    async def claim(self: SharedRequest) -> None:
        self._record = self._first_record()

    return patch.object(SharedRequest, "claim", claim)


def claimed_in_nobodys_name() -> Patch:
    def first_record(self: SharedRequest) -> PlacementRecord:
        return replace(_first_record(self), router_id="nobody")

    return patch.object(SharedRequest, "_first_record", first_record)


def seed_of_the_run_before_forgotten() -> Patch:
    def decode(value: bytes) -> PlacementRecord:
        raise MalformedRecord("planted")

    return patch.object(shared_request, "decode_placement", decode)


def answers_not_kept() -> Patch:
    return patch.object(PlacementWriter, "keep", lambda *_: None)


def answers_forgotten_until_redis_has_them() -> Patch:
    return patch.object(PlacementWriter, "unwritten_answer", lambda *_: None)


def answers_kept_without_their_last_tokens() -> Patch:
    async def send(self: SharedRequest, event: GenerateStreamResponse) -> None:
        if self._whole is not None and 0 not in self._whole._responses:
            await _send(self, event)

    return patch.object(SharedRequest, "send", send)


def cancelled_requests_not_ended_in_redis() -> Patch:
    def end(self: SharedRequest, last: GenerateStreamResponse | None) -> None:
        if last is not None:
            _end(self, last)

    return patch.object(SharedRequest, "end", end)


MUTANTS: Sequence[Callable[[], Patch]] = (
    digests_not_compared,
    pages_and_generations_not_compared,
    attempt_not_compared,
    incarnation_not_compared,
    any_writer_let_in,
    fence_skipped,
    prompt_not_compared,
    pages_freed_at_abort,
    pages_freed_when_the_lease_ends,
    source_freed_at_abort,
    drained_before_writes_are_over,
    running_forward_forgotten,
    handoff_lease_judged_early,
    leases_judged_while_stale,
    no_grace_after_staleness,
    committed_twice,
    freed_pages_released_again,
    ids_not_claimed,
    claimed_in_nobodys_name,
    seed_of_the_run_before_forgotten,
    answers_not_kept,
    answers_forgotten_until_redis_has_them,
    answers_kept_without_their_last_tokens,
    cancelled_requests_not_ended_in_redis,
)
