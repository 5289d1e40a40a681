"""The interface of a transport, with which pushes (pushes.py) and receptions (reception.py) are the
same for both: nixl_transport.py and zmq_transport.py.

All methods are called from the connector's thread and return immediately, unless they state
otherwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from effuse.kvtransfer.connector import ConnectorEvent, HandoffRefused, Route
from effuse.kvtransfer.digest import Digester
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import (
    Begin,
    PageRef,
    Pages,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Groups of layers and KV heads of some pages, which move together."""

    first: int  # index of its first page in the reservation
    source_pages: tuple[int, ...]
    targets: tuple[PageRef, ...]
    groups: range
    heads: range  # in the model's numbers


class Peer(Protocol):
    """A receiver to write to."""


class Delivery(Protocol):
    """A chunk in transit."""

    def is_over(self) -> bool:
        """Whether it has arrived, or never will, and the source is not read any more.

        Raises HandoffRefused if it has failed, which also ends it.
        """


class Reply(Protocol):
    """The destination of an answer."""


@dataclass(frozen=True, slots=True)
class FromWriter:
    """A sender's message to this pool. Over a two-sided transport, pages come as `payload`."""

    message: ToReceiver
    payload: Sequence[memoryview]
    reply: Reply


@dataclass(frozen=True, slots=True)
class FromReceiver:
    """A receiver's answer."""

    peer: Peer
    message: ToSender


@dataclass(frozen=True, slots=True)
class Lost:
    """A receiver is unreachable."""

    peer: Peer
    refusal: HandoffRefused


Received = FromWriter | FromReceiver | Lost


class Pace(Enum):
    """How soon an event is likely that no descriptor signals."""

    HOT = auto()  # bytes or digests are in progress, and some advanced a moment ago
    MOVING = auto()  # bytes or digests are in progress
    COMPUTING = auto()  # nothing is in progress; a forward of this engine makes layers final
    BEGUN = auto()  # a writer has introduced itself and may write at any moment
    EXPECTING = auto()  # there is a reservation, or a message arrived a moment ago
    IDLE = auto()


class Transport(Protocol):
    """Moves bytes and messages between pools. A method that returns at once is for
    transports that need nothing done."""

    name: str
    is_two_sided: bool  # the receiver places the bytes, and never places refused ones
    chunk_bytes: int  # largest delivery that is sent, unless one page has more
    most_bytes: int = 1 << 40  # largest delivery that is accepted
    window_bytes: int  # most bytes of a push in transit
    copies_in_deliver: bool = False  # the connector's thread itself reads a delivery's bytes
    drain_s: float  # a receiver that is silent for this long may be dropped

    def open(self) -> None:
        """Makes the objects that belong to the thread. Raises OSError or ValueError."""

    def close(self) -> None:
        """Closes them."""

    def address(self) -> ReceiverAddress:
        """The current address of this pool."""

    def reach(self, reservation: Reservation, shard: Shard) -> Peer:
        """A receiving rank of a reservation, counted as in use. Raises HandoffRefused."""

    def leave(self, peer: Peer) -> None:
        """A push has stopped using the peer."""
        return

    def forget_life(self, incarnation: str) -> None:
        """A receiver's incarnation has ended: frees all memory that is kept for it."""
        return

    def route(self, peer: Peer) -> Route:
        """The transport that moved the bytes of a finished push."""

    def drop(self, peer: Peer) -> None:
        """Closes the connection to a peer, if that ends everything in transit to it."""
        return

    def send(self, peer: Peer, message: ToReceiver) -> None:
        """Sends a message to a receiver. Raises HandoffRefused."""

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Sends a chunk with its header; None if there is no room now. Raises HandoffRefused.

        May take as long as the copy.
        """

    def receive(self) -> list[Received]:
        """Messages since the last call; advances everything in progress."""

    def connect(self, reply: Reply, begin: Begin) -> None:
        """An accepted writer will get answers. Raises HandoffRefused."""
        return

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Answers a writer; one that cannot be reached has its lease."""

    def place(
        self, page_ids: Sequence[int], groups: range, payload: Sequence[memoryview], heads: range
    ) -> None:
        """Copies the bytes that came with Pages into the pool, split as in `PageMemory.write`."""
        raise AssertionError("over a one-sided transport the sender places the pages")

    def renew(self, address: ReceiverAddress) -> None:
        """Gives this pool another address; the old one works until `shut_off`."""
        return

    def shut_off(self, address: ReceiverAddress) -> None:
        """Ends a replaced address: nothing in transit to it arrives any more."""
        return

    def wait(self, pace: Pace, requests: int) -> None:
        """Sleeps as long as the pace allows, or until the descriptor `requests` or one of its own
        is readable."""


@dataclass(eq=False)
class ConnectorParts:
    """The parts that a connector and both of its sides share: a transport, digests of the pool's
    pages, the identity of the pool, the receiver of events, and a monotonic clock in seconds."""

    _transport: Transport
    _digester: Digester
    _own: Identity
    _emit: Callable[[ConnectorEvent], None]
    _now: Callable[[], float] = time.monotonic
