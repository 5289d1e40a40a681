"""The decode side of handoffs: pool, connector and state machine held together.

For one engine thread. Reports come from poll(); pages of a verified handoff belong to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from effuse.kvtransfer.connector import Cause, Connector, Received, Refused
from effuse.kvtransfer.handoff import (
    RECEIVER,
    Machine,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
)
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.messages import AttemptId, Manifest, PageRef, Reservation
from effuse.kvtransfer.pool import PagePool

ReceiverMachine = Machine[ReceiverState, ReceiverEvent, ReceiverDo]


@dataclass(frozen=True, slots=True)
class HandoffVerified:
    """Pages and boundary state are complete and right; the pages are the caller's from now on."""

    attempt: AttemptId
    pages: tuple[PageRef, ...]
    manifest: Manifest
    seconds: float  # from the reservation, checks included


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The handoff did not work. Its pages stay in quarantine until writer_gone()."""

    attempt: AttemptId
    cause: Cause
    message: str


HandoffReport = HandoffVerified | HandoffFailed


@dataclass(slots=True)
class _Handoff:
    reservation: Reservation
    machine: ReceiverMachine


class HandoffReceiver:
    """All handoffs that come into one pool. Times are the caller's, on any one monotonic clock."""

    def __init__(
        self,
        pool: PagePool,
        connector: Connector,
        *,
        incarnation: str,
        fingerprint: Fingerprint,
        page_bytes: int,
        lease_s: float,
    ) -> None:
        self._pool = pool
        self._connector = connector
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._lease_s = lease_s
        self._time = 0.0  # when the caller last said what time it is
        self._handoffs: dict[str, _Handoff] = {}  # oldest first

    def is_open(self, transfer_id: str) -> bool:
        """Whether this transfer still holds pages here, in quarantine or not."""
        return transfer_id in self._handoffs

    def quarantined(self) -> Iterator[PageRef]:
        """Pages of given-up handoffs whose writer may still write; for the audit."""
        for handoff in self._handoffs.values():
            if handoff.machine.state is ReceiverState.ABORTING:
                yield from handoff.reservation.pages

    def reserve(
        self, attempt: AttemptId, pages: tuple[PageRef, ...], writer: str | None, now: float
    ) -> Reservation:
        """Opens reserved pages to `writer`, the incarnation of the prefill worker that may push.

        The reservation that it returns may be sent at once.
        """
        if attempt.transfer_id in self._handoffs:
            raise ValueError(f"transfer {attempt.transfer_id} is reserved already")
        self._time = now
        reservation = self._reservation(attempt, pages)
        machine = Machine(RECEIVER, ReceiverState.RESERVED, now, self._lease_s)
        self._handoffs[attempt.transfer_id] = _Handoff(reservation, machine)
        for do in machine.handle(ReceiverEvent.OFFERED, now):
            if do is ReceiverDo.OPEN_PAGES:
                self._pool.open(pages)
            else:
                self._connector.expect(reservation, writer)
        return reservation

    def abort(self, transfer_id: str) -> None:
        """Gives a handoff up, unreported. Its pages are free again only after writer_gone()."""
        if transfer_id in self._handoffs:
            self._handle(transfer_id, ReceiverEvent.ABORTED)

    def writer_gone(self, transfer_id: str) -> HandoffFailed | None:
        """Nothing writes into this transfer's pages any more, for certain. Frees them.

        Returns what became of a handoff that was still open.
        """
        if transfer_id not in self._handoffs:
            return None
        reason = Cause.PEER, "the prefill worker is gone"
        return self._handle(transfer_id, ReceiverEvent.WRITER_GONE, reason)

    def poll(self, now: float) -> list[HandoffReport]:
        """What has come to an end since the last call."""
        self._time = now
        reports: list[HandoffReport | None] = []
        for event in self._connector.poll():
            if event.transfer_id not in self._handoffs:
                continue  # it has ended here
            if isinstance(event, Received):
                reports.append(self._arrived(event))
            elif isinstance(event, Refused):
                reason = event.cause, event.message
                reports.append(self._handle(event.transfer_id, ReceiverEvent.REFUSED, reason))
        reports += self._expired()
        return [report for report in reports if report is not None]

    def _reservation(self, attempt: AttemptId, pages: tuple[PageRef, ...]) -> Reservation:
        return Reservation(
            attempt=attempt,
            incarnation=self._incarnation,
            address=self._connector.describe(),
            num_pool_pages=self._pool.num_pages,
            page_bytes=self._page_bytes,
            pages=pages,
            fingerprint=self._fingerprint,
            lease_s=self._lease_s,
        )

    def _arrived(self, event: Received) -> HandoffVerified | None:
        handoff = self._handoffs[event.transfer_id]
        verified = None
        for do in handoff.machine.handle(ReceiverEvent.ARRIVED, self._time):
            if do is ReceiverDo.COMMIT_PAGES:
                self._pool.commit(handoff.reservation.pages)
                continue
            del self._handoffs[event.transfer_id]
            seconds = self._time - handoff.machine.started
            attempt, pages = handoff.reservation.attempt, handoff.reservation.pages
            verified = HandoffVerified(attempt, pages, event.manifest, seconds)
        return verified

    def _expired(self) -> list[HandoffFailed | None]:
        late = [
            transfer_id
            for transfer_id, handoff in self._handoffs.items()
            if handoff.machine.is_overdue(self._time)
            and handoff.machine.allows(ReceiverEvent.EXPIRED)
        ]
        reason = Cause.LEASE, f"the prompt's pages did not arrive within {self._lease_s:g} s"
        return [self._handle(name, ReceiverEvent.EXPIRED, reason) for name in late]

    def _handle(
        self, transfer_id: str, event: ReceiverEvent, reason: tuple[Cause, str] | None = None
    ) -> HandoffFailed | None:
        handoff = self._handoffs[transfer_id]
        pages = handoff.reservation.pages
        failed = None
        for do in handoff.machine.handle(event, self._time):
            match do:
                case ReceiverDo.FORGET:
                    self._connector.forget(transfer_id)
                case ReceiverDo.QUARANTINE_PAGES:
                    self._pool.quarantine(pages)
                case ReceiverDo.FENCE_PAGES:
                    self._pool.fence(pages)
                case ReceiverDo.REPORT_FAILED:
                    assert reason is not None, event
                    failed = HandoffFailed(handoff.reservation.attempt, *reason)
                case _:
                    raise AssertionError(f"{do.name} does not follow from {event.name}")
        if handoff.machine.state is ReceiverState.RELEASED:
            del self._handoffs[transfer_id]
        return failed
