"""The prefill side of handoffs: coordinates connector and state machine.

For one engine thread. Reports come from poll(). Source pages belong to the caller, which may reuse
them only after Ended.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import (
    PROMISES,
    Cancel,
    Cause,
    Connector,
    ConnectorEvent,
    FinishPush,
    ForgetLife,
    Pending,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.handoff import SENDER, Machine, SenderDo, SenderEvent, SenderState
from effuse.kvtransfer.messages import AttemptId, BoundaryState, Reservation

SenderMachine = Machine[SenderState, SenderEvent, SenderDo]

OVERTIME_S = 5.0  # after the lease, which the connector itself enforces but may be stuck


@dataclass(frozen=True, slots=True)
class Ended:
    """This transfer does not read the source pages any more."""

    transfer_id: str


SendReport = Pushed | PushFailed | Ended


@dataclass(slots=True)
class _Outgoing:
    attempt: AttemptId
    machine: SenderMachine
    reservation: Reservation | None = None
    # when the receiver next gets the message that pages are still to come
    promise_at: float = math.inf
    # Source pages that were not pushed yet, in order, with functions for their progress.
    ready: list[tuple[Sequence[int], Pending[int] | None]] = field(default_factory=list)
    num_passed: int = 0  # source pages that were pushed, or that the receiver has
    boundary: Pending[BoundaryState] | None = None


class HandoffSender:
    """All outgoing handoffs of one pool."""

    def __init__(
        self, connector: Connector, *, reservation_s: float, now: Callable[[], float]
    ) -> None:
        self._connector, self.close = connector, connector.close
        self._reservation_s = reservation_s
        self._now = now
        self._handoffs: dict[str, _Outgoing] = {}
        self._reports: list[SendReport] = []

    def begin(self, attempt: AttemptId) -> None:
        """A prompt will be computed; its pages wait for a reservation."""
        assert attempt.transfer_id not in self._handoffs, attempt
        machine = Machine(SENDER, SenderState.COMPUTING, self._now(), math.inf)
        self._handoffs[attempt.transfer_id] = _Outgoing(attempt, machine)

    def awaits_reservation(self, transfer_id: str) -> bool:
        """Whether this handoff has not ended and its destination is not known."""
        handoff = self._handoffs.get(transfer_id)
        return handoff is not None and handoff.reservation is None

    def address(self, reservation: Reservation) -> None:
        """Sets the destination of the pages; final ones are pushed immediately."""
        handoff = self._handoffs[reservation.transfer_id]
        assert handoff.reservation is None, reservation.transfer_id
        handoff.reservation = reservation
        self._promise(handoff, reservation)  # reaches the peer while pages are computed
        self._handle(handoff, SenderEvent.ADDRESSED)

    def pages_ready(
        self, transfer_id: str, source_pages: Sequence[int], num_final: Pending[int] | None = None
    ) -> None:
        """Further pages are final, or will be by layers with `num_final` (see Connector)."""
        handoff = self._handoffs[transfer_id]
        handoff.ready.append((source_pages, num_final))
        self._handle(handoff, SenderEvent.PAGES_READY)

    def computed(self, transfer_id: str, boundary: Pending[BoundaryState]) -> None:
        """No more pages follow; `boundary` goes with them once it exists."""
        handoff = self._handoffs[transfer_id]
        handoff.boundary = boundary
        if handoff.reservation is None:
            handoff.machine.renew(self._now(), self._reservation_s)
        self._handle(handoff, SenderEvent.COMPUTED)

    def abort(self, transfer_id: str) -> None:
        """Abandons a handoff, with no other report than Ended; no effect if it has ended."""
        handoff = self._handoffs.get(transfer_id)
        if handoff is not None:
            self._handle(handoff, SenderEvent.ABORTED)

    def forget_life(self, incarnation: str) -> None:
        """A decode worker's engine has ended."""
        self._connector.send(ForgetLife(incarnation))

    def poll(self) -> list[SendReport]:
        """Events since the last call, in order."""
        for event in self._connector.poll():
            handoff = self._handoffs.get(event.transfer_id)
            if handoff is not None:
                self._hear(handoff, event)
        self.keep_promises()
        self._expire()
        reports, self._reports = self._reports, []
        return reports

    def keep_promises(self) -> None:
        """Keeps reservations of unfinished prompts, because a prompt in a queue still lives.

        poll() does so too; this is for callers that cannot poll for long.
        """
        for handoff in self._handoffs.values():
            is_due = handoff.machine.state is SenderState.PUSHING and (
                handoff.promise_at <= self._now()
            )
            if is_due and handoff.reservation is not None:
                self._promise(handoff, handoff.reservation)

    def _hear(self, handoff: _Outgoing, event: ConnectorEvent) -> None:
        match event:
            case Pushed():
                self._handle(handoff, SenderEvent.ACKNOWLEDGED, event)
            case PushFailed():
                self._handle(handoff, SenderEvent.FAILED, event)
            case PushCancelled():
                self._handle(handoff, SenderEvent.DRAINED)
            case _:
                pass  # of incoming transfers

    def _promise(self, handoff: _Outgoing, reservation: Reservation) -> None:
        now, lease_s = self._now(), reservation.lease_s
        handoff.machine.renew(now, lease_s + OVERTIME_S)
        handoff.promise_at = now + lease_s / PROMISES
        self._connector.send(PushPages(reservation, (), 0))

    def _expire(self) -> None:
        now = self._now()
        for handoff in list(self._handoffs.values()):
            machine = handoff.machine
            if not machine.is_overdue(now) or not machine.allows(SenderEvent.EXPIRED):
                continue
            if handoff.reservation is None:
                cause = Cause.UNRESERVED
                text = f"no reservation arrived within {self._reservation_s:g} s"
            else:
                cause = Cause.LEASE
                lease_s = handoff.reservation.lease_s
                text = f"the push did not end within its lease of {lease_s:g} s"
            failed = PushFailed(handoff.attempt.transfer_id, cause, text)
            self._handle(handoff, SenderEvent.EXPIRED, failed)

    def _handle(
        self, handoff: _Outgoing, event: SenderEvent, report: SendReport | None = None
    ) -> None:
        transfer_id = handoff.attempt.transfer_id
        for do in handoff.machine.handle(event, self._now()):
            match do:
                case SenderDo.PUSH:
                    self._push(handoff)
                case SenderDo.FINISH:
                    assert handoff.reservation is not None and handoff.boundary is not None
                    self._connector.send(FinishPush(handoff.reservation, handoff.boundary))
                case SenderDo.CANCEL:
                    self._connector.send(Cancel(transfer_id))
                case SenderDo.FREE_PAGES:
                    del self._handoffs[transfer_id]
                    self._reports.append(Ended(transfer_id))
                case SenderDo.REPORT_PUSHED | SenderDo.REPORT_FAILED:
                    assert report is not None, event
                    self._reports.append(report)

    def _push(self, handoff: _Outgoing) -> None:
        reservation = handoff.reservation
        assert reservation is not None, "the pages have no destination yet"
        degree = self._connector.describe()[0].part.turns  # prompt's pages in one of ours
        for pages, num_final in handoff.ready:
            first = handoff.num_passed * degree
            first -= reservation.num_held * reservation.context_degree
            handoff.num_passed += len(pages)
            num_held = max(0, -first // degree)
            if wanted := tuple(pages[num_held:]):
                first += num_held * degree
                self._connector.send(PushPages(reservation, wanted, first, num_final))
        handoff.ready.clear()
