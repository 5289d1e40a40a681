"""The decode side of handoffs: pool, connector and state machine held together.

For one engine thread. Reports come from poll(); pages of a verified handoff belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """All handoffs that come into one pool."""

    def __init__(
        self,
        pool: PagePool,
        connector: Connector,
        *,
        incarnation: str,
        fingerprint: Fingerprint,
        page_bytes: int,
        lease_s: float,
        now: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._connector = connector
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._lease_s = lease_s
        self._now = now
        self._handoffs: dict[str, _Handoff] = {}
        self._reports: list[HandoffReport] = []

    def __len__(self) -> int:
        return len(self._handoffs)

    def is_open(self, transfer_id: str) -> bool:
        """Whether this transfer still holds pages here, in quarantine or not."""
        return transfer_id in self._handoffs

    def held(self) -> Iterator[PageRef]:
        """Every page of an open handoff; for the audit."""
        for handoff in self._handoffs.values():
            yield from handoff.reservation.pages

    def reserve(self, attempt: AttemptId, pages: tuple[PageRef, ...], writer: str) -> Reservation:
        """Opens reserved pages to `writer`, the incarnation of the prefill worker that may push.

        The reservation that it returns may be sent at once.
        """
        if attempt.transfer_id in self._handoffs:
            raise ValueError(f"transfer {attempt.transfer_id} is reserved already")
        now = self._now()
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

    def writer_gone(self, transfer_id: str) -> None:
        """Nothing writes into this transfer's pages any more, for certain."""
        if transfer_id in self._handoffs:
            self._handle(transfer_id, ReceiverEvent.WRITER_GONE, Cause.PEER, "the writer went away")

    def poll(self) -> list[HandoffReport]:
        """What has come to an end since the last call."""
        for event in self._connector.poll():
            if isinstance(event, Received) and event.transfer_id in self._handoffs:
                self._arrived(event)
            elif isinstance(event, Refused) and event.transfer_id in self._handoffs:
                self._handle(event.transfer_id, ReceiverEvent.REFUSED, event.cause, event.message)
        self._expire()
        reports, self._reports = self._reports, []
        return reports

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

    def _arrived(self, event: Received) -> None:
        handoff = self._handoffs[event.transfer_id]
        now = self._now()
        for do in handoff.machine.handle(ReceiverEvent.ARRIVED, now):
            if do is ReceiverDo.COMMIT_PAGES:
                self._pool.commit(handoff.reservation.pages)
                continue
            del self._handoffs[event.transfer_id]
            self._reports.append(
                HandoffVerified(
                    handoff.reservation.attempt,
                    handoff.reservation.pages,
                    event.manifest,
                    now - handoff.machine.started,
                )
            )

    def _expire(self) -> None:
        now = self._now()
        for transfer_id, handoff in list(self._handoffs.items()):
            machine = handoff.machine
            if machine.is_overdue(now) and machine.allows(ReceiverEvent.EXPIRED):
                text = f"the push did not arrive within its lease of {self._lease_s} s"
                self._handle(transfer_id, ReceiverEvent.EXPIRED, Cause.LEASE, text)

    def _handle(
        self,
        transfer_id: str,
        event: ReceiverEvent,
        cause: Cause = Cause.PEER,
        message: str = "",
    ) -> None:
        handoff = self._handoffs[transfer_id]
        pages = handoff.reservation.pages
        for do in handoff.machine.handle(event, self._now()):
            match do:
                case ReceiverDo.FORGET:
                    self._connector.forget(transfer_id)
                case ReceiverDo.QUARANTINE_PAGES:
                    self._pool.quarantine(pages)
                case ReceiverDo.FENCE_PAGES:
                    self._pool.fence(pages)
                case ReceiverDo.RELEASE_PAGES:
                    self._pool.release(pages)
                case ReceiverDo.REPORT_FAILED:
                    failed = HandoffFailed(handoff.reservation.attempt, cause, message)
                    self._reports.append(failed)
                case _:
                    raise AssertionError(f"{do.name} does not follow from {event.name}")
        if handoff.machine.state is ReceiverState.RELEASED:
            del self._handoffs[transfer_id]
