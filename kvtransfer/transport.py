"""What a transport does, so that pushes (pushes.py) and receptions (reception.py) are the same over
all of them. Three: nixl_transport.py, zmq_transport.py, loopback.py.

All methods are called from the connector's thread and return at once, if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from effuse.kvtransfer.connector import HandoffRefused, Route
from effuse.kvtransfer.messages import (
    Begin,
    PageRef,
    Pages,
    ReceiverAddress,
    Reservation,
    ToReceiver,
    ToSender,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Groups of layers of some pages: what moves in one piece."""

    first: int  # place of its first page in the reservation
    source_pages: tuple[int, ...]
    targets: tuple[PageRef, ...]
    groups: range


class Peer(Protocol):
    """A receiver that can be written to."""


class Delivery(Protocol):
    """A chunk on its way."""

    def is_over(self) -> bool:
        """Whether it has arrived, or will not, and the source is not read any more.

        Raises HandoffRefused where it has failed; it is over then, too.
        """
        ...


class Reply(Protocol):
    """Whom an answer goes to."""


@dataclass(frozen=True, slots=True)
class FromWriter:
    """What a sender says to this pool. Over a two-sided transport pages come as `payload`."""

    message: ToReceiver
    payload: Sequence[memoryview]
    reply: Reply


@dataclass(frozen=True, slots=True)
class FromReceiver:
    """What a receiver answers."""

    peer: Peer
    message: ToSender


@dataclass(frozen=True, slots=True)
class Lost:
    """A receiver is out of reach."""

    peer: Peer
    refusal: HandoffRefused


Heard = FromWriter | FromReceiver | Lost


class Pace(Enum):
    """How soon something may happen that no descriptor tells of."""

    HOT = auto()  # bytes or digests are under way, and some moved on a moment ago
    MOVING = auto()  # bytes or digests are under way
    COMPUTING = auto()  # nothing is under way; a forward of our own makes layers final
    BEGUN = auto()  # a writer has introduced itself and may write any moment
    EXPECTING = auto()  # something is reserved, or was said a moment ago
    IDLE = auto()


class Transport(Protocol):
    """Moves bytes and messages between pools."""

    name: str
    is_two_sided: bool  # the receiver places the bytes: what it refuses is never placed
    chunk_bytes: int  # most of one delivery, in either direction
    window_bytes: int  # most of a push that is under way
    drain_s: float  # a receiver that does not answer for so long may be dropped

    def open(self) -> None:
        """Makes what belongs to the thread. Raises OSError or ValueError."""
        ...

    def close(self) -> None:
        """Gives it back."""
        ...

    def address(self) -> ReceiverAddress:
        """How this pool is reached now."""
        ...

    def reach(self, reservation: Reservation) -> Peer:
        """The receiver of a reservation, counted as in use. Raises HandoffRefused."""
        ...

    def leave(self, peer: Peer) -> None:
        """A push does not use the peer any more."""
        ...

    def forget_life(self, incarnation: str) -> None:
        """A receiver's life is over: gives back what is kept for it."""
        ...

    def route(self, peer: Peer) -> Route:
        """What has moved the bytes of a push that is over."""
        ...

    def drop(self, peer: Peer) -> None:
        """Closes the connection to a peer, where that ends what is under way to it."""
        ...

    def say(self, peer: Peer, message: ToReceiver) -> None:
        """Tells a receiver something. Raises HandoffRefused."""
        ...

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Sends a chunk, with its header; None where there is no room now. Raises HandoffRefused.

        May take as long as copying it does.
        """
        ...

    def hear(self) -> list[Heard]:
        """What has been said since the last call; moves on what is under way."""
        ...

    def learn(self, reply: Reply, begin: Begin) -> None:
        """A writer that was let in is going to be answered. Raises HandoffRefused."""
        ...

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Answers a writer; one that cannot be reached has its lease."""
        ...

    def place(self, page_ids: Sequence[int], groups: range, payload: Sequence[memoryview]) -> None:
        """Copies the bytes that came with Pages into the pool, cut as `PageMemory.write` says."""
        ...

    def renew(self, address: ReceiverAddress) -> None:
        """Gives this pool another address than this one, which works on until `shut_off`."""
        ...

    def shut_off(self, address: ReceiverAddress) -> None:
        """Ends an address that was renewed: nothing that was under way to it lands any more."""
        ...

    def wait(self, pace: Pace, requests: int) -> None:
        """Sleeps as the pace allows, or until the descriptor `requests` or one of its own is
        readable."""
        ...
