"""The sockets of the ZMQ transport: one that listens, one for each receiver, and the keys of both.

ZMQ bounds a frame but not a message: frames that announce another one accumulate in its memory
until the last has arrived. So the bytes that it has read from each connection, by the kernel's
count, are compared with those that have left the listening socket. A connection that is too far
ahead is closed. So is one whose message has more frames than a chunk has pages, because ZMQ takes
64 bytes for each, and Python hundreds.

One pair of CurveZMQ keys is derived from the fleet's secret, and every worker has it, as server and
as client. Each connection also has its own keys, which end with it. So a later thief of the secret
cannot read recorded traffic. http://curvezmq.org/page:read-the-docs
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from weakref import ref

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from effuse.kvtransfer.messages import MAX_CHUNK_PAGES, ToReceiver, encode
from effuse.kvtransfer.resolving import numeric_endpoint

LOG = logging.getLogger(__name__)

MESSAGES_A_TURN = 32
MOST_FRAMES = 1 + MAX_CHUNK_PAGES  # of a message: its content, and pages
SHORT_HEADER, LONG_HEADER = 2, 9  # of frames of up to 255 bytes, and of others
SLACK_BYTES = 16 << 20  # more than an honest connection holds
_LISTENER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info
_RESET = struct.pack("ii", 1, 0)  # a linger of 0 s: the last close sends a reset
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # an operation on pyzmq's own takes 3 us
GUARD_S = 0.005
"""Between looks at the kernel's counts, for each of which a connection stands still. Little more
than `SLACK_BYTES` arrive in that time."""
KEY_BYTES = 32
FRAME_BYTES = 33
"""Bytes that encryption adds to a frame: the command's name, a nonce, the code and flags."""
HEARTBEAT_MS = 1000
HEARTBEAT_BYTES = 64
"""More than one command has, encrypted. They never leave the socket, and without counting them an
old connection would be closed.
"""
SILENCE_MS = 5000
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 20,  # seconds, like the next one
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
"""How a listener notices that a sender's host is gone. It sends no heartbeats itself, and the
sender's may be delayed behind the bytes of a slow link.
"""
_PEER_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A pair of keys in ZMQ's form."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, seed: bytes) -> CurveKeys:
        """The pair derived from 32 bytes of a secret."""
        if len(seed) != KEY_BYTES:
            raise ValueError(f"expected {KEY_BYTES} bytes, got {len(seed)}")
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Makes an unbound socket accept only encrypted connections."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def ask(self, socket: zmq.Socket[bytes]) -> None:
        """Makes an unconnected socket connect only to an owner of these keys."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    @contextmanager
    def admitting(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
        """Accepts owners of these keys, as long as the context lasts. Without it ZMQ asks nothing,
        and accepts any key."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        try:
            yield
        finally:
            authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether it is the fleet's key; called by the thread that accepts connections."""
        return key == self.public


@dataclass(slots=True)
class Connection:
    """One accepted connection."""

    twin: socket.socket  # of the same TCP connection, for the kernel's counts
    since: float  # when it was accepted
    num_taken: int = 0  # bytes that left the ZMQ socket

    def num_read(self) -> int:
        """Least number of its bytes that ZMQ has read: the kernel may hold more than ZMQ does."""
        info = self.twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        received: int = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]
        (unread,) = struct.unpack("i", fcntl.ioctl(self.twin, termios.FIONREAD, bytes(4)))
        return received - int(unread)

    def num_waiting(self, now: float) -> int:
        """Least number of bytes that ZMQ holds."""
        num_beats = int((now - self.since) * 1000 / HEARTBEAT_MS)
        return self.num_read() - self.num_taken - num_beats * HEARTBEAT_BYTES

    def cut(self) -> None:
        """Ends the connection, for ZMQ and for its sender. Without a reset, a sender whose window
        is closed can wait a minute: the kernel drops its probes once ZMQ has closed."""
        try:
            self.twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.twin.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            LOG.debug("a connection had already ended: %s", error)


@dataclass(slots=True)
class Multipart:
    """One message: its sender and its frames."""

    sender: bytes
    frames: list[zmq.Frame] = field(default_factory=list)


class ZmqListener:
    """A bound ROUTER socket. Each connection may hold at most `queued` messages of `message_bytes`
    here, and an incomplete one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind: str,
        *,
        message_bytes: int,
        queued: int,
        keys: CurveKeys | None = None,
    ) -> None:
        """keys: only encrypted connections of their owners are accepted; None accepts all. Raises
        zmq.ZMQError if it cannot listen."""
        self.socket = context.socket(zmq.ROUTER)
        if keys is not None:
            keys.serve(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, queued)
        for option, value in KEEPALIVE.items():
            self.socket.setsockopt(option, value)
        self._num_added = 0 if keys is None else FRAME_BYTES
        self.socket.setsockopt(zmq.MAXMSGSIZE, message_bytes + self._num_added)
        self.monitor = self.socket.get_monitor_socket(_LISTENER_EVENTS)
        self._most_waiting = (queued + 1) * message_bytes + SLACK_BYTES
        self._connections: dict[int, Connection] = {}  # by ZMQ's descriptor
        self._guarded_at = -GUARD_S
        self._drops = False  # the rest of a message that has too many frames
        where = numeric_endpoint(bind)
        self.socket.setsockopt(zmq.IPV6, "[" in where)
        try:
            self.socket.bind(where)
        except zmq.ZMQError:
            self.close()
            raise
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def close(self) -> None:
        """Closes the socket; queued messages are dropped."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        for connection in self._connections.values():
            connection.twin.close()
        self._connections.clear()
        self.socket.close(linger=0)

    def receive(self) -> list[Multipart]:
        """Messages that have arrived, within a bound."""
        self._watch()
        received: list[Multipart] = []
        while len(received) < MESSAGES_A_TURN and _is_readable(self.socket):
            if (message := self._next()) is None:
                break
            received.append(message)
        if (now := time.monotonic()) - self._guarded_at >= GUARD_S:
            self._guarded_at = now
            self._guard(now)
        return received

    def _next(self) -> Multipart | None:
        """The next message. None if there is none, and while one with too many frames is dropped:
        ZMQ returns no others before its end, which may take many turns."""
        frames: list[zmq.Frame] = []
        with suppress(zmq.Again):
            while len(frames) <= MOST_FRAMES:
                frames.append(self.socket.recv(zmq.NOBLOCK, copy=False))
                if not frames[-1].more:
                    break
        if not frames:
            return None
        sender, *frames = frames
        goes_on = bool((frames or [sender])[-1].more)
        if self._drops or goes_on:
            if not self._drops:
                self._watch()  # it may have been accepted a moment ago
                self._cut(descriptor_of(frames), f"a message of more than {MOST_FRAMES} frames")
            self._drops = goes_on
            return None
        self._count(frames)
        return Multipart(sender.bytes, frames)

    def answer(self, sender: bytes, message: bytes) -> None:
        """Answers a sender, if it is still there."""
        self.socket.send_multipart([sender, message], zmq.NOBLOCK)

    def _watch(self) -> None:
        while _is_readable(self.monitor):
            event = recv_monitor_message(self.monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                closed = self._connections.pop(descriptor, None)
                if closed is not None:
                    closed.twin.close()
                continue
            try:
                copy = os.dup(descriptor)
            except OSError:
                continue  # it has already ended
            try:
                twin = socket.socket(fileno=copy)
            except OSError:  # and something else has its descriptor
                os.close(copy)
                continue
            earlier = self._connections.pop(descriptor, None)
            if earlier is not None:
                earlier.twin.close()
            self._connections[descriptor] = Connection(twin, time.monotonic())

    def _count(self, frames: list[zmq.Frame]) -> None:
        descriptor = descriptor_of(frames)
        if descriptor not in self._connections:
            self._watch()  # it was accepted a moment ago
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.num_taken += sum(self._num_on_wire(len(frame)) for frame in frames)

    def _num_on_wire(self, num_bytes: int) -> int:
        body = num_bytes + self._num_added
        return body + (LONG_HEADER if body > 255 else SHORT_HEADER)

    def _guard(self, now: float) -> None:
        for descriptor, connection in list(self._connections.items()):
            waiting = connection.num_waiting(now)
            if waiting > self._most_waiting:
                self._cut(descriptor, f"{waiting} bytes of an unfinished message")

    def _cut(self, descriptor: int, sent: str) -> None:
        """Ends a connection, if it is known; `sent` describes its message for the log."""
        LOG.warning("closed a connection that sent %s", sent)
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.cut()
            connection.twin.close()


def _is_readable(one: zmq.Socket[bytes]) -> bool:
    """Ten times as fast as to poll it, or to find nothing in it."""
    return bool(int(one.get(_EVENTS)) & _POLLIN)


def descriptor_of(frames: list[zmq.Frame]) -> int:
    """ZMQ's descriptor of a message's connection; -1 if ZMQ has none, for example for an empty
    message, or for a peer with ZMTP 1 or 2."""
    try:
        descriptor: int = frames[0].get(zmq.SRCFD) if frames else -1
    except zmq.ZMQError:
        return -1
    return descriptor


class ZmqPeer:
    """A DEALER socket to one endpoint. Raises zmq.ZMQError for an invalid endpoint."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        now: float,
        keys: CurveKeys | None = None,
    ) -> None:
        """keys: those of the receiver; None accepts any receiver, in plain text."""
        self.endpoint = endpoint
        self.opened_at = now
        self.is_connected = False
        self.is_open = True
        self.socket = context.socket(zmq.DEALER)
        if keys is not None:
            keys.ask(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # the sender bounds the bytes in transit
        self.socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        where = numeric_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, "[" in where)
        self.monitor = self.socket.get_monitor_socket(_PEER_EVENTS)
        try:
            self.socket.connect(where)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Drops the connection and everything queued; may be called twice."""
        if self.is_open:
            self.is_open = False
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)

    def is_lost(self) -> bool:
        """Reads the monitor; True once the connection that was up went down."""
        while _is_readable(self.monitor):
            event = recv_monitor_message(self.monitor)["event"]
            if event != zmq.EVENT_CONNECTED:
                return True
            self.is_connected = True
        return False

    def answers(self) -> list[bytes]:
        """The receiver's messages since the last call, within a bound. Our messages to senders have
        no second frame; one with a second frame is returned empty, and must not be parsed."""
        answers: list[bytes] = []
        with suppress(zmq.Again):
            while len(answers) < MESSAGES_A_TURN and _is_readable(self.socket):
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                if frame.more:
                    return [*answers, b""]
                answers.append(frame.bytes)
        return answers

    def send_message(self, message: ToReceiver) -> None:
        """Sends a message without payload."""
        self.socket.send(encode(message), zmq.NOBLOCK)

    def send(self, header: ToReceiver, frames: Sequence[memoryview]) -> list[ref[memoryview]]:
        """Sends frames directly from their memory. Each view returned is None once ZMQ does not
        read its memory any more. ZMQ's own trackers cost a lock and a condition for each."""
        views = [frame[:] for frame in frames]  # that only ZMQ holds
        self.socket.send_multipart([encode(header), *views], zmq.NOBLOCK, copy=False)
        return list(map(ref, views))
