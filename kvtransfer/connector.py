"""What an engine asks of whatever moves pages, and what it is told in return.

One small protocol. thread.py runs it over any transport on a thread of its own, loopback.py without
one. Requests never block; answers are events that the engine polls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from effuse.kvtransfer.messages import BoundaryState, Manifest, ReceiverAddress, Reservation

PROMISES = 4
"""How often in each lease a sender says that pages are still to come, while it waits for them."""


class Cause(Enum):
    """Why a handoff was refused or failed."""

    MALFORMED = "malformed"  # not a message of the expected form, or beyond a cap
    UNKNOWN_TRANSFER = "unknown transfer"
    ATTEMPT = "attempt"
    INCARNATION = "incarnation"
    FINGERPRINT = "fingerprint"
    GENERATION = "generation"
    COVERAGE = "coverage"
    SIZE = "size"
    SEAL = "seal"  # the digest over the manifest, boundary state included
    DIGEST = "digest"  # of a page, over the memory that received it
    LEASE = "lease"
    UNRESERVED = "unreserved"  # nobody said in time where the pages go
    PEER = "peer"  # unreachable, gone, or its transport failed


def cause_of(value: str) -> Cause:
    """The cause that a peer names; MALFORMED for one that there is not."""
    return Cause(value) if value in {cause.value for cause in Cause} else Cause.MALFORMED


class HandoffRefused(Exception):
    """What arrived, or what was asked for, is not what was agreed. The message says both sides."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


T = TypeVar("T")
Pending = Callable[[], T | None]
"""Asked again and again, from the connector's thread; answers once it is there."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every page and the boundary state arrived and were verified; no writer is left."""

    transfer_id: str
    manifest: Manifest
    seconds: float  # as Pushed.seconds, less the receiver's word


@dataclass(frozen=True, slots=True)
class ArrivalRefused:
    """A transfer that was expected did not pass; its writer may still write."""

    transfer_id: str
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Promised:
    """The writer of a transfer says that its pages are still to come."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Nothing of a given-up transfer lands in its pages any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Route:
    """What moves the bytes of a push."""

    # memory, zmq over tcp, or UCX's name, such as cuda_ipc; "a or b" where it cannot be told which
    name: str
    is_fallback: bool = False  # pages of GPUs take TCP or the host, which nobody asked for


UNKNOWN = Route("unknown")


@dataclass(frozen=True, slots=True)
class Pushed:
    """The push is over and acknowledged: the source pages are free to be reused."""

    transfer_id: str
    pages: int
    num_bytes: int
    # From the later of two moments, the last page was final and the reservation was known, to the
    # receiver's word that all of it is verified.
    seconds: float
    route: Route = UNKNOWN
    moved_s: float = 0.0  # from the moment that the first page left, to the same end


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push will not succeed. Source pages are still in use until PushCancelled."""

    transfer_id: str
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class PushCancelled:
    """Nothing of this transfer reads or writes KV memory any more, and nothing of it will."""

    transfer_id: str


ConnectorEvent = Arrived | ArrivalRefused | Promised | Fenced | Pushed | PushFailed | PushCancelled


class Connector(Protocol):
    """Moves pages between pools. The engine's thread calls all methods; they return at once."""

    @property
    def name(self) -> str:
        """loopback, zmq or nixl."""
        ...

    def start(self) -> None:
        """Begins to work; describe() is valid from now on."""
        ...

    def close(self) -> None:
        """Ends everything, within a few seconds."""
        ...

    def describe(self) -> ReceiverAddress:
        """How a peer reaches this pool."""
        ...

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on, only from incarnation `writer` if that is known."""
        ...

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on.

        A two-sided connector answers with Fenced. A one-sided writer is only stopped by itself.
        """
        ...

    def fence(self, transfer_id: str, *, has_drained: bool) -> None:
        """The writer of a forgotten transfer writes no more: it said so, or it is gone.

        Answered with Fenced once nothing of it can land, that is, at once where the writer itself
        said that all it had posted is over (`has_drained`). Of a writer that is gone, bytes may
        still be under way to this process.
        """
        ...

    def push_pages(
        self,
        reservation: Reservation,
        source_pages: Sequence[int],
        first: int,
        num_final: Pending[int] | None = None,
    ) -> None:
        """Pages [first, first + n) of the reservation are in `source_pages`.

        `num_final` says how many groups of their layers are final, until all are; without it all
        are. May be called many times. With no pages it reaches the peer early, and later tells it
        that pages are still to come: the lease begins anew.
        """
        ...

    def finish(self, reservation: Reservation, boundary: Pending[BoundaryState]) -> None:
        """No more pages follow: delivers the manifest once all have landed. Ends the push."""
        ...

    def cancel(self, transfer_id: str) -> None:
        """Stops a push. Answered by PushCancelled, once nothing of it is in flight."""
        ...

    def forget_life(self, incarnation: str) -> None:
        """A receiver's life is over: gives back what is kept for it."""
        ...

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the connector's thread has ended."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while poll() has something."""
        ...


class ConnectorDied(RuntimeError):
    """The connector's thread ended by itself; the log says why."""
