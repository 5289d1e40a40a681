"""The transport over NIXL: the sender writes directly into reserved pages.

One agent writes, and another one receives. NIXL has no fence: a released write still arrives, and
over TCP the bytes of a dead writer wait in our own sockets. So a write is always polled until it
has ended. Late bytes of a dead writer are kept out by closing the agent that received from it; the
next agent serves later reservations.
"""

import ctypes
import math
import os
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from effuse.kernels import cuda_ipc
from effuse.kvtransfer.connector import UNKNOWN, HandoffRefused, Route
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    Begin,
    MalformedMessage,
    Pages,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
    decode_to_receiver,
    decode_to_sender,
    encode,
    writer_of,
)
from effuse.kvtransfer.nixl_agent import (
    NIXL_ERRORS,
    NixlAgent,
    Transfer,
    confined,
    options_of,
    route_of,
    ucx_log,
)
from effuse.kvtransfer.nixl_peers import NixlPeer, NixlPeers, NixlWriters, PoolLists, attempt
from effuse.kvtransfer.peer_copies import copies_of
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

# On the host a thread digests a chunk while this one copies it. Smaller chunks cost more (measured
# with 1 to 16 MiB), because each takes about 60 us with cold code; larger ones leave more for the
# receiver to do at the end.
HOST_CHUNK_BYTES = 8 << 20
HOST_WINDOW_BYTES = 32 << 20
DEVICE_BYTES = 1 << 40
# A notification wakes no thread, so it must be polled. Over TCP polling also moves the bytes.
PAUSE_S = {
    Pace.HOT: 0.0,
    Pace.MOVING: 20e-6,
    Pace.COMPUTING: 200e-6,
    Pace.BEGUN: 200e-6,
    Pace.EXPECTING: 1e-3,
    Pace.IDLE: 0.1,
}
LOOKS = 8  # polls at a write, one after another: if a GPU copies, one may only see a part of it
HOST_HOT_S = 20e-6  # if processors move the bytes, another thread may need this one
MAPPED = Route("cuda_ipc")  # as UCX names it
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # by which UCX also recognises its own machine
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000  # the kernel would add its own 50 us to every pause


@dataclass(slots=True, eq=False)
class Receiving:
    """A receiving agent, and the writers that it answers."""

    agent: NixlAgent
    writers: NixlWriters
    address: ReceiverAddress


@dataclass(frozen=True, slots=True)
class NixlReply:
    """A writing rank, and the agent to which it sent."""

    receiving: Receiving
    writer: str


@dataclass(slots=True)
class NixlDelivery:
    """A posted write."""

    agent: NixlAgent
    peer: NixlPeer
    write: Transfer | None  # None if it ended immediately

    def is_over(self) -> bool:
        """Whether it has ended. A write that raises has ended too."""
        write = self.write
        if write is None:
            return True
        try:
            polls = (self.agent.is_done(write) for _ in range(LOOKS))
            if not attempt("a write failed", lambda: any(polls), self.peer):
                return False
            release = partial(self.agent.release, write)
            attempt("a write could not be released", release, self.peer)
        except HandoffRefused:
            self.write = None
            raise
        self.write = None
        return True


class NixlTransport(Transport):
    """A Transport whose agents are named after the role, the engine's incarnation and its `rank`,
    and listen on the interface of `host`."""

    name = "nixl"
    is_two_sided = False
    drain_s = math.inf  # posted writes cannot be stopped

    def __init__(
        self,
        memory: PageMemory,
        incarnation: str,
        *,
        role: str,
        rank: int = 0,
        host: str = "127.0.0.1",
        maps: bool = True,
    ) -> None:
        """maps: whether GPUs may map memory of peers, and peers this one."""
        on_device = memory.device.type == "cuda"
        self.chunk_bytes = DEVICE_BYTES if on_device else HOST_CHUNK_BYTES
        self.window_bytes = DEVICE_BYTES if on_device else HOST_WINDOW_BYTES
        self.copies_in_deliver = not on_device
        self._memory = memory
        self._layout = memory.layout
        self._kind = "VRAM" if on_device else "DRAM"
        self._pause_s = PAUSE_S if on_device else {**PAUSE_S, Pace.HOT: HOST_HOT_S}
        self._device_id = (memory.device.index or 0) if on_device else 0
        self._name = f"{role}-{incarnation}-{rank}"
        self._host = host
        self._maps = maps
        self._num_agents = 0

    def open(self) -> None:
        """Creates the agents and registers the whole pool with each, once. Raises ValueError for a
        host that is not this machine's."""
        self._options = options_of(self._host)  # once, because a name server may not answer later
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS)
        self._ucx = ucx_log()
        if self._kind == "VRAM":
            # otherwise UCX ignores the GPU without a message
            torch.cuda.set_device(self._memory.device)
            torch.zeros(1, device=self._memory.device)
        self._sender = self._agent("w", self._ucx.options)
        self._metadata = self._sender.connection()
        pool = "", self._memory.address, self._device_id, self._kind
        self._own = PoolLists(self._sender, pool, self._layout.page_bytes, self._memory.num_pages)
        for parts in (1, len(self._layout.groups)):
            self._own.cut(parts)
        self._copies = copies_of(self._memory) if self._maps else None
        self._peers = NixlPeers(self._sender, self._layout, maps=self._copies is not None)
        self._receiving = self._receive()
        self._retired: list[Receiving] = []

    def close(self) -> None:
        """The agents end with the process; writes that are in flight stay so."""

    def address(self) -> ReceiverAddress:
        """The current receiving agent, and this pool."""
        return self._receiving.address

    # Sending.

    def reach(self, reservation: Reservation, shard: Shard) -> Peer:
        """A receiving rank of a reservation."""
        num_tables = len(self._ucx.tables())
        peer = self._peers.find(reservation, shard)
        for parts in peer.cuts_of(peer.cut[0]):
            self._own.cut(parts)
        if peer.num_tables is None:
            peer.num_tables = num_tables
        peer.num_pushes += 1
        return peer

    def leave(self, peer: Peer) -> None:
        assert isinstance(peer, NixlPeer)
        self._peers.leave(peer)

    def forget_life(self, incarnation: str) -> None:
        """Removes its agents, and with them their mappings of its memory."""
        self._peers.forget(incarnation)

    def route(self, peer: Peer) -> Route:
        """As UCX reports it. A table is logged once, so a peer may use an earlier one."""
        assert isinstance(peer, NixlPeer)
        if peer.pool and not peer.takes_pages:
            peer.route = MAPPED
        if peer.route is UNKNOWN:
            tables = self._ucx.tables()
            on_gpu, num_bytes = self._kind == "VRAM", self._layout.page_bytes
            find = partial(route_of, on_gpu=on_gpu, num_bytes=num_bytes)
            is_near = peer.address.boot_id == self.address().boot_id
            peer.route = find(tables[peer.num_tables :])
            if peer.route is UNKNOWN:
                peer.route = find(tables, scope="intra-node" if is_near else "inter-node")
        return peer.route

    def send(self, peer: Peer, message: ToReceiver) -> None:
        assert isinstance(peer, NixlPeer)
        if isinstance(message, Begin):
            message = msgspec.structs.replace(message, reply_to=self._metadata)
        notify = partial(self._sender.notify, peer.name, encode(message))
        attempt("the peer could not be notified", notify, peer)

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Posts a write whose end notifies the receiver. May take as long as the copy.

        Whole pages, which wait for nothing else, are few descriptors. Other parts of them are not,
        so one kernel copies them to a pool that is mapped here.
        """
        assert isinstance(peer, NixlPeer)
        is_whole = peer.takes_pages and chunk.groups == self._layout.groups
        if self._copies is not None and peer.pool and not is_whole:
            send = partial(self._sender.notify, peer.name, encode(header))
            notify = partial(attempt, "the peer could not be notified", send, peer)
            return self._copies.begin(chunk, peer.cut, peer.pool, notify)

        def post() -> Transfer | None:
            write = self._write(peer, chunk)
            if not self._sender.post(write, encode(header)):
                return write
            self._sender.release(write)
            return None

        write = attempt("a write could not be posted", post, peer)
        return NixlDelivery(self._sender, peer, write)

    def _write(self, peer: NixlPeer, chunk: Chunk) -> Transfer:
        """A write of a chunk, not posted yet. Whole pages, which wait for nothing else, take a
        short path, because each step here runs with cold caches and costs the host ten times as
        much."""
        targets = [page.page_id for page in chunk.targets]
        ours, theirs = peer.cut
        if peer.takes_pages and len(chunk.groups) == ours.groups:
            pages = list(chunk.source_pages)
            return self._sender.write(self._own.cut(1), pages, peer.lists.cut(1), targets)
        return self._sender.write(
            self._own.cut(ours.per_page),
            ours.units(chunk.source_pages, chunk.groups),
            peer.lists.cut(theirs.per_page),
            theirs.units(targets, chunk.groups),
        )

    # Receiving.

    def receive(self) -> list[Received]:
        received: list[Received] = []
        for name, data in self._sender.notifications():
            peer = self._peers.by_name.get(name)
            try:
                answer = decode_to_sender(data)
            except MalformedMessage:
                continue
            if peer is not None:
                received.append(FromReceiver(peer, answer))
        for receiving in (self._receiving, *self._retired):
            for _, data in receiving.agent.notifications():
                try:
                    message = decode_to_receiver(data)
                except MalformedMessage:
                    continue
                received.append(FromWriter(message, (), NixlReply(receiving, writer_of(message))))
        return received

    def connect(self, reply: Reply, begin: Begin) -> None:
        """Connects to a writer that is going to be answered."""
        assert isinstance(reply, NixlReply)
        reply.receiving.writers.add(reply.writer, begin.reply_to)

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Notifies a writer; one that has not introduced itself gets nothing."""
        assert isinstance(reply, NixlReply)
        if reply.receiving is self._receiving or reply.receiving in self._retired:
            reply.receiving.writers.notify(reply.writer, encode(message))

    # Fencing.

    def renew(self, address: ReceiverAddress) -> None:
        """Makes another agent receive from now on."""
        if self._receiving.address == address:
            self._retired.append(self._receiving)
            self._receiving = self._receive()

    def shut_off(self, address: ReceiverAddress) -> None:
        """Closes an agent, its connections, and all bytes that wait in them."""
        for receiving in [one for one in self._retired if one.address == address]:
            self._retired.remove(receiving)
            receiving.agent.close()

    def wait(self, pace: Pace, requests: int) -> None:
        """Sleeps; a request ends the longer sleeps early."""
        seconds = self._pause_s[pace]
        if not seconds:
            os.sched_yield()  # a sleep of zero takes 15 to 56 us
        elif pace in (Pace.HOT, Pace.MOVING):
            time.sleep(seconds)
        else:
            if pace is Pace.IDLE:
                self._ucx.tables()  # so that warnings are shown
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(requests, select.POLLIN)
            poll.poll(seconds * 1000)

    def _agent(self, suffix: str, options: Mapping[str, str]) -> NixlAgent:
        memory = self._memory
        with confined({**self._options, **options}):
            agent = NixlAgent(f"{self._name}{suffix}")
        agent.register(memory.address, memory.num_bytes, self._device_id, self._kind)
        return agent

    def _receive(self) -> Receiving:
        agent = self._agent(f"r{self._num_agents}", {})
        self._num_agents += 1
        handle = b"" if self._copies is None else cuda_ipc.handle_of(self._memory.address)
        address = ReceiverAddress(
            connector=self.name,
            agent_name=agent.name,
            agent_metadata=agent.metadata(handle),
            pool_address=self._memory.address,
            device_id=self._device_id,
            memory_kind=self._kind,
            boot_id=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        )
        return Receiving(agent, NixlWriters(agent), address)


def why_unusable(host: str) -> str:
    """Why no agent starts that listens on the interface of `host`; empty if one does."""
    try:
        with confined({**options_of(host), **ucx_log().options}):
            NixlAgent(f"probe-{os.getpid()}").close()
    except NIXL_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, RuntimeError, OSError) as error:  # from the interface, or from its plugins
        return str(error)
    return ""
