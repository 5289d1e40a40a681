"""Pages over encrypted ZMQ: they pass between owners of the fleet's keys, and no others get in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import zmq
from kvtransfer.fixtures import (
    SMALL,
    WHOLE,
    boundary,
    filled,
    next_event,
    print_of,
    reservation,
)
from loopbacks import LOOPBACKS
from slowness import patient
from zmq.utils.monitor import recv_monitor_message

from effuse.kvtransfer.connector import (
    Arrived,
    Connector,
    ConnectorEvent,
    Expect,
    FinishPush,
    HandoffRefused,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import Begin, PageRef, Pages
from effuse.kvtransfer.staging import Fetched, Staging
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Chunk, Lost
from effuse.kvtransfer.zmq_sockets import CurveKeys, ZmqListener, ZmqPeer
from effuse.kvtransfer.zmq_transport import ZmqDelivery, ZmqTransport

LARGEST = 1 << 16
OURS, THEIRS = CurveKeys.of(b"o" * 32), CurveKeys.of(b"t" * 32)


@contextmanager
def connector(
    memory: PageMemory, name: str, keys: CurveKeys | None, host: str = "127.0.0.1"
) -> Iterator[Connector]:
    transport = ZmqTransport(memory, host=host, keys=keys)
    made = ThreadConnector(transport, memory, name, print_of(memory.layout))
    made.start()
    try:
        yield made
    finally:
        made.close()


def push(
    sender_keys: CurveKeys | None, receiver_keys: CurveKeys | None, host: str = "127.0.0.1"
) -> list[ConnectorEvent]:
    """The outcome of a push at its sender and, if it arrives, at its receiver."""
    source, target = filled(SMALL, 2), PageMemory(SMALL, 4)
    with (
        connector(target, "decode-1", receiver_keys, host) as receiver,
        connector(source, "prefill-1", sender_keys, host) as sender,
    ):
        reserved = reservation(target, receiver.describe(), (PageRef(1, 1),), number=1)
        receiver.send(Expect(reserved, "prefill-1"))
        sender.send(PushPages(reserved, (0,), 0))
        sender.send(FinishPush(reserved, lambda: boundary(9)))
        events = [next_event(sender, reserved.transfer_id)]
        if not isinstance(events[0], PushFailed):
            events.append(next_event(receiver, reserved.transfer_id))
            assert target.bytes_at(1) == source.bytes_at(0)
        else:
            assert target.bytes_at(1) != source.bytes_at(0)
        return events


def test_pages_pass_between_who_has_the_keys() -> None:
    assert isinstance(push(OURS, OURS)[-1], Arrived)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_pages_pass_over_either_protocol_of_the_internet(host: str) -> None:
    assert isinstance(push(None, None, host)[-1], Arrived)


@pytest.mark.parametrize("keys", [None, OURS], ids=["plain", "encrypted"])
def test_the_largest_frames_pass_and_are_counted_to_the_byte(keys: CurveKeys | None) -> None:
    """A sender of many messages is distinguished from one of an endless message, however long a
    connection lasts.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=LARGEST, queued=2, keys=keys)
    sender = context.socket(zmq.DEALER)
    if keys is not None:
        keys.ask(sender)
    sender.connect(f"tcp://127.0.0.1:{listener.port}")
    ahead = []
    for size in (LARGEST, 1, 255, 256):
        for _ in range(20):
            sender.send(bytes(size))
            until_received(listener)
        (connection,) = listener._connections.values()
        ahead.append(connection.num_read() - connection.num_taken)
    listener.close()
    context.destroy(linger=0)
    assert ahead == [ahead[0]] * 4, "it grows with what is sent"


def until_received(listener: ZmqListener) -> None:
    poller = zmq.Poller()
    poller.register(listener.socket, zmq.POLLIN)
    while not listener.receive():
        assert poller.poll(20_000), "nothing came"


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(None, OURS), (THEIRS, OURS), (OURS, THEIRS), (OURS, None)],
    ids=["plain", "other-keys", "stranger-receives", "plain-receives"],
)
def test_strangers_neither_push_nor_are_pushed_to(
    sender: CurveKeys | None, receiver: CurveKeys | None
) -> None:
    assert isinstance(push(sender, receiver)[0], PushFailed)


def test_what_is_said_after_a_refused_handshake_fails_its_push_alone() -> None:
    """ZMQ drops such a connection, and the thread notices it only at its next poll."""
    memory = filled(SMALL, 2)
    with connector(PageMemory(SMALL, 4), "decode-1", OURS) as receiver:
        reserved = reservation(memory, receiver.describe(), (PageRef(1, 1),), number=1)
        transport = ZmqTransport(memory, keys=None)
        transport.open()
        peer = transport.reach(reserved, reserved.shards[0])
        assert isinstance(peer, ZmqPeer)
        while recv_monitor_message(peer.monitor)["event"] == zmq.EVENT_CONNECTED:
            pass
        names = reserved.attempt, "1", reserved.incarnation
        begin = Begin(*names, WHOLE, reserved.fingerprint)
        with pytest.raises(HandoffRefused, match="was closed"):
            until = time.monotonic() + patient(20)
            while time.monotonic() < until:  # the handshake is reported before the end
                transport.send(peer, begin)
                time.sleep(0.05)
        assert peer.is_open, "nobody had looked at it"
        header = Pages(*names, WHOLE, 0, reserved.pages, 0, 1)
        copied = cast("Fetched", SimpleNamespace(is_over=lambda: True, view=memoryview(b"x")))
        transport._staging = cast(Staging, SimpleNamespace(num_free=1))
        transport._fetching = [ZmqDelivery(peer, header, copied) for _ in range(2)]
        assert [type(one) for one in transport.receive()] == [Lost]
        with pytest.raises(HandoffRefused, match="was closed"):
            transport.deliver(peer, header, Chunk(0, (0,), reserved.pages, range(1), WHOLE.heads))
        transport.close()


def test_to_know_the_public_key_is_not_enough() -> None:
    """ZMQ itself would take any key of a client."""
    with connector(PageMemory(SMALL, 4), "decode-1", OURS) as receiver:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.CURVE_SERVERKEY, OURS.public)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, THEIRS.public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, THEIRS.secret)
        told = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        stranger.connect(receiver.describe()[0].address.endpoint)
        assert told.poll(20_000)
        assert recv_monitor_message(told)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        stranger.disable_monitor()
        context.destroy(linger=0)


def test_no_key_is_shown() -> None:
    assert OURS.secret.decode() not in repr(OURS)
    with pytest.raises(ValueError, match="expected 32 bytes, got 3"):
        CurveKeys.of(b"abc")


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    with connector(PageMemory(SMALL, 4), "decode-1", OURS):
        pass
    assert set(threading.enumerate()) <= before  # leftovers of others may end meanwhile
