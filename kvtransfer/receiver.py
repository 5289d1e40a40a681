"""The decode side of handoffs: coordinates pool, connector and state machine.

For one engine thread. Reports come from poll(); pages of a verified handoff belong to the caller.
"""

import secrets
from dataclasses import dataclass

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cause,
    Connector,
    Expect,
    Fence,
    Fenced,
    Forget,
    Promised,
)
from effuse.kvtransfer.handoff import (
    RECEIVER,
    Machine,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
)
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import AttemptId, PageRef, Reservation, Shard
from effuse.kvtransfer.pool import PagePool

ReceiverMachine = Machine[ReceiverState, ReceiverEvent, ReceiverDo]
ReceiveReport = Arrived | ArrivalRefused


@dataclass(slots=True)
class _Incoming:
    reservation: Reservation
    writer: str | None
    machine: ReceiverMachine


class HandoffReceiver:
    """All incoming handoffs of one pool; none if there is no connector.

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
        shards = self._connector.describe()
        reservation = self._reservation(attempt, pages, shards, num_held, num_written)
        machine = Machine(RECEIVER, ReceiverState.RESERVED, now, self._lease_s)
        self._handoffs[attempt.transfer_id] = _Incoming(reservation, writer, machine)
        self._handle(attempt.transfer_id, ReceiverEvent.OFFERED)
        return reservation

    def local(self, attempt: AttemptId) -> Reservation:
        """The same for an attempt that prefills here: the pages are open to no writer."""
        return self._reservation(attempt, (), ())

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
            if isinstance(event, Arrived):
                reports.append(self._handle(event.transfer_id, ReceiverEvent.ARRIVED, event))
            elif isinstance(event, ArrivalRefused):
                reports.append(self._handle(event.transfer_id, ReceiverEvent.REFUSED, event))
            elif isinstance(event, Promised):
                self._handoffs[event.transfer_id].machine.renew(now, self._lease_s)
            elif isinstance(event, Fenced):
                self._handle(event.transfer_id, ReceiverEvent.FENCED)
        reports += self._expired()
        return [report for report in reports if report is not None]

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()

    def _reservation(
        self,
        attempt: AttemptId,
        pages: tuple[PageRef, ...],
        shards: tuple[Shard, ...],
        num_held: int = 0,
        num_written: int = 0,
    ) -> Reservation:
        return Reservation(
            attempt=attempt,
            incarnation=self._own.incarnation,
            shards=shards,
            num_pool_pages=self._pool.num_pages,
            pages=pages,
            fingerprint=self._own.fingerprint,
            digest_seed=self._digest_seed,
            lease_s=self._lease_s,
            num_held=num_held,
            num_written=num_written,
        )

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
        report: ReceiveReport | None = None,
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
                    assert report is not None, event
                    due = report
        if handoff.machine.state in (ReceiverState.RELEASED, ReceiverState.VERIFIED):
            del self._handoffs[transfer_id]
        return due
