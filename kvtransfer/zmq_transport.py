"""The transport over ZMQ: the receiver checks the bytes and places them.

The safe fallback, and the transport of machines without RDMA. Pages in host memory are sent in
place; those of a GPU go through pinned buffers. Each chunk is acknowledged, so that a push has a
bounded number of bytes in transit.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from weakref import ref

import zmq

from effuse.config.access import host_and_port
from effuse.kvtransfer.connector import Cause, HandoffRefused, Route
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    MAX_MANIFEST_BYTES,
    MalformedMessage,
    Pages,
    Placed,
    ReceiverAddress,
    Reservation,
    Shard,
    ToReceiver,
    ToSender,
    decode_to_receiver,
    decode_to_sender,
    encode,
)
from effuse.kvtransfer.staging import Fetched, Staging
from effuse.kvtransfer.transport import (
    Chunk,
    Delivery,
    FromReceiver,
    FromWriter,
    Lost,
    Pace,
    Peer,
    Received,
    Reply,
    Transport,
)
from effuse.kvtransfer.zmq_sockets import MESSAGES_A_TURN, CurveKeys, ZmqListener, ZmqPeer

CHUNK_BYTES = 8 << 20  # which every receiver accepts, and a GPU's buffers hold
# Bytes that were just received are placed and digested in the processor's caches. With 8 MiB a
# handoff of 64 MiB took a third longer, with 1 MiB the messages cost as much (measured).
HOST_CHUNK_BYTES = 2 << 20
# malloc's options. By default it returns the memory of received frames to the kernel, which clears
# every page of the next ones: a handoff of 64 MiB took two thirds longer (measured).
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 64 << 20
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 32 << 20  # the highest that it takes
WINDOW_BYTES = 32 << 20
QUEUED_BYTES = 32 << 20  # per connection, beyond which TCP holds it back
CONNECT_S = 5.0
# Of a context: 3 for each peer, of which there are as many as in the fleet. ZMQ's default is 1023.
MAX_SOCKETS = 1 << 14
DRAIN_S = 2.0  # for a receiver to answer chunks in transit, before its connection is dropped
IDLE_MS = 20  # between checks of deadlines and floods; sockets wake the thread sooner
MOVING_MS = 1
ROUTE = Route("zmq over tcp")
DEVICE_PAUSE_S = 50e-6  # copies of a GPU do not wake the thread


@dataclass(slots=True, eq=False)
class ZmqDelivery:
    """A chunk that was sent, or waits for its copy from a GPU."""

    peer: ZmqPeer
    header: Pages
    fetched: Fetched | None
    sent: Sequence[ref[memoryview]] = ()  # what ZMQ holds as long as it reads the memory
    is_placed: bool = False

    def is_over(self) -> bool:
        """Whether it was placed, or its connection has ended: nothing reads the source."""
        if not self.is_placed and (self.peer.is_open or self._is_read()):
            return False
        if self.fetched is not None:
            self.fetched.release()
            self.fetched = None
        return True

    def _is_read(self) -> bool:
        """Whether ZMQ or a copy may still read the source."""
        is_fetched = self.fetched is None or self.fetched.is_over()
        return not is_fetched or any(view() is not None for view in self.sent)


class ZmqTransport(Transport):
    """A Transport that listens on `host`, and that peers reach as `advertised_host`; with `keys` it
    only connects to their owners."""

    name = "zmq"
    is_two_sided = True
    window_bytes = WINDOW_BYTES
    drain_s = DRAIN_S

    def __init__(
        self,
        memory: PageMemory,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self.most_bytes = max(CHUNK_BYTES, memory.page_bytes)
        # Not a page, because a receiver's may be a part of it: then several would be too many.
        self.chunk_bytes = HOST_CHUNK_BYTES if memory.device.type == "cpu" else CHUNK_BYTES
        self._memory = memory
        self._bind = f"tcp://{host_and_port(host, 0)}"
        self._advertised = advertised_host or host
        self._keys = keys
        self._open = ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._address = ReceiverAddress(connector=self.name)
        self._staging: Staging | None = None
        self._peers: dict[str, ZmqPeer] = {}
        self._poller = zmq.Poller()  # of all existing sockets
        self._fetching: list[ZmqDelivery] = []  # to be sent once they are on the host
        # Not answered yet, by receiver, transfer, first page and group of layers.
        self._sent: dict[tuple[str, str, int, int], ZmqDelivery] = {}

    def open(self) -> None:
        """Binds the receiving socket."""
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        malloc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        message_bytes = max(self.most_bytes, MAX_MANIFEST_BYTES)
        queued = max(2, QUEUED_BYTES // message_bytes)
        if self._keys is not None:
            self._open.enter_context(self._keys.admitting(self._context))
        self._listener = ZmqListener(
            self._context, self._bind, message_bytes=message_bytes, queued=queued, keys=self._keys
        )
        self._watch(self._listener.socket, self._listener.monitor)
        endpoint = f"tcp://{host_and_port(self._advertised, self._listener.port)}"
        self._address = ReceiverAddress(connector=self.name, endpoint=endpoint)
        if self._memory.device.type == "cuda":
            self._staging = Staging(self._memory, self.most_bytes)

    def close(self) -> None:
        """Closes every socket."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._listener.close()
        self._open.close()
        self._context.term()

    def address(self) -> ReceiverAddress:
        """The listening address of this pool."""
        return self._address

    # Sending.

    def reach(self, reservation: Reservation, shard: Shard) -> Peer:
        """A connection to a receiving rank, new or existing."""
        endpoint = shard.address.endpoint
        peer = self._peers.get(endpoint)
        if peer is None:
            if not endpoint.startswith("tcp://"):
                raise HandoffRefused(
                    Cause.PEER, f"endpoint {endpoint!r} does not have the form tcp://host:port"
                )
            try:
                peer = ZmqPeer(self._context, endpoint, time.monotonic(), self._keys)
            except zmq.ZMQError as error:
                raise HandoffRefused(Cause.PEER, f"endpoint {endpoint!r}: {error}") from error
            self._peers[endpoint] = peer
            self._watch(peer.socket, peer.monitor)
        return peer

    def route(self, peer: Peer) -> Route:
        """Its sockets are TCP's."""
        return ROUTE

    def drop(self, peer: Peer) -> None:
        """Closes a connection; nothing that was sent over it is read any more then."""
        assert isinstance(peer, ZmqPeer)
        if self._peers.get(peer.endpoint) is peer:
            del self._peers[peer.endpoint]
            self._poller.unregister(peer.socket)
            self._poller.unregister(peer.monitor)
        peer.close()
        self._fetching = [delivery for delivery in self._fetching if delivery.peer is not peer]
        self._sent = {key: one for key, one in self._sent.items() if one.peer is not peer}

    def send(self, peer: Peer, message: ToReceiver) -> None:
        assert isinstance(peer, ZmqPeer)
        with _open(peer):
            peer.send_message(message)

    def deliver(self, peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        """Sends pages in place; those of a GPU once they have been copied."""
        assert isinstance(peer, ZmqPeer)
        with _open(peer):
            if self._staging is None:
                delivery = ZmqDelivery(peer, header, None)
                self._send(
                    delivery, self._memory.views(chunk.source_pages, chunk.groups, chunk.heads)
                )
                return delivery
            if self._num_staged(peer) >= self._staging.num_free:
                return None  # the rest is for others, in case this peer never answers
            fetched = self._staging.fetch(chunk.source_pages, chunk.groups, chunk.heads)
        if fetched is None:
            return None
        delivery = ZmqDelivery(peer, header, fetched)
        self._fetching.append(delivery)
        return delivery

    def _num_staged(self, peer: ZmqPeer) -> int:
        """Buffers with chunks that this peer has not answered."""
        return sum(one.peer is peer for one in (*self._fetching, *self._sent.values()))

    def _send(self, delivery: ZmqDelivery, frames: Sequence[memoryview]) -> None:
        header = delivery.header
        delivery.sent = delivery.peer.send(header, frames)
        name = delivery.peer.endpoint, header.transfer_id
        self._sent[*name, header.first, header.group] = delivery

    # Receiving.

    def receive(self) -> list[Received]:
        """Messages of peers; also sends chunks that were copied from a GPU."""
        received: list[Received] = []
        self._send_fetched(received)
        for multipart in self._listener.receive():
            first, *payload = (frame.buffer for frame in multipart.frames or [zmq.Frame(b"")])
            # One that is none has no address for an answer: its sender did not name itself.
            with suppress(MalformedMessage):
                message = decode_to_receiver(first)
                received.append(FromWriter(message, payload, multipart.sender))
        # Of hundreds of peers almost none has sent anything, and polling each takes milliseconds.
        ready = {source for source, _ in self._poller.poll(0)}
        for peer in list(self._peers.values()):
            if peer.socket in ready or peer.monitor in ready:
                self._receive_from(peer, received)
            elif not peer.is_connected and time.monotonic() - peer.opened_at > CONNECT_S:
                self._lose(peer, f"did not accept a connection within {CONNECT_S} s", received)
        return received

    def _send_fetched(self, received: list[Received]) -> None:
        fetching, self._fetching = self._fetching, []
        for delivery in fetching:
            assert delivery.fetched is not None
            if not delivery.peer.is_open:
                continue  # lost together with an earlier one of these
            if not delivery.fetched.is_over():
                self._fetching.append(delivery)
                continue
            try:
                self._send(delivery, [self._take_out(delivery, delivery.fetched)])
            except zmq.Again:
                self._lose(delivery.peer, "closed the connection", received)

    def _take_out(self, delivery: ZmqDelivery, fetched: Fetched) -> memoryview:
        """The frames of a chunk that was copied from a GPU."""
        assert self._staging is not None, "it was copied"
        if self._staging.num_free:
            return fetched.view
        # The last buffer: receivers that never answer may hold all others, so this one does not
        # wait for an answer.
        view = memoryview(bytes(fetched.view))
        fetched.release()
        delivery.fetched = None
        return view

    def _receive_from(self, peer: ZmqPeer, received: list[Received]) -> None:
        answers = peer.answers()
        for data in answers:
            try:
                answer = decode_to_sender(data)
            except MalformedMessage as error:
                self._lose(peer, str(error), received)
                return
            if isinstance(answer, Placed):
                key = (peer.endpoint, answer.transfer_id, answer.first, answer.group)
                delivery = self._sent.get(key)
                if delivery is not None and delivery.peer is peer:
                    delivery.is_placed = True
                    del self._sent[key]
            received.append(FromReceiver(peer, answer))
        # A lost one may have sent more before, which is handled first.
        if len(answers) < MESSAGES_A_TURN and peer.is_lost():
            self._lose(peer, "closed the connection", received)

    def _lose(self, peer: ZmqPeer, reason: str, received: list[Received]) -> None:
        self.drop(peer)
        refusal = HandoffRefused(Cause.PEER, f"the receiver at {peer.endpoint} {reason}")
        received.append(Lost(peer, refusal))

    def answer(self, reply: Reply, message: ToSender) -> None:
        """Answers over the writer's own connection."""
        assert isinstance(reply, bytes)
        self._listener.answer(reply, encode(message))

    def place(
        self, page_ids: Sequence[int], groups: range, payload: Sequence[memoryview], heads: range
    ) -> None:
        """Copies pages into the pool, on a GPU after the work on its stream."""
        if self._staging is None:
            self._memory.write(page_ids, groups, payload, heads)
        else:
            self._staging.store(page_ids, groups, payload, heads)

    def wait(self, pace: Pace, requests: int) -> None:
        """Sleeps until a socket or the engine needs the thread."""
        is_moving = pace in (Pace.HOT, Pace.MOVING, Pace.COMPUTING)
        if is_moving and self._staging is not None:
            time.sleep(DEVICE_PAUSE_S)
            return
        self._poller.register(requests, zmq.POLLIN)
        self._poller.poll(MOVING_MS if is_moving else IDLE_MS)

    def _watch(self, *sockets: zmq.Socket[bytes]) -> None:
        for one in sockets:
            self._poller.register(one, zmq.POLLIN)


@contextmanager
def _open(peer: ZmqPeer) -> Iterator[None]:
    """Raises HandoffRefused if the connection is closed, by us or by ZMQ. ZMQ drops a connection
    whose handshake was refused, and then has no destination for a message."""
    refusal = HandoffRefused(Cause.PEER, f"the connection to {peer.endpoint} was closed")
    if not peer.is_open:
        raise refusal
    try:
        yield
    except zmq.Again as error:
        raise refusal from error
