"""The decode side of handoffs: pages open to a remote writer, until they are verified or fenced.

Turns ends of handoffs into arrivals and failures of requests. The handoff itself, its states and
its leases are kvtransfer's receiver.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from effuse.decode_worker.request import Request
from effuse.kvtransfer.connector import Cause, Connector
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.messages import (
    BoundaryState,
    PageRef,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver, HandoffVerified
from effuse.worker.messages import FailureCode

_CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.PEER: "UNAVAILABLE",
    Cause.LEASE: "DEADLINE_EXCEEDED",
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


class Handoffs:
    """Transfers into one pool. Without a connector only local prefill is served."""

    def __init__(self, pool: PagePool, identity: Identity, connector: Connector | None) -> None:
        self._num_pages = pool.num_pages
        self._identity = identity
        self._connector = connector
        self._requests: dict[str, Request] = {}  # whose transfer is open
        self._receiver = None if connector is None else _receiver(pool, identity, connector)

    @property
    def can_receive(self) -> bool:
        return self._receiver is not None

    def quarantined(self) -> Iterator[PageRef]:
        """Pages of ended transfers whose writer may still write."""
        if self._receiver is not None:
            yield from self._receiver.quarantined()

    def reserve(self, request: Request, now: float) -> Reservation:
        """Opens the request's pages to its writer; says how to reach them."""
        assert self._receiver is not None
        self._requests[request.attempt.transfer_id] = request
        return self._receiver.reserve(request.attempt, tuple(request.pages), request.writer, now)

    def local(self, request: Request) -> Reservation:
        """The same event for a request that prefills here: nothing is open to anybody."""
        return Reservation(
            attempt=request.attempt,
            incarnation=self._identity.incarnation,
            address=ReceiverAddress(connector="local"),
            num_pool_pages=self._num_pages,
            page_bytes=self._identity.page_bytes,
            pages=(),
            fingerprint=self._identity.fingerprint,
            lease_s=self._identity.lease_s,
        )

    def poll(self, now: float) -> list[Arrived | Missed]:
        """What became of open transfers since the last call. All named ones are closed."""
        if self._receiver is None:
            return []
        return [
            self._arrived(report) if isinstance(report, HandoffVerified) else self._missed(report)
            for report in self._receiver.poll(now)
        ]

    def give_up(self, request: Request) -> None:
        """Ends a transfer from this side; its pages stay out of reach until the writer is gone."""
        transfer_id = request.attempt.transfer_id
        if self._receiver is not None and self._requests.pop(transfer_id, None) is not None:
            self._receiver.abort(transfer_id)
            request.pages.clear()

    def writer_gone(self, transfer_id: str) -> Missed | None:
        """Frees what was quarantined for this writer; a transfer still open is lost with it."""
        if self._receiver is None:
            return None
        failed = self._receiver.writer_gone(transfer_id)
        return None if failed is None else self._missed(failed)

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()

    def _arrived(self, report: HandoffVerified) -> Arrived:
        request = self._requests.pop(report.attempt.transfer_id)
        manifest = report.manifest
        return Arrived(request, manifest.boundary, manifest.num_bytes, report.seconds)

    def _missed(self, report: HandoffFailed) -> Missed:
        request = self._requests.pop(report.attempt.transfer_id)
        request.pages.clear()
        code = _CODES.get(report.cause, "DATA_LOSS")
        retryable = report.cause is not Cause.FINGERPRINT
        return Missed(request, code, report.message, retryable=retryable)


def _receiver(pool: PagePool, identity: Identity, connector: Connector) -> HandoffReceiver:
    return HandoffReceiver(
        pool,
        connector,
        incarnation=identity.incarnation,
        fingerprint=identity.fingerprint,
        page_bytes=identity.page_bytes,
        lease_s=identity.lease_s,
    )
