"""The proxy applies its faults only to their targets, and passes bytes on unchanged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from fault_proxy import FaultProxy, Harm

SENT = bytes(range(256)) * 16


@contextmanager
def echo() -> Iterator[str]:
    """A server that echoes everything; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def serve() -> None:
            # The proxy may end the connection in any case, which is its purpose.
            with server.accept()[0] as peer, suppress(ConnectionError):
                while data := peer.recv(1 << 16):
                    peer.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = server.getsockname()
        yield f"{host}:{port}"
        thread.join(30)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def heard(client: socket.socket) -> bytes:
    """The echo of SENT, until all of it has arrived or the connection ends."""
    said = b""
    while len(said) < len(SENT):
        try:
            data = client.recv(1 << 16)
        except ConnectionResetError:
            break
        if not data:
            break
        said += data
    return said


def test_without_harm_bytes_pass() -> None:
    with echo() as target, FaultProxy(target) as proxy, connect(proxy.address) as client:
        client.sendall(SENT)
        assert heard(client) == SENT
        assert proxy.harmed(target) == 0


def test_a_client_may_name_the_target_itself() -> None:
    with echo() as target, FaultProxy() as proxy, connect(proxy.address) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(SENT)
        assert heard(client) == SENT


@pytest.mark.parametrize("harm", [Harm.SLOWED, Harm.DELAYED])
def test_what_is_late_comes_whole(harm: Harm) -> None:
    with echo() as target, FaultProxy(target) as proxy, connect(proxy.address) as client:
        proxy.harm(target, harm)
        client.sendall(SENT)
        assert heard(client) == SENT
        assert proxy.heal(target) > 0


def test_what_is_truncated_ends_too_early() -> None:
    with echo() as target, FaultProxy(target) as proxy, connect(proxy.address) as client:
        proxy.harm(target, Harm.TRUNCATED)
        client.sendall(SENT)
        said = heard(client)
        assert len(said) < len(SENT) and SENT.startswith(said)
        assert proxy.heal(target) > 0


def test_what_is_cut_ends_and_cannot_begin_again_until_it_is_healed() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.harm("127.0.0.1:1", Harm.CUT)  # another one
        with connect(proxy.address) as client:
            client.sendall(SENT)
            assert heard(client) == SENT
            proxy.harm(target, Harm.CUT)
            assert heard(client) == b""
        with connect(proxy.address) as client:
            assert heard(client) == b""
        assert proxy.heal(target) == 2
        assert proxy.heal("127.0.0.1:1") == 0
