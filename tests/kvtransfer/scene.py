"""Transports without actions of their own, for tests of the layers above."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import HandoffRefused, Route
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    Begin,
    Pages,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
)
from effuse.kvtransfer.transport import Chunk, Delivery, Pace, Peer, Received, Reply, Transport


@dataclass(eq=False)
class Scripted:
    """A delivery that ends when a test lets it."""

    header: Pages
    chunk: Chunk
    has_ended: bool = False
    failure: HandoffRefused | None = None

    def is_over(self) -> bool:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.has_ended = True
            raise failure
        return self.has_ended


@dataclass(eq=False)
class FakeTransport(Transport):
    """Records calls; places pages of a two-sided transport into `memory`."""

    memory: PageMemory
    is_two_sided: bool = True
    name: str = "zmq"
    chunk_bytes: int = 1 << 30
    window_bytes: int = 1 << 30
    drain_s: float = 2.0
    said: list[ToReceiver] = field(default_factory=list)
    answers: list[ToSender] = field(default_factory=list)
    learnt: list[str] = field(default_factory=list)
    deliveries: list[Scripted] = field(default_factory=list)
    dropped: list[object] = field(default_factory=list)
    left: list[object] = field(default_factory=list)
    renewed: list[ReceiverAddress] = field(default_factory=list)
    shut: list[ReceiverAddress] = field(default_factory=list)
    has_room: bool = True
    refusal: HandoffRefused | None = None

    def open(self) -> None: ...

    def close(self) -> None: ...

    def address(self) -> ReceiverAddress:
        return ReceiverAddress(connector=self.name)

    def reach(self, reservation: Reservation, shard: Shard) -> Peer:
        return sys.intern(shard.address.endpoint)  # peers are distinguished by identity

    def leave(self, peer: Peer) -> None:
        self.left.append(peer)

    def route(self, peer: Peer) -> Route:
        return Route("test")

    def drop(self, peer: Peer) -> None:
        self.dropped.append(peer)
        for delivery in self.deliveries:
            delivery.has_ended = True

    def send(self, peer: Peer, message: ToReceiver) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.said.append(message)

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        if not self.has_room:
            return None
        self.deliveries.append(Scripted(header, chunk))
        return self.deliveries[-1]

    def receive(self) -> list[Received]:
        return []

    def connect(self, reply: Reply, begin: Begin) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.learnt.append(begin.source)

    def answer(self, reply: Reply, message: ToSender) -> None:
        self.answers.append(message)

    def place(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range,
    ) -> None:
        self.memory.write(page_ids, groups, payload, heads)

    def renew(self, address: ReceiverAddress) -> None:
        self.renewed.append(address)

    def shut_off(self, address: ReceiverAddress) -> None:
        self.shut.append(address)

    def wait(self, pace: Pace, requests: int) -> None: ...
