"""Handoffs over ZMQ through a link that is cut, truncated, slow or late arrive whole or not at all,
and the next one arrives."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import zmq
from fault_proxy import FaultProxy, Harm
from kvtransfer.fixtures import (
    DEADLINE_S,
    LARGE,
    SMALL,
    WHOLE,
    address_of,
    boundary,
    digests_of,
    filled,
    next_event,
    print_of,
    reservation,
    with_shard,
)
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer import staging, zmq_sockets
from effuse.kvtransfer.connector import (
    Cancel,
    Cause,
    Expect,
    FinishPush,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    Accepted,
    AttemptId,
    Begin,
    PageRef,
    Pages,
    Placed,
    ReceiverAddress,
    decode_to_receiver,
    encode,
)
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Lost, Received
from effuse.kvtransfer.zmq_sockets import ZmqPeer
from effuse.kvtransfer.zmq_transport import CHUNK_BYTES, ZmqDelivery, ZmqTransport

PAGES = range(2)  # 128 KiB: less than three seconds of a slow link
SOURCE = filled(LARGE, len(PAGES))
DIGESTS = [digest.hex() for digest in digests_of(SOURCE, PAGES)]


@dataclass(frozen=True)
class Link:
    """A sender, a receiver in another process, and the proxy between them."""

    sender: ThreadConnector
    receiver: RemoteReceiver
    proxy: FaultProxy
    target: str

    def push(self, lease_s: float = 60.0) -> str:
        """Pushes everything through the proxy; the transfer's name."""
        reserved = self.receiver.reserve(PAGES, lease_s=lease_s)
        endpoint = f"tcp://{self.proxy.address}"
        address = msgspec.structs.replace(address_of(reserved), endpoint=endpoint)
        reserved = with_shard(reserved, address=address)
        self.sender.send(PushPages(reserved, tuple(PAGES), 0))
        self.sender.send(FinishPush(reserved, boundary))
        return reserved.transfer_id

    def check_arrives(self) -> None:
        """A push arrives whole."""
        transfer_id = self.push()
        assert self.receiver.hear(transfer_id)["digests"] == DIGESTS
        assert isinstance(next_event(self.sender, transfer_id), Pushed)

    def check_fails(self, transfer_id: str, cause: Cause) -> None:
        """A push fails, and lets its pages go."""
        failed = next_event(self.sender, transfer_id)
        assert isinstance(failed, PushFailed) and failed.cause is cause
        self.sender.send(Cancel(transfer_id))
        next_event(self.sender, transfer_id, PushCancelled)
        self.receiver.forget(transfer_id)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    sender = make("zmq", SOURCE, "prefill-1")
    sender.start()
    with contextlib.closing(sender), RemoteReceiver("zmq", "large", len(PAGES)) as receiver:
        target = address_of(receiver.reserve([])).endpoint.removeprefix("tcp://")
        with FaultProxy(target) as proxy:
            yield Link(sender, receiver, proxy, target)


@pytest.mark.parametrize("harm", [Harm.CUT, Harm.TRUNCATED])
def test_what_is_cut_off_fails_and_the_next_one_arrives(link: Link, harm: Harm) -> None:
    link.check_arrives()
    link.proxy.harm(link.target, harm)
    link.check_fails(link.push(), Cause.PEER)
    assert link.proxy.heal(link.target) > 0
    link.check_arrives()


@pytest.mark.parametrize("harm", [Harm.SLOWED, Harm.DELAYED])
def test_what_is_late_arrives_whole_or_fails_with_its_lease(link: Link, harm: Harm) -> None:
    link.check_arrives()
    link.proxy.harm(link.target, harm)
    link.check_arrives()
    link.check_fails(link.push(lease_s=0.1), Cause.LEASE)
    assert link.proxy.heal(link.target) > 0
    link.check_arrives()


@pytest.fixture
def receiver() -> Iterator[zmq.Socket[bytes]]:
    """A bare socket that sends a test's answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        yield socket


def test_what_was_not_claimed_yet_is_not_accepted(
    receiver: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with that event would not know which transfer ended, and end itself."""
    monkeypatch.setattr(ZmqTransport, "window_bytes", 1)  # one page at a time
    memory = filled(SMALL, 4)
    sender = make("zmq", memory, "prefill-1")
    sender.start()
    try:
        endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        address = ReceiverAddress(connector="zmq", endpoint=endpoint)
        held = reservation(memory, address, [PageRef(0, 1), PageRef(1, 1)])
        sender.send(PushPages(held, (2,), 0))
        sender.send(PushPages(held, (3,), 1))
        peer = receiver.recv_multipart()[0]  # its Begin
        receiver.recv_multipart()  # the first page
        receiver.send_multipart([peer, encode(Accepted(held.transfer_id))])
        receiver.send_multipart([peer, encode(Placed(held.transfer_id, 0, 0))])
        receiver.recv_multipart()  # the second page: messages before Placed have been received
        sender.send(FinishPush(held, lambda: boundary(16, tail_token_ids=())))
        receiver.send_multipart([peer, encode(Placed(held.transfer_id, 1, 0))])
        receiver.recv_multipart()  # the manifest: the push went on
        assert not sender.poll()
        receiver.send_multipart([peer, encode(Accepted(held.transfer_id))])
        assert isinstance(next_event(sender, held.transfer_id), Pushed)
    finally:
        sender.close()


@pytest.mark.parametrize(
    "answer",
    [[b"what?"], [b""] * 100_000 + [encode(Placed("transfer-1", 0, 0))]],
    ids=["unknown", "of many frames"],
)
def test_an_answer_that_is_no_message_ends_the_push_and_not_the_connector(
    receiver: zmq.Socket[bytes], answer: list[bytes]
) -> None:
    """A newer receiver may send messages that an older sender does not know. No answer has a second
    frame, and ZMQ does not bound the frames of a message.
    """
    memory = filled(SMALL, 4)
    sender = make("zmq", memory, "prefill-1")
    sender.start()
    try:
        endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        address = ReceiverAddress(connector="zmq", endpoint=endpoint)
        held = reservation(memory, address, [PageRef(0, 1)])
        sender.send(PushPages(held, (2,), 0))
        peer = receiver.recv_multipart()[0]
        receiver.send_multipart([peer, *answer])
        failed = next_event(sender, held.transfer_id)
        assert isinstance(failed, PushFailed)
        assert failed.cause is Cause.PEER
        sender.send(Cancel(held.transfer_id))
        assert isinstance(next_event(sender, held.transfer_id), PushCancelled)
    finally:
        sender.close()


@dataclass
class Buffers:
    """Stands in for the pinned buffers of a GPU: each holds a chunk until that was answered."""

    memory: PageMemory
    num_free: int = staging.NUM_BUFFERS

    def fetch(self, page_ids: Sequence[int], groups: range, heads: range) -> Copied | None:
        if not self.num_free:
            return None
        self.num_free -= 1
        return Copied(
            self, memoryview(bytearray().join(self.memory.views(page_ids, groups, heads)))
        )


@dataclass
class Copied:
    """A chunk in one of them."""

    home: Buffers
    view: memoryview

    def is_over(self) -> bool:
        return True

    def release(self) -> None:
        self.home.num_free += 1
        self.view[:] = bytes(len(self.view))  # like the next chunk may, whatever still reads it


def hear_pages_of(receiver: zmq.Socket[bytes], transfer_id: str) -> None:
    """Returns once some of this transfer have come."""
    while True:
        message = decode_to_receiver(receiver.recv_multipart()[1])
        if isinstance(message, Pages) and message.attempt.transfer_id == transfer_id:
            return


@pytest.mark.parametrize("num_silent", [1, 4, staging.NUM_BUFFERS + 1])
def test_receivers_that_do_not_answer_leave_buffers_to_the_others(
    receiver: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, num_silent: int
) -> None:
    """They have as long as their leases; until then no push left a GPU."""
    memory, target = filled(SMALL, 20), PageMemory(SMALL, 4)
    transport = ZmqTransport(memory)
    transport.chunk_bytes = SMALL.page_bytes
    sender = ThreadConnector(transport, memory, "prefill-1", print_of(SMALL))
    sender.start()
    monkeypatch.setattr(transport, "_staging", Buffers(memory))
    honest = make("zmq", target, "decode-1")
    honest.start()
    with contextlib.closing(sender), contextlib.closing(honest):
        pages = [PageRef(page, 1) for page in range(16)]
        for number in range(2, 2 + num_silent):
            receiver.bind("tcp://127.0.0.1:*")  # another one, as far as the sender knows
            endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
            silent = ReceiverAddress(connector="zmq", endpoint=endpoint)
            held = reservation(memory, silent, pages, number=number)
            sender.send(PushPages(held, tuple(range(16)), 0))
            hear_pages_of(receiver, held.transfer_id)
        held = reservation(target, honest.describe(), pages[:4], number=99)
        honest.send(Expect(held, "prefill-1"))
        sender.send(PushPages(held, tuple(range(16, 20)), 0))
        sender.send(FinishPush(held, boundary))
        assert isinstance(next_event(sender, held.transfer_id), Pushed)


def test_a_receiver_that_never_stops_answering_does_not_hold_up_the_others(
    receiver: zmq.Socket[bytes],
) -> None:
    """Its messages are taken in turns, and all of them before the end of its connection."""
    transport = ZmqTransport(filled(SMALL, 1))
    transport.open()
    endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
    address = ReceiverAddress(connector="zmq", endpoint=endpoint)
    held = reservation(filled(SMALL, 1), address, [PageRef(0, 1)])
    peer = transport.reach(held, held.shards[0])
    transport.send(peer, Begin(held.attempt, "prefill-1", "decode-1", WHOLE, held.fingerprint))
    name, count = receiver.recv_multipart()[0], 20 * zmq_sockets.MESSAGES_A_TURN
    for _ in range(count):
        receiver.send_multipart([name, encode(Placed(held.transfer_id, 0, 0))])
    receiver.setsockopt(zmq.LINGER, -1)
    receiver.close()
    heard: list[Received] = []
    ends_at = time.monotonic() + DEADLINE_S
    while not any(isinstance(one, Lost) for one in heard):
        assert time.monotonic() < ends_at, "the end was never heard"
        one_look = transport.receive()
        assert len(one_look) <= zmq_sockets.MESSAGES_A_TURN + 1
        heard += one_look
    transport.close()
    assert len(heard) == count + 1


def test_a_receiver_on_the_host_takes_the_chunks_of_a_gpu() -> None:
    """They are larger than those from a host's memory."""
    memory = filled(LARGE, CHUNK_BYTES // LARGE.page_bytes)
    target = PageMemory(LARGE, memory.num_pages)
    transport = ZmqTransport(memory)
    assert transport.chunk_bytes < CHUNK_BYTES
    transport.chunk_bytes = CHUNK_BYTES
    sender = ThreadConnector(transport, memory, "prefill-1", print_of(LARGE))
    receiver = make("zmq", target, "decode-1")
    sender.start()
    receiver.start()
    with contextlib.closing(sender), contextlib.closing(receiver):
        pages = [PageRef(page, 1) for page in range(memory.num_pages)]
        held = reservation(target, receiver.describe(), pages)
        receiver.send(Expect(held, "prefill-1"))
        sender.send(PushPages(held, tuple(range(memory.num_pages)), 0))
        sender.send(FinishPush(held, boundary))
        assert isinstance(next_event(sender, held.transfer_id), Pushed)
    assert target.tensor.equal(memory.tensor)


def test_a_chunk_on_a_closed_connection_is_over_once_zmq_has_let_its_memory_go() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # no handshake: ZMQ holds all messages
        peer = ZmqPeer(context, f"tcp://127.0.0.1:{silent.getsockname()[1]}", time.monotonic())
        pages = Pages(AttemptId("r", 1, "t"), "a", "b", WHOLE, 0, (PageRef(0, 1),), 0, 1)
        sent = peer.send(pages, [memoryview(bytearray(1 << 20)) for _ in range(8)])
        delivery = ZmqDelivery(peer, pages, None, sent)
        time.sleep(0.05)
        assert not delivery.is_over() and all(view() is not None for view in sent)
        peer.close()
        deadline = time.monotonic() + DEADLINE_S
        while not delivery.is_over():
            assert time.monotonic() < deadline
        assert all(view() is None for view in sent)
    context.term()


def test_peers_that_say_nothing_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker is connected to every decode worker of its fleet: to ask each of hundreds
    takes milliseconds, in every turn of a handoff."""
    transport = ZmqTransport(PageMemory(SMALL, 1))
    transport.open()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as receiver:
        receiver.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        port = receiver.bind_to_random_port("tcp://*")
        for number in range(1, 51):
            endpoint = f"tcp://127.0.0.{number}:{port}"
            address = ReceiverAddress(connector="zmq", endpoint=endpoint)
            reserved = reservation(PageMemory(SMALL, 2), address, [PageRef(1, 1)])
            peer = transport.reach(reserved, reserved.shards[0])
            attempt = AttemptId("request-7", 1, "transfer-7")
            begin = Begin(attempt, "prefill-1", "decode-1", WHOLE, print_of(SMALL))
            transport.send(peer, begin)
        names = [receiver.recv_multipart()[0] for _ in range(50)]
        ends_at = time.monotonic() + DEADLINE_S
        while not all(one.is_connected for one in transport._peers.values()):
            assert transport.receive() == [] and time.monotonic() < ends_at
        asked, answers = [], ZmqPeer.answers

        def note(one: ZmqPeer) -> list[bytes]:
            asked.append(one.endpoint)
            return answers(one)

        monkeypatch.setattr(ZmqPeer, "answers", note)
        assert transport.receive() == [] and asked == []
        receiver.send_multipart([names[7], encode(Accepted("transfer-7"))])
        while not (heard := transport.receive()):
            assert time.monotonic() < ends_at, "nothing was heard"
        assert len(heard) == 1 and len(asked) == 1
    transport.close()
