"""A transport over the simulated network, in the manner of NIXL over TCP or of ZMQ.

One-sided, bytes leave some time after they were posted and arrive when the receiver polls, or by
themselves. Two-sided, the bytes come with a message, and the receiver places them.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from effuse.kvtransfer.connector import Cause, HandoffRefused, Route
from effuse.kvtransfer.messages import (
    Begin,
    PageRef,
    Pages,
    Placed,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
)
from effuse.kvtransfer.pool import PageState
from effuse.kvtransfer.transport import (
    Chunk,
    Delivery,
    FromReceiver,
    FromWriter,
    Lost,
    Pace,
    Received,
    Reply,
    Transport,
)
from effuse.kvtransfer.transport import Peer as AnyPeer

from .clock import Action, Clock, Violation
from .mishaps import Mishaps
from .network import Line, Network
from .pages import LAYOUT, TaggedMemory


class Host(Protocol):
    """The engine process that a transport belongs to."""

    host: str
    incarnation: str
    is_alive: bool

    def when_awake(self, action: Action) -> None:
        """Runs it now, or once the process is no longer paused; never if it dies."""

    def wake_connector(self) -> None: ...

    def die(self) -> None: ...


@dataclass(slots=True, eq=False)
class Agent:
    """An address for writes, with arrived but unpolled bytes."""

    name: str
    owner: SimTransport
    is_open: bool = True
    socket: deque[Action] = field(default_factory=deque)
    known: set[str] = field(default_factory=set)  # writers that are answered, by incarnation
    lines: list[Line] = field(default_factory=list)  # by which it is written to

    def close(self) -> None:
        """Nothing that was under way to it lands any more."""
        self.is_open = False
        self.socket.clear()
        for line in self.lines:
            line.break_off()


@dataclass(slots=True)
class Fabric:
    """All that transports know of each other."""

    clock: Clock
    network: Network
    mishaps: Mishaps
    is_two_sided: bool
    lands_by_itself: bool  # one-sided writes need no look of the receiver
    leaves_within_s: float  # from posting a write to its bytes being read
    arrives_within_s: float  # from then to the receiver's socket, beside the network's latency
    agents: dict[str, Agent] = field(default_factory=dict)
    writers: dict[str, SimTransport] = field(default_factory=dict)  # by incarnation


@dataclass(slots=True, eq=False)
class Peer:
    """A connection to an agent."""

    agent: Agent
    num_pushes: int = 0
    is_open: bool = True
    line: Line = field(init=False)
    leaves_at: float = 0.0  # when the last thing that was sent leaves
    deliveries: list[Write] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimReply:
    """A writer, in the form in which its receiver answers it."""

    agent: Agent
    peer: Peer
    incarnation: str


@dataclass(slots=True, eq=False)
class Write:
    """A chunk on its way."""

    writer: SimTransport
    peer: Peer
    header: Pages
    chunk: Chunk
    sources: tuple[PageRef, ...]  # allocations that are read
    is_done: bool = False
    has_failed: bool = False
    is_told: bool = False

    def is_over(self) -> bool:
        """Whether it was acknowledged; raises HandoffRefused if its connection broke."""
        if self.has_failed:
            self.has_failed, self.is_done, self.is_told = False, True, True
            if not self.writer.is_two_sided:
                raise HandoffRefused(Cause.PEER, "a write failed")
        if self.is_done and not self.is_told:
            self.is_told = True
            self.writer.notify(self.peer, self.header)
        return self.is_done

    def read(self) -> list[list[int]]:
        """Bytes leave page by page; the source must still be unchanged."""
        memory = self.writer.memory
        for page in self.sources:
            newest, state = memory.pool.newest(page.page_id)
            if (newest, state) != (page, PageState.COMMITTED):
                raise Violation(f"a write reads {page}, which is {newest} and {state.name} now")
        return [memory.read(page.page_id, self.chunk.groups) for page in self.sources]


class SimTransport(Transport):
    """A Transport of one engine process."""

    name = "simulated"
    chunk_bytes = LAYOUT.page_bytes
    window_bytes = 2 * LAYOUT.page_bytes

    def __init__(self, fabric: Fabric, memory: TaggedMemory, process: Host) -> None:
        self.memory = memory
        self.is_two_sided = fabric.is_two_sided
        self.drain_s = 0.5 if fabric.is_two_sided else math.inf
        self.pace = Pace.IDLE
        self._fabric = fabric
        self._process = process
        self._inbox: list[Received] = []
        self._peers: dict[str, Peer] = {}
        self._retired: list[Agent] = []
        self._num_agents = 0
        self._agent = self._make_agent()
        fabric.writers[process.incarnation] = self

    def open(self) -> None:
        """Made already."""

    def close(self) -> None:
        """The process has died: nothing arrives here, and bytes that have left go on."""
        for agent in (self._agent, *self._retired):
            agent.close()

    def address(self) -> ReceiverAddress:
        """The agent that is written to now."""
        return ReceiverAddress(connector=self.name, endpoint=self._agent.name)

    # Sending.

    def reach(self, reservation: Reservation, shard: Shard) -> AnyPeer:
        """A connection, new where the last one broke. Raises HandoffRefused."""
        name = shard.address.endpoint
        peer = self._peers.get(name)
        if peer is not None and not peer.is_open and peer.num_pushes and not self.is_two_sided:
            raise HandoffRefused(Cause.PEER, f"writes to {name} are in flight")
        if peer is None or not peer.is_open:
            peer = self._peers[name] = self._connect(self._fabric.agents[name])
        peer.num_pushes += 1
        return peer

    def leave(self, peer: AnyPeer) -> None:
        """A push does not use the peer any more."""
        assert isinstance(peer, Peer)
        peer.num_pushes -= 1

    def route(self, peer: AnyPeer) -> Route:
        """No caller."""
        return Route("simulated")

    def drop(self, peer: AnyPeer) -> None:
        """Closes a connection of a two-sided transport."""
        assert isinstance(peer, Peer)
        if self.is_two_sided:
            peer.line.break_off()

    def send(self, peer: AnyPeer, message: ToReceiver) -> None:
        """Sends a message to a receiver. Raises HandoffRefused."""
        assert isinstance(peer, Peer)
        if not peer.is_open:
            raise HandoffRefused(Cause.PEER, f"the connection to {peer.agent.name} has broken")
        self.notify(peer, message)

    def notify(self, peer: Peer, message: ToReceiver) -> None:
        """Sends a message; in vain over a connection that has broken."""
        message = self._fabric.mishaps.confuse(message)
        self._send(peer, lambda: peer.line.send(lambda: self._arrive(peer, message, ())))

    def deliver(self, peer: AnyPeer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Posts a write. Raises HandoffRefused."""
        assert isinstance(peer, Peer)
        if not peer.is_open:
            raise HandoffRefused(Cause.PEER, f"the connection to {peer.agent.name} has broken")
        sources = tuple(self.memory.pool.newest(page_id)[0] for page_id in chunk.source_pages)
        write = Write(self, peer, header, chunk, sources)
        peer.deliveries = [one for one in peer.deliveries if not one.is_done]
        peer.deliveries.append(write)
        self._send(peer, lambda: self._depart(write))
        return write

    # Receiving.

    def receive(self) -> list[Received]:
        """Polls all sockets: waiting bytes arrive, and messages are received."""
        for agent in (self._agent, *self._retired):
            while agent.socket:
                agent.socket.popleft()()
        heard, self._inbox = self._inbox, []
        return heard

    def connect(self, reply: Reply, begin: Begin) -> None:
        """A writer that was let in is going to be answered."""
        assert isinstance(reply, SimReply)
        reply.agent.known.add(reply.incarnation)

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Answers a writer; over a one-sided transport only one that was let in."""
        assert isinstance(reply, SimReply)
        agent, writer = reply.agent, self._fabric.writers.get(reply.incarnation)
        if not agent.is_open or writer is None:
            return
        if not self.is_two_sided and reply.incarnation not in agent.known:
            return
        line = Line(self._fabric.network, self._process.host, writer._process.host)
        line.send(lambda: writer._take_answer(reply.peer, message))

    def place(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range,
    ) -> None:
        """Places what came with a message."""
        assert self.is_two_sided
        for page_id, part in zip(page_ids, payload, strict=True):
            page, state = self.memory.pool.newest(page_id)
            if state is not PageState.RECEIVING:
                raise Violation(f"bytes are placed in {page}, which is {state.name}")
            self.memory.write(page_id, groups, part.tolist())

    # Fencing.

    def renew(self, address: ReceiverAddress) -> None:
        """Has another agent receive from now on."""
        if self._agent.name == address.endpoint:
            self._retired.append(self._agent)
            self._agent = self._make_agent()

    def shut_off(self, address: ReceiverAddress) -> None:
        """Closes an agent, with the bytes in its socket."""
        for agent in [one for one in self._retired if one.name == address.endpoint]:
            self._retired.remove(agent)
            agent.close()

    def wait(self, pace: Pace, requests: int) -> None:
        """Notes how soon the next look is due."""
        self.pace = pace

    # On the way.

    def _make_agent(self) -> Agent:
        agent = Agent(f"{self._process.incarnation}/{self._num_agents}", self)
        self._num_agents += 1
        self._fabric.agents[agent.name] = agent
        return agent

    def _connect(self, agent: Agent) -> Peer:
        peer = Peer(agent)
        network, host = self._fabric.network, agent.owner._process.host
        delay_s = self._fabric.arrives_within_s
        peer.line = Line(network, self._process.host, host, lambda: self._lose(peer), delay_s)
        agent.lines.append(peer.line)
        if not agent.is_open:
            self._fabric.clock.after(0.01, peer.line.break_off)
        return peer

    def _lose(self, peer: Peer) -> None:
        """A connection has broken, which the process notices at its next poll."""
        peer.is_open = False
        for write in peer.deliveries:
            write.has_failed = not write.is_done
        if self.is_two_sided:
            refusal = HandoffRefused(Cause.PEER, f"{peer.agent.name} closed the connection")
            self._inbox.append(Lost(peer, refusal))
        self._process.wake_connector()

    def _send(self, peer: Peer, leave: Action) -> None:
        """Lets something leave a little later, in order, if the process lives until then."""
        clock, most_s = self._fabric.clock, self._fabric.leaves_within_s
        peer.leaves_at = max(peer.leaves_at, clock.now + clock.draw.uniform(0.0, most_s))
        clock.after(peer.leaves_at - clock.now, lambda: self._process.when_awake(leave))

    def _depart(self, write: Write) -> None:
        if not write.peer.line.is_open:
            return
        if self._fabric.mishaps.kills():
            self._fabric.clock.note(f"{self._process.incarnation} dies while it writes")
            self._fabric.clock.after(0.001, self._process.die)
        tags = self._fabric.mishaps.damage(write.read())
        header = self._fabric.mishaps.confuse(write.header) if self.is_two_sided else write.header
        assert isinstance(header, Pages)
        if self.is_two_sided:
            payload = [memoryview(array("q", part)) for part in tags]
            write.is_told = True
            write.peer.line.send(lambda: self._arrive(write.peer, header, payload))
        else:
            write.peer.line.send(lambda: self._reach_page(write, tags))

    def _arrive(self, peer: Peer, message: ToReceiver, payload: Sequence[memoryview]) -> None:
        """A message is in the receiver's socket."""
        agent, reply = peer.agent, SimReply(peer.agent, peer, self._process.incarnation)
        if agent.is_open:
            heard = FromWriter(message, payload, reply)
            agent.socket.append(lambda: agent.owner._inbox.append(heard))
            agent.owner._process.wake_connector()

    def _reach_page(self, write: Write, tags: list[list[int]]) -> None:
        """A write's bytes are in the receiver's socket, or in its memory."""
        agent = write.peer.agent
        if not agent.is_open:
            return
        if self._fabric.lands_by_itself:
            self._land(write, tags)
        else:
            agent.socket.append(lambda: self._land(write, tags))
        agent.owner._process.wake_connector()

    def _land(self, write: Write, tags: list[list[int]]) -> None:
        memory = write.peer.agent.owner.memory
        for page, part in zip(write.chunk.targets, tags, strict=True):
            newest, state = memory.pool.newest(page.page_id)
            if newest != page or state not in (PageState.RECEIVING, PageState.QUARANTINED):
                raise Violation(f"bytes for {page} land in {newest}, which is {state.name}")
            memory.write(page.page_id, write.chunk.groups, part)
        network, host = self._fabric.network, write.peer.agent.owner._process.host
        back = Line(network, host, self._process.host)
        back.send(lambda: self._acknowledge(write))

    def _acknowledge(self, write: Write) -> None:
        write.is_done = not write.has_failed
        self._process.wake_connector()

    def _take_answer(self, peer: Peer, message: ToSender) -> None:
        now = peer if self.is_two_sided else self._peers.get(peer.agent.name)
        if now is None or (self.is_two_sided and not peer.is_open):
            return
        if isinstance(message, Placed):
            self._end_placed(peer, message)
        self._inbox.append(FromReceiver(now, message))
        self._process.wake_connector()

    def _end_placed(self, peer: Peer, placed: Placed) -> None:
        for write in peer.deliveries:
            header = write.header
            if (header.attempt.transfer_id, header.first, header.group) == (
                placed.transfer_id,
                placed.first,
                placed.group,
            ):
                write.is_done = True
