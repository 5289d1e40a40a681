"""The decode side of handoffs: pages open to a remote writer, until they are verified or fenced.

Turns connector events and leases into arrivals and failures of requests. Whether bytes are right is
the connector's check; when a failed attempt's pages may be reused is decided by `WriterGone` alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from effuse.decode_worker.request import Request
from effuse.kvtransfer.connector import Cause, Connector, Received, Refused
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.messages import (
    BoundaryState,
    PageRef,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.pool import PagePool
from effuse.worker.messages import FailureCode

_CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.PEER: "UNAVAILABLE",
    Cause.LEASE: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is to its peers."""

    incarnation: str
    fingerprint: Fingerprint
    page_bytes: int
    lease_s: float  # a push must end within this time from the reservation


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request's pages are verified and its own; no writer is left."""

    request: Request
    boundary: BoundaryState
    num_bytes: int
    handoff_s: float


@dataclass(frozen=True, slots=True)
class Missed:
    """A request's pages will not come."""

    request: Request
    code: FailureCode
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class _Open:
    request: Request
    since: float


class Handoffs:
    """Transfers into one pool. Without a connector only local prefill is served."""

    def __init__(self, pool: PagePool, identity: Identity, connector: Connector | None) -> None:
        self._pool = pool
        self._identity = identity
        self._connector = connector
        self._open: dict[str, _Open] = {}  # oldest first, one lease for all
        self._quarantined: dict[str, tuple[PageRef, ...]] = {}

    @property
    def can_receive(self) -> bool:
        return self._connector is not None

    def quarantined(self) -> Iterator[PageRef]:
        """Pages of ended transfers whose writer may still write."""
        for pages in self._quarantined.values():
            yield from pages

    def reserve(self, request: Request, now: float) -> Reservation:
        """Opens the request's pages to its writer; says how to reach them."""
        assert self._connector is not None
        reservation = self._reservation(request, self._connector.describe())
        self._pool.open(request.pages)
        self._connector.expect(reservation, request.writer)
        self._open[request.attempt.transfer_id] = _Open(request, now)
        return reservation

    def local(self, request: Request) -> Reservation:
        """The same event for a request that prefills here: nothing is open to anybody."""
        return self._reservation(request, ReceiverAddress(connector="local"))

    def poll(self, now: float) -> list[Arrived | Missed]:
        """What became of open transfers since the last call. All named ones are closed."""
        news: list[Arrived | Missed] = []
        for event in self._connector.poll() if self._connector is not None else ():
            match event:
                case Received(transfer_id, manifest) if transfer_id in self._open:
                    opened = self._open.pop(transfer_id)
                    self._pool.commit(opened.request.pages)
                    news.append(
                        Arrived(
                            opened.request,
                            manifest.boundary,
                            manifest.num_bytes,
                            now - opened.since,
                        )
                    )
                case Refused(transfer_id, cause, message) if transfer_id in self._open:
                    news.append(self._missed(transfer_id, cause, message))
                case _:
                    pass  # of a transfer that has ended here
        return news + self._expired(now)

    def give_up(self, request: Request) -> None:
        """Ends a transfer from this side; its pages stay out of reach until the writer is gone."""
        transfer_id = request.attempt.transfer_id
        if self._open.pop(transfer_id, None) is not None:
            self._abandon(request)

    def writer_gone(self, transfer_id: str) -> Missed | None:
        """Frees what was quarantined for this writer; a transfer still open is lost with it."""
        missed = None
        if transfer_id in self._open:
            missed = self._missed(transfer_id, Cause.PEER, "the prefill worker is gone")
        pages = self._quarantined.pop(transfer_id, None)
        if pages is not None:
            self._pool.fence(pages)
        return missed

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()

    def _expired(self, now: float) -> list[Arrived | Missed]:
        lease_s = self._identity.lease_s
        late = [name for name, opened in self._open.items() if now - opened.since >= lease_s]
        message = f"the prompt's pages did not arrive within {lease_s:g} s"
        return [self._missed(transfer_id, Cause.LEASE, message) for transfer_id in late]

    def _missed(self, transfer_id: str, cause: Cause, message: str) -> Missed:
        request = self._open.pop(transfer_id).request
        self._abandon(request)
        code = _CODES.get(cause, "DATA_LOSS")
        return Missed(request, code, message, retryable=cause is not Cause.FINGERPRINT)

    def _abandon(self, request: Request) -> None:
        assert self._connector is not None
        self._connector.forget(request.attempt.transfer_id)
        self._pool.quarantine(request.pages)
        self._quarantined[request.attempt.transfer_id] = tuple(request.pages)
        request.pages.clear()

    def _reservation(self, request: Request, address: ReceiverAddress) -> Reservation:
        is_remote = request.writer is not None
        return Reservation(
            attempt=request.attempt,
            incarnation=self._identity.incarnation,
            address=address,
            num_pool_pages=self._pool.num_pages,
            page_bytes=self._identity.page_bytes,
            pages=tuple(request.pages) if is_remote else (),
            fingerprint=self._identity.fingerprint,
            lease_s=self._identity.lease_s,
        )
