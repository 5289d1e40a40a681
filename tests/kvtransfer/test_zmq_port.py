"""The port of the ZMQ transport survives any input."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import zmq
from kvtransfer.fixtures import (
    DEADLINE_S,
    SMALL,
    WHOLE,
    boundary,
    filled,
    next_event,
    print_of,
    reservation,
)
from kvtransfer.receiver_process import make

from effuse.kvtransfer import zmq_sockets
from effuse.kvtransfer.connector import Arrived, Expect, FinishPush, PushPages
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    MAX_CHUNK_PAGES,
    MAX_MANIFEST_BYTES,
    AttemptId,
    Begin,
    PageRef,
    Pages,
    ReceiverAddress,
    Rejected,
    decode_to_sender,
    encode,
)
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.zmq_sockets import Connection, CurveKeys, Multipart, ZmqListener, ZmqPeer
from effuse.kvtransfer.zmq_transport import ZmqTransport
from effuse.placement.records import MOST_LINKS

BOUNDARY = boundary(9)


@dataclass
class Port:
    """A connector that expects one page, and a bare socket connected to it."""

    connector: ThreadConnector
    memory: PageMemory
    socket: zmq.Socket[bytes]
    lost: zmq.Socket[bytes]  # shows that its connection was closed

    def until_taken(self) -> None:
        """Returns once earlier messages were taken, or have cost the connection."""
        self.socket.send(FALSE_BEGIN)  # this is answered
        poller = zmq.Poller()
        for one in (self.socket, self.lost):
            poller.register(one, zmq.POLLIN)
        assert poller.poll(int(DEADLINE_S * 1000)), "nothing came of it"

    def is_honest(self, number: int) -> bool:
        """Whether an honest push still arrives."""
        source = filled(SMALL, 2)
        sender = make("zmq", source, "prefill-1")
        sender.start()
        reserved = reservation(
            self.memory, self.connector.describe(), (PageRef(1, 1),), number=number
        )
        self.connector.send(Expect(reserved, "prefill-1"))
        sender.send(PushPages(reserved, (0,), 0))
        sender.send(FinishPush(reserved, lambda: BOUNDARY))
        event = next_event(self.connector, reserved.transfer_id)
        sender.close()
        return isinstance(event, Arrived) and self.memory.bytes_at(1) == source.bytes_at(0)


@pytest.fixture
def port() -> Iterator[Port]:
    memory = PageMemory(SMALL, 4)
    connector = make("zmq", memory, "decode-1")
    connector.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    lost = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(connector.describe()[0].address.endpoint)
    yield Port(connector, memory, dealer, lost)
    dealer.disable_monitor()
    lost.close(linger=0)
    dealer.close()
    context.term()
    connector.close()


ATTEMPT = AttemptId("request-7", 1, "transfer-7")
BEGIN = encode(Begin(ATTEMPT, "prefill-1", "decode-1", WHOLE, print_of(SMALL)))
FALSE_BEGIN = encode(Begin(ATTEMPT, "prefill-1", "decode-0", WHOLE, print_of(SMALL)))
PAGES = encode(Pages(ATTEMPT, "prefill-1", "decode-1", WHOLE, 0, (PageRef(0, 1),), 0, 2))

# ZMTP 3.0 by hand, since a socket of ZMQ sends no message before it is complete.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = bytes([4, len(READY_BODY)]) + READY_BODY
FRAME_AND_MORE = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)

JUNK: dict[str, list[bytes]] = {
    "an empty frame": [b""],
    "text": [b"GET / HTTP/1.1\r\n"],
    "many frames": [b"x"] * 500,
    "a truncated message": [BEGIN[:-1]],
    "a message of an unknown kind": [b"\x81\xa4type\xa6Format"],
    "surplus bytes": [BEGIN + b"\x00"],
    "a frame beyond the cap": [bytes(MAX_MANIFEST_BYTES + 1)],
    "a field of nobody's that never ends": [b"\x82\xa4type\xa5Begin\xa4more" + b"\x91" * 100_000],
    "pages of nobody": [PAGES, bytes(SMALL.page_bytes)],
    "pages without bytes": [PAGES],
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_changes_nothing(port: Port, name: str) -> None:
    port.socket.send_multipart(JUNK[name])
    port.until_taken()
    assert port.is_honest(number=2)
    assert not port.memory.tensor[[0, 2, 3]].any()


def test_bytes_that_are_not_even_zmq_change_nothing(port: Port) -> None:
    host, _, number = (
        port.connector.describe()[0].address.endpoint.removeprefix("tcp://").partition(":")
    )
    with (
        socket.create_connection((host, int(number)), DEADLINE_S) as raw,
        contextlib.suppress(ConnectionError),  # the port closes it, whatever is still unread
    ):
        raw.sendall(bytes(range(256)) * 64)
        while raw.recv(4096):
            pass
    assert port.is_honest(number=2)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (PAGES, "unknown transfer"),
        (FALSE_BEGIN, "incarnation"),
    ],
    ids=["pages", "begin"],
)
def test_what_is_well_formed_and_wrong_is_answered(port: Port, message: bytes, cause: str) -> None:
    port.socket.send(message)
    answer = decode_to_sender(port.socket.recv())
    assert isinstance(answer, Rejected)
    assert (answer.transfer_id, answer.cause) == ("transfer-7", cause)


def test_frames_that_never_end_cost_the_connection_and_not_the_memory(port: Port) -> None:
    """Each announces another one, so that ZMQ keeps them all; no transfer id is needed."""
    host, _, number = (
        port.connector.describe()[0].address.endpoint.removeprefix("tcp://").partition(":")
    )
    before, num_sent = _resident_bytes(), 0
    with socket.create_connection((host, int(number)), DEADLINE_S) as raw:
        raw.sendall(GREETING + READY)
        with contextlib.suppress(ConnectionError):
            while num_sent < 2 << 30:
                raw.sendall(FRAME_AND_MORE)
                num_sent += len(FRAME_AND_MORE)
                time.sleep(0.001)  # about 1 GB/s
        grown = _resident_bytes() - before
    assert num_sent < 2 << 30, "it was never cut"
    assert grown < 256 << 20, f"{grown >> 20} MiB were kept"
    assert port.is_honest(number=2)


def test_a_sender_whose_window_is_closed_learns_that_its_connection_is_cut() -> None:
    """ZMQ reads the bytes that have arrived before it closes, and so no unread byte resets it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), DEADLINE_S)
        read_by_zmq, _ = server.accept()
    with sender, read_by_zmq:
        sender.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while True:
                sender.send(bytes(1 << 16))
        connection = Connection(socket.socket(fileno=os.dup(read_by_zmq.fileno())), 0.0)
        connection.cut()
        connection.twin.close()
        while read_by_zmq.recv(1 << 20):
            pass
        read_by_zmq.close()
        sender.settimeout(DEADLINE_S)
        with pytest.raises(ConnectionError):
            sender.sendall(bytes(1 << 24))


def test_a_message_of_a_million_frames_costs_the_connection_and_not_the_memory(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 2 bytes each on the wire, a hundredth of their size afterwards."""
    host, _, number = (
        port.connector.describe()[0].address.endpoint.removeprefix("tcp://").partition(":")
    )
    most_taken, take = 0, ZmqListener.receive

    def note(listener: ZmqListener) -> list[Multipart]:
        nonlocal most_taken
        received = take(listener)
        most_taken = max(most_taken, *(len(one.frames) for one in received), 0)
        return received

    monkeypatch.setattr(ZmqListener, "receive", note)
    with socket.create_connection((host, int(number)), DEADLINE_S) as raw:
        raw.sendall(GREETING + READY)
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"\x01\x00" * 1_000_000 + b"\x00\x00")
            while raw.recv(4096):
                pass
    assert most_taken <= 1 + MAX_CHUNK_PAGES
    assert port.is_honest(number=2)


def test_as_many_frames_as_a_chunk_has_pages_are_taken() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2)
    sender = context.socket(zmq.DEALER)
    sender.connect(f"tcp://127.0.0.1:{listener.port}")
    for _ in range(2):
        sender.send_multipart([b"x"] * (1 + MAX_CHUNK_PAGES))
    taken: list[int] = []
    while len(taken) < 2:
        assert listener.socket.poll(int(DEADLINE_S * 1000)), "nothing came"
        taken += [len(one.frames) for one in listener.receive()]
    listener.close()
    context.destroy(linger=0)
    assert taken == [1 + MAX_CHUNK_PAGES] * 2


def test_many_honest_messages_are_not_taken_for_a_flood(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_sockets, "SLACK_BYTES", 1 << 20)
    for _ in range(200):
        port.socket.send(bytes(1 << 20))
    port.until_taken()
    assert not port.lost.poll(0)
    assert port.is_honest(number=2)


def test_what_waits_in_the_kernel_is_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it keeps up to 32 MiB of a connection, here while others have their turns."""
    monkeypatch.setattr(zmq_sockets, "SLACK_BYTES", 1 << 14)  # ZMQ reads 8 KiB ahead
    monkeypatch.setattr(zmq_sockets, "MESSAGES_A_TURN", 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.closing(
        ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2)
    ) as listener:
        peer = ZmqPeer(context, f"tcp://127.0.0.1:{listener.port}", time.monotonic())
        for _ in range(64):
            peer.socket.send(bytes(1 << 16))
        for _ in range(100):
            assert listener.receive() == [] and not peer.is_lost()
            time.sleep(0.01)
        monkeypatch.setattr(zmq_sockets, "MESSAGES_A_TURN", 32)
        taken, ends_at = 0, time.monotonic() + DEADLINE_S
        while taken < 64 and time.monotonic() < ends_at:
            taken += len(listener.receive())
        peer.close()
    context.term()
    assert taken == 64


@pytest.mark.parametrize("keys", [None, CurveKeys.of(bytes(32))], ids=["plain", "encrypted"])
def test_a_connection_is_not_cut_for_its_age(
    keys: CurveKeys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only heartbeats arrive, as many in a second as in minutes."""
    monkeypatch.setattr(zmq_sockets, "HEARTBEAT_MS", 2)
    monkeypatch.setattr(zmq_sockets, "SLACK_BYTES", 1 << 10)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bind = "tcp://127.0.0.1:*"
    listener = ZmqListener(context, bind, message_bytes=1 << 10, queued=2, keys=keys)
    endpoint = f"tcp://127.0.0.1:{listener.port}"
    peer = ZmqPeer(context, endpoint, time.monotonic(), keys)
    ends_at = time.monotonic() + 2.0
    while time.monotonic() < ends_at:
        assert listener.receive() == [] and not peer.is_lost()
        time.sleep(0.005)
    assert peer.is_connected
    peer.close()
    listener.close()
    context.term()


def test_a_transport_has_room_for_as_many_peers_as_a_fleet_has() -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    transport = ZmqTransport(PageMemory(SMALL, 1))
    transport.open()
    for number in range(MOST_LINKS):
        endpoint = f"tcp://127.1.{number // 250}.{number % 250 + 1}:9"
        address = ReceiverAddress(connector="zmq", endpoint=endpoint)
        reserved = reservation(PageMemory(SMALL, 2), address, [PageRef(1, 1)])
        transport.reach(reserved, reserved.shards[0])
    transport.close()


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_what_a_connection_says_as_it_is_accepted_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the listener takes messages it does not know the connection yet: bytes that came
    meanwhile would count against it as long as it lasts.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 20, queued=2)
    sender, watch, has_sent = context.socket(zmq.DEALER), listener._watch, False
    sender.setsockopt(zmq.LINGER, 0)

    def watch_too_early() -> None:
        nonlocal has_sent
        watch()
        if not has_sent:
            has_sent = True
            sender.connect(f"tcp://127.0.0.1:{listener.port}")
            sender.send(bytes(1 << 20))
            assert listener.socket.poll(int(DEADLINE_S * 1000)), "nothing came"

    monkeypatch.setattr(listener, "_watch", watch_too_early)
    assert len(listener.receive()) == 1
    listener.receive()
    (connection,) = listener._connections.values()
    waiting = connection.num_waiting(connection.since)
    sender.close()
    listener.close()
    context.term()
    assert 0 <= waiting < 1 << 10, "no more than the greeting"


def test_the_kernel_asks_after_a_sender_that_says_nothing() -> None:
    """A vanished host sends nothing, not even an end: its connection, its sent messages and two
    descriptors would stay for ever.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2)
    with socket.create_connection(("127.0.0.1", listener.port), DEADLINE_S):
        assert listener.monitor.poll(int(DEADLINE_S * 1000)), "nothing was accepted"
        listener.receive()
        (connection,) = listener._connections.values()
        asked = connection.twin.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, pause_s, tries = (
            connection.twin.getsockopt(socket.IPPROTO_TCP, name) for name in names
        )
    listener.close()
    context.term()
    assert asked and idle_s + pause_s * tries <= 60


def test_a_peer_of_an_old_protocol_ends_nothing() -> None:
    """ZMQ does not report the connection of a message of ZMTP 1."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2)
    identity, frame = b"\x01\x00", b"\x06\x00hello"
    with socket.create_connection(("127.0.0.1", listener.port), DEADLINE_S) as old:
        old.sendall(identity + frame)
        assert listener.socket.poll(int(DEADLINE_S * 1000)), "nothing came"
        (received,) = listener.receive()
    assert [one.bytes for one in received.frames] == [b"hello"]
    listener.close()
    context.term()


def test_a_connection_whose_descriptor_is_another_thing_by_now_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_none(fileno: int) -> socket.socket:
        raise OSError("not a socket")

    with zmq.Context() as context:
        listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2)
        with socket.create_connection(("127.0.0.1", listener.port)):
            assert listener.monitor.poll(int(1000 * DEADLINE_S))
            before = psutil.Process().num_fds()
            monkeypatch.setattr(socket, "socket", is_none)
            listener.receive()
            assert psutil.Process().num_fds() == before
            monkeypatch.undo()
        listener.close()
