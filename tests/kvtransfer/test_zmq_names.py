"""Senders reach receivers by a name, whichever addresses the name has."""

from __future__ import annotations

import socket
import time

import pytest
import zmq
from kvtransfer.fixtures import SMALL, filled
from loopbacks import LOOPBACKS, give_name
from slowness import patient

from effuse.kvtransfer.resolving import numeric_endpoint, resolve
from effuse.kvtransfer.zmq_sockets import ZmqListener, ZmqPeer
from effuse.kvtransfer.zmq_transport import ZmqTransport
from effuse.worker.engine_process import listen_while_alive

NAME = "localhost"  # for ZMQ itself one of IPv4
needs_ipv6 = pytest.mark.skipif(len(LOOPBACKS) == 1, reason="no address of IPv6")
pytestmark = needs_ipv6
BOTH, REVERSED = ("::1", "127.0.0.1"), ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("host", "advertised", "addresses"),
    [
        (NAME, NAME, ("127.0.0.1",)),
        (NAME, NAME, BOTH),
        (NAME, NAME, REVERSED),
        (NAME, NAME, ("::1",)),
        ("0.0.0.0", NAME, BOTH),
        ("127.0.0.1", NAME, BOTH),
        ("::", NAME, BOTH),
        ("::", NAME, ("::1",)),
        ("::1", NAME, ("::1",)),
    ],
)
def test_a_sender_reaches_a_receiver(
    host: str, advertised: str, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name(monkeypatch, NAME, *addresses)
    receiver = ZmqTransport(filled(SMALL, 1), host=host, advertised_host=advertised)
    receiver.open()
    endpoint = receiver.address().endpoint
    assert endpoint.startswith(f"tcp://{advertised}:")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = ZmqPeer(context, endpoint, time.monotonic())
    try:
        until = time.monotonic() + patient(3.0)
        while not peer.is_connected and time.monotonic() < until:
            assert not peer.is_lost()
            receiver.receive()
            time.sleep(0.01)
        assert peer.is_connected and peer.endpoint == endpoint
    finally:
        peer.close()
        context.term()
        receiver.close()


@pytest.mark.parametrize(
    ("host", "addresses", "bound"),
    [
        (NAME, ("::1",), "::1"),
        (NAME, BOTH, "127.0.0.1"),
        (NAME, REVERSED, "127.0.0.1"),
        ("[::1]", (), "::1"),
        ("::", (), "::"),
        ("0.0.0.0", (), "0.0.0.0"),
    ],
)
def test_the_sign_of_life_of_an_engine(
    host: str, addresses: tuple[str, ...], bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name(monkeypatch, NAME, *addresses)
    with listen_while_alive(host) as sign:
        assert sign.getsockname()[0] == bound
        listen_while_alive(host, sign.getsockname()[1]).close()


def test_endpoints_that_have_no_address_stay_for_zmq_to_judge() -> None:
    for endpoint in (
        *("tcp://*:1", "tcp://a..b:1", "tcp://:1", "tcp://a\0b:1", "ipc:///a", ""),
        *("tcp://", "tcp://[::1", "tcp://" + "x" * 70 + ".y:1", "tcp://127.0.0.1;127.0.0.1:1"),
    ):
        assert numeric_endpoint(endpoint) == endpoint
    assert numeric_endpoint("tcp://[::1]:5") == "tcp://[::1]:5"
    assert numeric_endpoint("tcp://127.0.0.1:*") == "tcp://127.0.0.1:*"
    assert resolve("fe80::1%lo")[0] == f"fe80::1%{socket.if_nametoindex('lo')}"


def test_a_listener_at_an_unknown_name_fails_as_zmq_does() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        ZmqListener(context, "tcp://a..b:0", message_bytes=1 << 20, queued=2)
    context.term()
