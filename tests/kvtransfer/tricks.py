"""Faults of a transfer in transit, and their actors: bytes that are flipped, cut off, exchanged or
stale; messages that are flipped, cut off, repeated, out of order or another's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType

import msgspec
import torch
from kvtransfer.receiver_process import transport
from msgspec import Struct

from effuse.kvtransfer import messages, nixl_transport, zmq_sockets
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    Begin,
    Finish,
    MalformedMessage,
    Pages,
    ToReceiver,
    decode_to_receiver,
    envelope_of,
)
from effuse.kvtransfer.transport import Chunk, Delivery, Peer
from effuse.kvtransfer.zmq_transport import ZmqDelivery

_LEFT_S = 10.0  # far longer than any message takes to leave

ENCODERS: dict[str, ModuleType] = {"nixl": nixl_transport, "zmq": zmq_sockets}
"""Modules whose `encode` makes the bytes of a writer's messages."""


class Trick(Enum):
    """One of them."""

    BIT_FLIPPED = "a bit of a page is flipped"
    TAIL_SPOILT = "a page is wrong from some byte on"
    PAGE_STALE = "a page has the bytes of another one"
    PAGES_EXCHANGED = "two pages have each other's bytes"
    CHUNK_CUT = "the end of a chunk never leaves"
    BYTES_LOST = "a chunk is announced and its bytes never leave"
    CHUNK_LOST = "a chunk never leaves"
    CHUNK_TWICE = "a chunk comes twice"
    CHUNK_OF_ANOTHER = "a chunk is said to be of an earlier transfer"
    PAGES_FLIPPED = "a bit of what is said of a chunk is flipped"
    PAGES_CUT = "what is said of a chunk is cut off"
    BEGIN_LATE = "a chunk comes before its writer has introduced itself"
    FINISH_EARLY = "the manifest comes before the last chunk"
    FINISH_FLIPPED = "a bit of the manifest is flipped"
    FINISH_CUT = "the manifest is cut off"
    FINISH_OF_ANOTHER = "the manifest is an earlier transfer's"


_OF_BYTES: dict[Trick | None, type[Struct]] = {
    Trick.PAGES_FLIPPED: Pages,
    Trick.PAGES_CUT: Pages,
    Trick.FINISH_FLIPPED: Finish,
    Trick.FINISH_CUT: Finish,
}
"""Done to the bytes of a message of this type."""

_OF_MESSAGES = {*_OF_BYTES, Trick.BEGIN_LATE, Trick.FINISH_OF_ANOTHER}


@dataclass(frozen=True, slots=True)
class Both:
    """Deliveries of one chunk; none if nothing leaves."""

    parts: Sequence[Delivery]

    def is_over(self) -> bool:
        return sum(not part.is_over() for part in self.parts) == 0  # each is asked


def written(memory: PageMemory) -> None:
    """Returns once writes into pages are visible to other readers."""
    if memory.device.type != "cpu":
        torch.cuda.synchronize(memory.device)


class Tamperer:
    """Between an exchange and the transport that it pushes over. The first half of the pool is the
    source; the second half is its own, for other bytes than the digested ones.
    """

    def __init__(
        self, kind: str, memory: PageMemory, incarnation: str, draw: random.Random
    ) -> None:
        self.transport = transport(kind, memory, incarnation)
        self.has_struck = False
        self._trick: Trick | None = None
        self._memory = memory
        self._half = memory.num_pages // 2
        self._draw = draw
        self._wait = 0  # for so many chunks
        self._held: list[Callable[[], object]] = []
        self._loose: list[Delivery] = []
        self._earlier: dict[type[ToReceiver], ToReceiver] = {}
        self._send_message, self._deliver = self.transport.send, self.transport.deliver
        self.transport.send = self.send  # type: ignore[method-assign]
        self.transport.deliver = self.deliver  # type: ignore[method-assign]

    def arm(self, trick: Trick | None, num_chunks: int) -> None:
        """The fault of the next transfer; a chunk of it is chosen for that."""
        self._sweep()
        self._trick, self.has_struck = trick, False
        self._wait = self._draw.randrange(num_chunks)
        if trick is Trick.FINISH_EARLY:
            self._wait = num_chunks - 1

    def disarm(self) -> None:
        """Leaves later messages unchanged; held-back ones are never sent."""
        self._trick = None
        self._held.clear()

    def send(self, peer: Peer, message: ToReceiver) -> None:
        """In the place of the transport's."""
        if self._trick is None:
            self._earlier[type(message)] = message
        if isinstance(message, Begin) and self._trick is Trick.BEGIN_LATE:
            self._held.append(lambda: self._send_message(peer, message))
            return
        if self._trick is Trick.BEGIN_LATE:  # now that all chunks are there
            self._let_go()
        if isinstance(message, Finish) and self._trick is Trick.FINISH_OF_ANOTHER:
            message, self.has_struck = self._earlier[Finish], True
        self._send_message(peer, message)
        self._let_go()

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """In the place of the transport's."""
        self._wait -= 1
        if self._wait != -1 or self._trick is None or self._trick in _OF_MESSAGES:
            return self._deliver(peer, header, chunk)
        self.has_struck = self._trick is not Trick.FINISH_EARLY
        match self._trick:
            case Trick.BYTES_LOST:
                self._send_message(peer, header)
                return Both(())
            case Trick.CHUNK_LOST:
                return Both(())
            case Trick.FINISH_EARLY:
                self._held.append(lambda: self._loose.append(self._send(peer, header, chunk)))
                return Both(())
            case Trick.CHUNK_TWICE:
                return Both([self._send(peer, header, chunk) for _ in range(2)])
            case Trick.CHUNK_OF_ANOTHER:
                earlier = envelope_of(self._earlier[Finish]).attempt
                header = msgspec.structs.replace(header, attempt=earlier)
            case Trick.CHUNK_CUT:
                pages, targets = chunk.source_pages[:-1], chunk.targets[:-1]
                chunk = replace(chunk, source_pages=pages, targets=targets)
            case of_bytes:
                chunk = replace(chunk, source_pages=self._falsified(of_bytes, chunk))
        return self._send(peer, header, chunk)

    def _send(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery:
        """The faulty message leaves now and not later, when its fault could no longer have an
        effect.
        """
        delivery = self._deliver(peer, header, chunk)
        assert delivery is not None, "there is no room for it"
        return delivery

    def _sweep(self) -> None:
        """Gives back buffers of chunks that have left, and that no push waits for."""
        for one in self._loose:
            if isinstance(one, ZmqDelivery) and one.fetched is not None:
                deadline = time.monotonic() + _LEFT_S
                while any(view() is not None for view in one.sent):
                    assert time.monotonic() < deadline, "ZMQ still reads it"
                    time.sleep(1e-3)  # its own thread lets go a little after it has left
                one.fetched.release()
        self._loose.clear()

    def encode(self, message: Struct) -> bytes:
        """In the place of the transport's."""
        data = messages.encode(message)
        if self.has_struck or not isinstance(message, _OF_BYTES.get(self._trick, ())):
            return data
        self.has_struck = True
        if self._trick in (Trick.PAGES_CUT, Trick.FINISH_CUT):
            return data[: self._draw.randrange(1, len(data))]
        return self._flipped(data, message)

    def _flipped(self, data: bytes, message: Struct) -> bytes:
        """One bit is flipped. Some flips do not change the meaning, for example in the name of an
        empty field: these are left out.
        """
        while True:
            spoilt = bytearray(data)
            spoilt[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
            try:
                if decode_to_receiver(bytes(spoilt)) != message:
                    return bytes(spoilt)
            except MalformedMessage:
                return bytes(spoilt)

    def _falsified(self, trick: Trick, chunk: Chunk) -> tuple[int, ...]:
        """Other pages than those that are digested: copies of them with other bytes."""
        rows, group_bytes = self._memory.byte_rows(), self._memory.layout.group_bytes
        copies = [page + self._half for page in chunk.source_pages]
        rows[copies] = rows[list(chunk.source_pages)]
        end = chunk.groups.stop * group_bytes
        at = self._draw.randrange(chunk.groups.start * group_bytes, end)
        page, other = self._draw.sample(copies, 2)
        match trick:
            case Trick.BIT_FLIPPED:
                rows[page, at] ^= 1 << self._draw.randrange(8)
            case Trick.TAIL_SPOILT:
                rows[page, at:end] = rows[page, at:end].bitwise_not()
            case Trick.PAGE_STALE:
                rows[page] = rows[other]
            case _:
                first, second = copies.index(page), copies.index(other)
                copies[first], copies[second] = copies[second], copies[first]
        written(self._memory)
        return tuple(copies)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for send in held:
            self.has_struck = True
            send()
