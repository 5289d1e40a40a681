"""Certificates of the HTTP port: asked for, renewed, and handshakes that end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
from pathlib import Path

import pytest
from certificates import Authority
from router.fakes import FakeFleet, run
from router.test_http_server import HEALTH

from effuse.router import http_server


def test_a_client_without_a_certificate_gets_no_answer(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "ca")
    files, mine = authority.sign("router", "localhost"), authority.sign("client", "localhost")
    context = ssl.create_default_context(cafile=str(authority.cert))

    async def answer(fleet: FakeFleet) -> bytes:
        port = fleet.router.ports.http
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        try:
            writer.write(HEALTH)
            return await reader.readline()
        except (ssl.SSLError, ConnectionError):
            return b""
        finally:
            writer.close()

    async def body(fleet: FakeFleet) -> None:
        assert await answer(fleet) == b""
        assert mine.cert is not None
        context.load_cert_chain(mine.cert, mine.key)
        assert (await answer(fleet)).startswith(b"HTTP/1.1 200")

    run(
        body, http_port=0,
        tls_cert=files.cert, tls_key=files.key, tls_client_ca=authority.cert,
    )  # fmt: skip


def test_a_handshake_that_does_not_end_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_S", 0.3)
    files = Authority.make(tmp_path / "ca").sign("router", "localhost")

    async def body(fleet: FakeFleet) -> None:
        port = fleet.router.ports.http
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()

    run(body, http_port=0, tls_cert=files.cert, tls_key=files.key)


def test_an_authority_that_was_replaced_is_trusted_no_longer(tmp_path: Path) -> None:
    """By a client without a server's name, too."""
    old = Authority.make(tmp_path / "old")
    new = Authority.make(tmp_path / "root").below(tmp_path / "new")  # whose root is not named
    files, trusted = old.sign("router", "localhost"), tmp_path / "trusted.pem"
    trusted.write_bytes(old.cert.read_bytes())
    contexts = []
    for authority in (old, new):
        mine = authority.sign("client", "localhost")
        assert mine.cert is not None
        contexts.append(ssl.create_default_context(cafile=str(old.cert)))
        contexts[-1].load_cert_chain(mine.cert, mine.key)

    async def answers(fleet: FakeFleet) -> list[bool]:
        def one(context: ssl.SSLContext) -> bool:
            link = http.client.HTTPSConnection(
                "127.0.0.1", fleet.router.ports.http, timeout=20, context=context
            )
            with contextlib.closing(link):
                try:
                    link.request("GET", "/health")
                    return link.getresponse().status == 200
                except (ssl.SSLError, ConnectionError):
                    return False

        return [await asyncio.to_thread(one, context) for context in contexts]

    async def body(fleet: FakeFleet) -> None:
        assert await answers(fleet) == [True, False]
        trusted.write_bytes(new.cert.read_bytes())
        async with asyncio.timeout(30):
            while await answers(fleet) != [False, True]:
                pass

    run(body, http_port=0, tls_cert=files.cert, tls_key=files.key, tls_client_ca=trusted)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_s_certificate_is_asked_for_in_every_handshake(
    version: ssl.TLSVersion, tmp_path: Path
) -> None:
    """A session that goes on would be that of an authority which may have been removed."""
    authority = Authority.make(tmp_path / "ca")
    files, mine = authority.sign("router", "localhost"), authority.sign("client", "localhost")
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.maximum_version = version
    assert mine.cert is not None
    context.load_cert_chain(mine.cert, mine.key)

    def met(port: int, session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        with context.wrap_socket(plain, server_hostname="localhost", session=session) as link:
            link.sendall(HEALTH)
            assert link.recv(1 << 10).startswith(b"HTTP/1.1 200")
            return link.session_reused, link.session

    async def body(fleet: FakeFleet) -> None:
        port = fleet.router.ports.http
        _, session = await asyncio.to_thread(met, port, None)
        assert (await asyncio.to_thread(met, port, session))[0] is False

    run(
        body, http_port=0,
        tls_cert=files.cert, tls_key=files.key, tls_client_ca=authority.cert,
    )  # fmt: skip
