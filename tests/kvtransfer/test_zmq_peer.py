"""What a ZMQ sender believes of its receiver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from kvtransfer.fixtures import SMALL, boundary, filled, next_event, reservation
from kvtransfer.receiver_process import make

from effuse.kvtransfer.connector import Cause, PushCancelled, Pushed, PushFailed
from effuse.kvtransfer.messages import PageRef, ReceiverAddress, encode
from effuse.kvtransfer.wire import Accepted, Placed
from effuse.kvtransfer.zmq_transport import ZmqTransport


@pytest.fixture
def receiver() -> Iterator[zmq.Socket[bytes]]:
    """A bare socket that answers what a test says."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        yield socket


def test_what_was_not_claimed_yet_is_not_accepted(
    receiver: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that heard of it would not know what ended, and end itself."""
    monkeypatch.setattr(ZmqTransport, "window_bytes", 1)  # one page at a time
    memory = filled(SMALL, 4)
    sender = make("zmq", memory, "prefill-1")
    sender.start()
    try:
        endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        address = ReceiverAddress(connector="zmq", endpoint=endpoint)
        held = reservation(memory, address, [PageRef(0, 1), PageRef(1, 1)])
        sender.push_pages(held, [2], 0)
        sender.push_pages(held, [3], 1)
        peer = receiver.recv_multipart()[0]  # its Begin
        receiver.recv_multipart()  # the first page
        receiver.send_multipart([peer, encode(Accepted(held.transfer_id))])
        receiver.send_multipart([peer, encode(Placed(held.transfer_id, 0, 0))])
        receiver.recv_multipart()  # the second page: what was said before Placed has been heard
        sender.finish(held, lambda: boundary(16, tail_token_ids=()))
        receiver.send_multipart([peer, encode(Placed(held.transfer_id, 1, 0))])
        receiver.recv_multipart()  # the manifest: the push went on
        assert not sender.poll()
        receiver.send_multipart([peer, encode(Accepted(held.transfer_id))])
        assert isinstance(next_event(sender, held.transfer_id), Pushed)
    finally:
        sender.close()


def test_an_answer_that_is_no_message_ends_the_push_and_not_the_connector(
    receiver: zmq.Socket[bytes],
) -> None:
    """A newer receiver may say what an older sender does not know."""
    memory = filled(SMALL, 4)
    sender = make("zmq", memory, "prefill-1")
    sender.start()
    try:
        endpoint = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        address = ReceiverAddress(connector="zmq", endpoint=endpoint)
        held = reservation(memory, address, [PageRef(0, 1)])
        sender.push_pages(held, [2], 0)
        peer = receiver.recv_multipart()[0]
        receiver.send_multipart([peer, b"what?"])
        failed = next_event(sender, held.transfer_id)
        assert isinstance(failed, PushFailed)
        assert failed.cause is Cause.PEER
        sender.cancel(held.transfer_id)
        assert isinstance(next_event(sender, held.transfer_id), PushCancelled)
    finally:
        sender.close()
