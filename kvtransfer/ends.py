"""The two ends of a handoff for an engine: each coordinates connector and state machine, and the
decode side the pool as well.

For one engine thread. Reports come from poll().
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from effuse.kvtransfer.connector import (
    PROMISES,
    ArrivalRefused,
    Arrived,
    Cancel,
    Cause,
    Connector,
    ConnectorEvent,
    Expect,
    Fence,
    Fenced,
    FinishPush,
    Forget,
    ForgetLife,
    Pending,
    Promised,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.handoff import (
    RECEIVER,
    SENDER,
    Machine,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
    SenderDo,
    SenderEvent,
    SenderState,
)
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import AttemptId, BoundaryState, PageRef, Reservation
from effuse.kvtransfer.pool import PagePool

ReceiverMachine = Machine[ReceiverState, ReceiverEvent, ReceiverDo]
ReceiveReport = Arrived | ArrivalRefused
_RECEIVED: Mapping[type[ConnectorEvent], ReceiverEvent] = {
    Arrived: ReceiverEvent.ARRIVED,
    ArrivalRefused: ReceiverEvent.REFUSED,
    Fenced: ReceiverEvent.FENCED,
}


@dataclass(slots=True)
class _Incoming:
    reservation: Reservation
    writer: str | None
    machine: ReceiverMachine


class HandoffReceiver:
    """All incoming handoffs of one pool; none if there is no connector. Pages of a verified one
    belong to the caller.

    Times are the caller's, on one monotonic clock.
    """

    def __init__(
        self, pool: PagePool, connector: Connector | None, own: Identity, lease_s: float
    ) -> None:
        """lease_s: time for a push, from the reservation or from its writer's last report that
        pages are still to come."""
        self._pool = pool
        self._connector = connector
        self._own = own
        self._lease_s = lease_s
        self._digest_seed = secrets.randbits(63)
        self._time = 0.0  # the caller's last time
        self._handoffs: dict[str, _Incoming] = {}  # oldest first

    @property
    def can_receive(self) -> bool:
        return self._connector is not None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all ranks."""
        return self._own.layout.span_bytes

    @property
    def context_degree(self) -> int:
        """Pages of a writer for which a page has room."""
        return self._own.layout.context_degree

    def is_open(self, transfer_id: str) -> bool:
        """Whether this transfer still holds pages here, in quarantine or not."""
        return transfer_id in self._handoffs

    def reserve(
        self,
        attempt: AttemptId,
        pages: tuple[PageRef, ...],
        writer: str | None,
        now: float,
        num_held: int = 0,
        num_written: int = 0,
    ) -> Reservation:
        """Opens reserved pages to `writer`, the incarnation of the prefill worker that may push.

        The returned reservation may be sent immediately. num_held: pages before these that nobody
        writes. num_written: as of `Reservation`.
        """
        if attempt.transfer_id in self._handoffs:
            raise ValueError(f"transfer {attempt.transfer_id} is already reserved")
        assert self._connector is not None, "this worker cannot receive now"
        self._time = now
        reservation = replace(
            self.local(attempt),
            shards=self._connector.describe(),
            pages=pages,
            num_held=num_held,
            num_written=num_written,
        )
        machine = Machine(RECEIVER, ReceiverState.RESERVED, now, self._lease_s)
        self._handoffs[attempt.transfer_id] = _Incoming(reservation, writer, machine)
        self._handle(attempt.transfer_id, ReceiverEvent.OFFERED)
        return reservation

    def local(self, attempt: AttemptId) -> Reservation:
        """The same for an attempt that prefills here: the pages are open to no writer."""
        return Reservation(
            attempt=attempt,
            incarnation=self._own.incarnation,
            shards=(),
            num_pool_pages=self._pool.num_pages,
            pages=(),
            fingerprint=self._own.fingerprint,
            digest_seed=self._digest_seed,
            lease_s=self._lease_s,
        )

    def abort(self, transfer_id: str) -> None:
        """Abandons a handoff without a report. Its pages become free once nothing can arrive."""
        if transfer_id in self._handoffs:
            self._handle(transfer_id, ReceiverEvent.ABORTED)

    def writer_gone(self, transfer_id: str, *, has_drained: bool) -> ReceiveReport | None:
        """The writer writes no more into this transfer's pages: it reported that all its writes
        have ended, or it is gone. Returns the failure of a handoff that was still open.
        """
        if transfer_id not in self._handoffs:
            return None
        failed = ArrivalRefused(transfer_id, Cause.PEER, "the prefill worker has ended")
        return self._handle(transfer_id, ReceiverEvent.WRITER_GONE, failed, has_drained)

    def poll(self, now: float) -> list[ReceiveReport]:
        """Results since the last call. Pages of a verified handoff are the caller's now."""
        self._time = now
        if self._connector is None:
            return []
        reports: list[ReceiveReport | None] = []
        for event in self._connector.poll():
            if event.transfer_id not in self._handoffs:
                continue  # it has ended here
            if isinstance(event, Promised):
                self._handoffs[event.transfer_id].machine.renew(now, self._lease_s)
            elif (kind := _RECEIVED.get(type(event))) is not None:
                reports.append(self._handle(event.transfer_id, kind, event))
        reports += self._expired()
        return [report for report in reports if report is not None]

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()

    def _expired(self) -> list[ReceiveReport | None]:
        late = [
            transfer_id
            for transfer_id, handoff in self._handoffs.items()
            if handoff.machine.is_overdue(self._time)
            and handoff.machine.allows(ReceiverEvent.EXPIRED)
        ]
        text = f"the prompt's pages did not arrive within {self._lease_s:g} s"
        failed = (ArrivalRefused(name, Cause.LEASE, text) for name in late)
        return [self._handle(one.transfer_id, ReceiverEvent.EXPIRED, one) for one in failed]

    def _handle(
        self,
        transfer_id: str,
        event: ReceiverEvent,
        report: ConnectorEvent | None = None,
        has_drained: bool = False,
    ) -> ReceiveReport | None:
        """Follows the table; returns `report` if that is due."""
        handoff = self._handoffs[transfer_id]
        pages = handoff.reservation.pages
        assert self._connector is not None, "the reservation has received data"
        due = None
        for do in handoff.machine.handle(event, self._time):
            match do:
                case ReceiverDo.OPEN_PAGES:
                    self._pool.open(pages)
                case ReceiverDo.EXPECT:
                    self._connector.send(Expect(handoff.reservation, handoff.writer))
                case ReceiverDo.COMMIT_PAGES:
                    self._pool.commit(pages)
                case ReceiverDo.FORGET:
                    self._connector.send(Forget(transfer_id))
                case ReceiverDo.QUARANTINE_PAGES:
                    self._pool.quarantine(pages)
                case ReceiverDo.FENCE:
                    self._connector.send(Fence(transfer_id, has_drained))
                case ReceiverDo.FREE_PAGES:
                    self._pool.fence(pages)
                case ReceiverDo.REPORT_VERIFIED | ReceiverDo.REPORT_FAILED:
                    assert isinstance(report, Arrived | ArrivalRefused), event
                    due = report
        if handoff.machine.state in (ReceiverState.RELEASED, ReceiverState.VERIFIED):
            del self._handoffs[transfer_id]
        return due


SenderMachine = Machine[SenderState, SenderEvent, SenderDo]
_SENT: Mapping[type[ConnectorEvent], SenderEvent] = {
    Pushed: SenderEvent.ACKNOWLEDGED,
    PushFailed: SenderEvent.FAILED,
    PushCancelled: SenderEvent.DRAINED,
}

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
    """All outgoing handoffs of one pool. Source pages belong to the caller, which may reuse them
    only after Ended."""

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
        self.wait_longer(transfer_id)
        self._handle(handoff, SenderEvent.COMPUTED)

    def wait_longer(self, transfer_id: str) -> None:
        """A reservation that has not arrived is due `reservation_s` from now."""
        if (handoff := self._handoffs[transfer_id]).reservation is None:
            handoff.machine.renew(self._now(), self._reservation_s)

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
            handoff, kind = self._handoffs.get(event.transfer_id), _SENT.get(type(event))
            if handoff is not None and kind is not None:  # and not of an incoming transfer
                self._handle(handoff, kind, event)
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
        self, handoff: _Outgoing, event: SenderEvent, report: ConnectorEvent | None = None
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
                    assert isinstance(report, Pushed | PushFailed), event
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
