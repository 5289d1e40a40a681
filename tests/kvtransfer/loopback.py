"""The transport within one process, and a connector without a thread; both behave like the others.

Every request takes effect immediately, so that tests are deterministic; `Hub.pause` holds messages
and pages back.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effuse.kvtransfer.connector import (
    Cancel,
    Cause,
    Command,
    ConnectorEvent,
    FinishPush,
    HandoffRefused,
    PushPages,
    Route,
)
from effuse.kvtransfer.digest import digester_of
from effuse.kvtransfer.layout import Fingerprint, Identity, PageMemory, bytes_of
from effuse.kvtransfer.messages import (
    Pages,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
)
from effuse.kvtransfer.push import shard_of
from effuse.kvtransfer.thread import Exchange
from effuse.kvtransfer.transport import (
    Chunk,
    Delivery,
    FromReceiver,
    FromWriter,
    Pace,
    Peer,
    Received,
    Reply,
    Transport,
)

MOST_TURNS = 10_000


class Hub:
    """Connects the loopback connectors of one process."""

    def __init__(self, *, is_two_sided: bool = True) -> None:
        """With a one-sided hub senders write directly into pools, whether expected or not."""
        self.is_two_sided = is_two_sided
        self.members: dict[str, LoopbackConnector] = {}
        self._paused: deque[Callable[[], None]] | None = None

    def pause(self) -> None:
        """Holds back everything that is sent from now on."""
        self._paused = self._paused or deque()

    def resume(self) -> None:
        """Delivers everything that was held back, in order."""
        held, self._paused = self._paused or deque(), None
        for deliver in held:
            deliver()
        self.settle()

    def deliver(self, action: Callable[[], None]) -> None:
        """Runs an action now, or once resumed."""
        if self._paused is None:
            action()
        else:
            self._paused.append(action)

    def settle(self) -> None:
        """Lets every member take its turns until nothing moves."""
        for _ in range(MOST_TURNS):
            members = [member.exchange for member in self.members.values()]
            moved = [exchange.turn(exchange.receive()) for exchange in members]
            if not any(moved):
                return
        raise AssertionError("the members of a hub never stop sending")


@dataclass(slots=True, eq=False)
class LoopbackDelivery:
    """A chunk that was handed to the hub."""

    has_left: bool = False

    def is_over(self) -> bool:
        """Whether the hub has delivered or dropped it."""
        return self.has_left


class LoopbackTransport(Transport):
    """A Transport to the members of one hub."""

    name = "loopback"
    chunk_bytes = 1 << 30
    window_bytes = 1 << 30
    drain_s = -1.0  # chunks that the hub holds back are dropped immediately

    def __init__(self, hub: Hub, memory: PageMemory, incarnation: str) -> None:
        self.is_two_sided = hub.is_two_sided
        self.inbox: deque[Received] = deque()
        rank = memory.layout.rank
        self.name_in_hub = f"{incarnation}/{rank}" if rank else incarnation
        self._hub = hub
        self._memory = memory
        self._deliveries: list[LoopbackDelivery] = []

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def address(self) -> ReceiverAddress:
        """This pool's name in the hub."""
        return ReceiverAddress(connector=self.name, endpoint=self.name_in_hub)

    def reach(self, reservation: Reservation, shard: Shard) -> Peer:
        """Names need no connection."""
        endpoint = shard.address.endpoint
        if endpoint not in self._hub.members:
            raise HandoffRefused(Cause.PEER, f"no peer at {endpoint}")
        return self._hub.members[endpoint].transport

    def route(self, peer: Peer) -> Route:
        """A copy within this process."""
        return Route("memory")

    def drop(self, peer: Peer) -> None:
        """Chunks that the hub holds back will not arrive."""
        for delivery in self._deliveries:
            delivery.has_left = True

    def send(self, peer: Peer, message: ToReceiver) -> None:
        """Puts a message into the peer's inbox."""
        self._hand(peer, FromWriter(message, (), self))

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Copies pages and puts them into the peer's inbox."""
        payload = [memoryview(bytes(view)) for view in self._views(chunk)]
        delivery = LoopbackDelivery()
        self._deliveries = [one for one in self._deliveries if not one.has_left]
        self._deliveries.append(delivery)

        def arrive() -> None:
            if not delivery.has_left:
                delivery.has_left = True
                assert isinstance(peer, LoopbackTransport)
                peer.take(header, chunk, payload, self)

        self._hub.deliver(arrive)
        return delivery

    def take(
        self, header: Pages, chunk: Chunk, payload: list[memoryview], writer: LoopbackTransport
    ) -> None:
        """Pages arrive: into the inbox or, one-sided, into the pool first."""
        if not self.is_two_sided:
            page_ids = [page.page_id for page in chunk.targets]
            self._memory.write(page_ids, chunk.groups, payload, chunk.heads)
            payload = []
        self.inbox.append(FromWriter(header, payload, writer))

    def receive(self) -> list[Received]:
        """What is in the inbox."""
        heard = list(self.inbox)
        self.inbox.clear()
        return heard

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Puts an answer into the writer's inbox."""
        assert isinstance(reply, LoopbackTransport)
        self._hand(reply, FromReceiver(self, message))

    def place(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range,
    ) -> None:
        """Copies the bytes into the pool."""
        self._memory.write(page_ids, groups, payload, heads)

    def wait(self, pace: Pace, requests: int) -> None:
        """Never waits."""

    def _hand(self, peer: Peer, heard: Received) -> None:
        assert isinstance(peer, LoopbackTransport)
        self._hub.deliver(lambda: peer.inbox.append(heard))

    def _views(self, chunk: Chunk) -> list[memoryview]:
        if self._memory.device.type == "cpu":
            return self._memory.views(chunk.source_pages, chunk.groups, chunk.heads)
        rows = self._memory.byte_parts(chunk.groups, chunk.heads)
        return [bytes_of(rows[page_id].contiguous().cpu()) for page_id in chunk.source_pages]


class LoopbackConnector:
    """A connector whose peers live in the same process and the same hub."""

    name = "loopback"

    def __init__(
        self,
        hub: Hub,
        memory: PageMemory,
        incarnation: str,
        fingerprint: Fingerprint,
        now: Callable[[], float],
    ) -> None:
        self._hub = hub
        self._now = now
        self._layout = memory.layout
        self._events: deque[ConnectorEvent] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.transport = LoopbackTransport(hub, memory, incarnation)
        self.exchange = Exchange(
            self.transport,
            digester_of(memory),
            Identity(incarnation, fingerprint, memory.layout),
            self.emit,
            now,
        )

    def start(self) -> None:
        """Joins the hub."""
        self._hub.members[self.transport.name_in_hub] = self

    def close(self) -> None:
        """Leaves the hub."""
        if self._hub.members.pop(self.transport.name_in_hub, None) is not None:
            os.close(self._signal)

    def describe(self) -> tuple[Shard, ...]:
        """This pool's name in the hub."""
        return (shard_of(self._layout, self.transport.address()),)

    def send(self, command: Command) -> None:
        """Carries out a command at once; pushes also let every member take its turns."""
        self.exchange.execute(command, self._now())
        if isinstance(command, PushPages | FinishPush | Cancel):
            self._hub.settle()

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call, after every member's turn."""
        if self.transport.name_in_hub in self._hub.members:
            self._hub.settle()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        events = list(self._events)
        self._events.clear()
        return events

    def fileno(self) -> int:
        """Readable while poll() has something."""
        return self._signal

    def emit(self, event: ConnectorEvent) -> None:
        """Passes an event to the engine."""
        self._events.append(event)
        os.eventfd_write(self._signal, 1)
