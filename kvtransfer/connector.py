"""What an engine asks of whatever moves pages, and what it is told in return.

One small protocol with three implementations: loopback.py, zmq_connector.py, nixl_connector.py.
Requests never block; answers are events that the engine polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from effuse.kvtransfer.messages import BoundaryState, Manifest, ReceiverAddress, Reservation


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


@dataclass(frozen=True, slots=True)
class Received:
    """Every page and the boundary state arrived and were verified; no writer is left."""

    transfer_id: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refused:
    """A transfer that was expected did not pass; its writer may still write."""

    transfer_id: str
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """The push is over and acknowledged: the source pages are free to be reused."""

    transfer_id: str
    pages: int
    num_bytes: int
    seconds: float  # from the first write to the acknowledgement


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push will not succeed. Source pages are still in use until Cancelled."""

    transfer_id: str
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nothing of this transfer reads or writes KV memory any more, and nothing of it will."""

    transfer_id: str


ConnectorEvent = Received | Refused | Pushed | PushFailed | Cancelled


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

        When this returns, a two-sided connector places nothing more of it; a one-sided writer is
        only stopped by itself.
        """
        ...

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Pages [first, first + n) of the reservation are final in `source_pages`.

        May be called many times, and with no pages at first so that the peer is reached early.
        """
        ...

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """No more pages follow: delivers the manifest once all have landed. Ends the push."""
        ...

    def cancel(self, transfer_id: str) -> None:
        """Stops a push. Always answered by Cancelled, but only once nothing of it is in flight."""
        ...

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the connector's thread has ended."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while poll() has something."""
        ...


class ConnectorDied(RuntimeError):
    """The connector's thread ended by itself; the log says why."""
