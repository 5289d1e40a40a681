"""The interface between an engine and the connector that moves its pages.

One small protocol; thread.py runs it over any transport on its own thread. Commands never block;
results are events that the engine polls.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeVar

from msgspec import Struct

from effuse.kvtransfer.messages import BoundaryState, Manifest, Reservation, Shard

PROMISES = 4
"""How often within a lease a waiting sender reports that pages are still to come."""


class Cause(Enum):
    """Why a handoff was refused or failed."""

    MALFORMED = "malformed"  # not a valid message, or beyond a limit
    UNKNOWN_TRANSFER = "unknown transfer"
    ATTEMPT = "attempt"
    INCARNATION = "incarnation"
    FINGERPRINT = "fingerprint"
    GENERATION = "generation"
    COVERAGE = "coverage"
    SIZE = "size"
    SEAL = "seal"  # the digest over the manifest, including the boundary state
    DIGEST = "digest"  # of a page, over the memory that received it
    LEASE = "lease"
    UNRESERVED = "unreserved"  # no place for the pages was named in time
    PEER = "peer"  # unreachable, gone, or its transport failed


def cause_of(value: str) -> Cause:
    """The cause that a peer names; MALFORMED for an unknown one."""
    return Cause(value) if value in {cause.value for cause in Cause} else Cause.MALFORMED


class HandoffRefused(Exception):
    """The arrival or the request differs from the agreement. The message has both sides."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


T = TypeVar("T")
Pending = Callable[[], T | None]
"""Called repeatedly from the connector's thread; returns the result once there is one."""


class Arrived(Struct, frozen=True, tag=True):
    """Every page and the boundary state arrived and were verified; no writer is left."""

    transfer_id: str
    manifest: Manifest  # of the part with the first heads
    seconds: float  # like Pushed.seconds, without the receiver's message
    num_bytes: int  # of all parts, without boundary state


class ArrivalRefused(Struct, frozen=True, tag=True):
    """An expected transfer failed. Its pages are in quarantine until nothing can arrive in them."""

    transfer_id: str
    cause: Cause
    message: str


class Promised(Struct, frozen=True, tag=True):
    """The writer of a transfer reports that its pages are still to come."""

    transfer_id: str


class Fenced(Struct, frozen=True, tag=True):
    """Nothing of an abandoned transfer arrives in its pages any more."""

    transfer_id: str


class Route(Struct, frozen=True):
    """The transport that moves the bytes of a push."""

    # memory, zmq over tcp, or UCX's name, such as cuda_ipc; "a or b" if it is one of two
    name: str
    # pages of GPUs go over TCP or the host, although no flag asks for that
    is_fallback: bool = False


UNKNOWN = Route("unknown")


class Pushed(Struct, frozen=True, tag=True):
    """The push has ended and is acknowledged: the source pages are free for reuse."""

    transfer_id: str
    pages: int
    num_bytes: int
    # From when both the last page was final and the reservation known, to the receiver's message
    # that everything is verified.
    seconds: float
    route: Route = UNKNOWN
    moved_s: float = 0.0  # from when the first page left, to the same end


class PushFailed(Struct, frozen=True, tag=True):
    """The push will not succeed. Source pages remain in use until PushCancelled."""

    transfer_id: str
    cause: Cause
    message: str


class PushCancelled(Struct, frozen=True, tag=True):
    """This transfer does not read or write KV memory any more, and never will."""

    transfer_id: str


ConnectorEvent = Arrived | ArrivalRefused | Promised | Fenced | Pushed | PushFailed | PushCancelled


class Expect(Struct, frozen=True, tag=True):
    """Accepts this transfer from now on, only from incarnation `writer` if that is known."""

    reservation: Reservation
    writer: str | None


class Forget(Struct, frozen=True, tag=True):
    """Refuses this transfer from now on.

    A two-sided connector reports Fenced. A one-sided writer can only stop itself.
    """

    transfer_id: str


class Fence(Struct, frozen=True, tag=True):
    """The writer of a forgotten transfer writes no more: it reported that, or it is gone.

    Fenced follows once nothing of it can arrive; immediately if the writer itself reported that all
    its writes have ended (`has_drained`). If the writer is gone, bytes may still be on their way to
    this process.
    """

    transfer_id: str
    has_drained: bool


class PushPages(Struct, frozen=True, tag=True):
    """Pages [first, first + n) of the reservation are in `source_pages`. If ranks split the
    context, each of these has a page of each rank; some of the first and last one are not reserved.

    `num_final` returns how many groups of their layers are final, until all are; without it all
    are. A transfer may have many of these commands. One without pages reaches the peer early, and
    a later one reports that pages are still to come, which restarts the lease.
    """

    reservation: Reservation
    source_pages: tuple[int, ...]
    first: int
    num_final: Pending[int] | None = None


class FinishPush(Struct, frozen=True, tag=True):
    """No more pages follow: sends the manifest once all have arrived, and ends the push."""

    reservation: Reservation
    boundary: Pending[BoundaryState]


class Cancel(Struct, frozen=True, tag=True):
    """Stops a push. PushCancelled follows once nothing of it is in flight."""

    transfer_id: str


class ForgetLife(Struct, frozen=True, tag=True):
    """A receiver's incarnation has ended: frees all memory that is kept for it."""

    incarnation: str


Command = Expect | Forget | Fence | PushPages | FinishPush | Cancel | ForgetLife


class Connector(Protocol):
    """Moves pages between pools. Methods are for the engine's thread and return at once."""

    @property
    def name(self) -> str:
        """zmq or nixl."""

    def close(self) -> None:
        """Ends everything, within a few seconds."""

    def describe(self) -> tuple[Shard, ...]:
        """The addresses of this pool for peers: one shard for each of its ranks."""

    def send(self, command: Command) -> None:
        """Has a command carried out. Commands take effect in their order."""

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the connector's thread has ended."""

    def fileno(self) -> int:
        """A descriptor that is readable while poll() has something."""


class ConnectorDied(RuntimeError):
    """The connector's thread ended by itself; the log has the reason."""
