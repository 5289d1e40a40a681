"""Connections of the HTTP API: inputs and silences of clients without cost to others."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from certificates import Authority
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from effuse.router import http_server
from effuse.router.http_server import IDLE_S, HttpServer

BODY = json.dumps({"prompt": "how many?", "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
Answered = tuple[bytes, bytes]


def head(version: str = "1.1", length: int | None = len(BODY), more: str = "") -> bytes:
    """A POST without its body."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    first = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Type: application/json"
    return f"{first}\r\n{size}{more}\r\n".encode()


async def connect(fleet: FakeFleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", fleet.router.ports.http)


async def answer_to(fleet: FakeFleet, *sent: bytes, closes: bool = True) -> Answered:
    """The head and the rest of the answer to bytes on a connection of its own."""
    reader, writer = await connect(fleet)
    for piece in sent:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        top = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read() if closes else b""
    writer.close()
    return top, rest


def serve(body: Callable[[FakeFleet], Awaitable[None]]) -> None:
    run(body, http_port=0, max_message_bytes=1024)


def test_a_client_of_http_1_0_reads_a_stream_without_chunks() -> None:
    async def body(fleet: FakeFleet) -> None:
        top, rest = await answer_to(fleet, head("1.0") + BODY)
        assert b"chunked" not in top
        assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")

    serve(body)


def test_a_client_that_offers_http_2_is_answered_over_http_1() -> None:
    """Java's client offers it beside its first request, and sends the body at once."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"

    async def body(fleet: FakeFleet) -> None:
        top, _ = await answer_to(fleet, head(more=offer) + BODY, closes=False)
        assert top.startswith(b"HTTP/1.1 200")

    serve(body)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\r\n\r\n", b"HELLO\r\n\r\n", b"X" * 100_000])
def test_what_is_no_http_is_refused_as_other_errors_are(sent: bytes) -> None:
    async def body(fleet: FakeFleet) -> None:
        top, rest = await answer_to(fleet, sent)
        assert top.startswith(b"HTTP/1.1 400 ")
        assert json.loads(rest)["error"]["type"] == "invalid_request_error"
        assert b"\r\nx-request-id: req-" in top

    serve(body)


def test_a_head_has_a_bound() -> None:
    async def body(fleet: FakeFleet) -> None:
        top, _ = await answer_to(fleet, HEALTH[:-2] + b"X: ", b"a" * 70_000)
        assert top.startswith(b"HTTP/1.1 400 ")

    serve(body)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async def body(fleet: FakeFleet) -> None:
        expects = head(length=1025, more="Expect: 100-continue\r\n")
        top, _ = await answer_to(fleet, expects, closes=False)
        assert top.startswith(b"HTTP/1.1 413 ")

    serve(body)


def written_whole(port: int, context: ssl.SSLContext | None, headers: dict[str, str]) -> int:
    """The status that a client reads that first writes a body of 5 MB."""
    connection = (
        http.client.HTTPConnection("localhost", port, timeout=20)
        if context is None
        else http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    )
    pieces = [b"x" * 50_000] * 100
    body = pieces if "Transfer-Encoding" in headers else b"".join(pieces)
    given = {"Content-Type": "application/json", "Connection": "close", **headers}
    try:
        connection.request("POST", "/v1/completions", body, given, encode_chunked=True)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 413),
        ({"Transfer-Encoding": "chunked"}, 413),
        ({"Connection": "keep-alive"}, 413),
        ({"Content-Type": "text/plain"}, 415),
        ({"Transfer-Encoding": "unknown"}, 400),
    ],
)
@pytest.mark.parametrize("has_tls", [False, True])
def test_a_client_that_writes_its_whole_body_first_reads_the_refusal(
    headers: dict[str, str], status: int, has_tls: bool, tmp_path: Path
) -> None:
    authority = Authority.make(tmp_path / "ca")
    files = authority.sign("router", "localhost")
    context = ssl.create_default_context(cafile=str(authority.cert)) if has_tls else None

    async def body(fleet: FakeFleet) -> None:
        port = fleet.router.ports.http
        assert await asyncio.to_thread(written_whole, port, context, headers) == status

    cert, key = (files.cert, files.key) if has_tls else (None, None)
    run(body, http_port=0, max_message_bytes=1024, tls_cert=cert, tls_key=key)


def test_a_client_that_writes_much_that_is_no_http_reads_the_refusal() -> None:
    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"X" * 5_000_000)
            return connection.recv(100)

    async def body(fleet: FakeFleet) -> None:
        assert (await asyncio.to_thread(ask, fleet.router.ports.http)).startswith(b"HTTP/1.1 400 ")

    serve(body)


@pytest.mark.parametrize(("limit", "value"), [("LINGER_S", 0.1), ("LINGER_BYTES", 1000)])
def test_what_a_refused_client_still_sends_has_bounds(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, limit, value)

    async def body(fleet: FakeFleet) -> None:
        _, writer = await connect(fleet)
        writer.write(head(length=1 << 30, more="Connection: close\r\n"))
        with pytest.raises(ConnectionError):
            while True:  # until the server has closed the connection
                writer.write(b"x" * 500)
                await writer.drain()
                await asyncio.sleep(0.01)

    serve(body)


def test_a_compressed_body_is_refused_as_such() -> None:
    async def body(fleet: FakeFleet) -> None:
        top, _ = await answer_to(
            fleet, head(more="Content-Encoding: gzip\r\n") + BODY, closes=False
        )
        assert top.startswith(b"HTTP/1.1 415 ")

    serve(body)


def test_a_client_that_leaves_within_its_body_is_no_failure() -> None:
    async def body(fleet: FakeFleet) -> None:
        _, writer = await connect(fleet)
        writer.write(head() + BODY[:-1])
        await writer.drain()
        writer.close()
        route = {"route": "/v1/completions", "status": "499"}
        await until(lambda: fleet.metric("effuse_http_responses_total", **route) == 1)

    serve(body)


def test_every_error_has_the_id_of_a_request() -> None:
    async def body(fleet: FakeFleet) -> None:
        for sent in (
            head(length=9) + b"{" * 9,
            head(length=9, more="Content-Encoding: br\r\n"),
            head(length=0).replace(b"completions", b"nothing"),
            head(length=0).replace(b"POST", b"PUT"),
        ):
            top, _ = await answer_to(fleet, sent, closes=False)
            assert top.count(b"x-request-id: req-") == 1

    serve(body)


def test_another_path_is_no_redirection_and_is_named() -> None:
    async def body(fleet: FakeFleet) -> None:
        for path in ("/v1/completions/", "/v2"):
            sent = head(more="Connection: close\r\n").replace(b"/v1/completions", path.encode())
            top, rest = await answer_to(fleet, sent + BODY)
            assert top.startswith(b"HTTP/1.1 404 ")
            assert f"POST {path}" in json.loads(rest)["error"]["message"]

    serve(body)


def test_bad_bytes_behind_a_request_do_not_spoil_its_answer() -> None:
    async def body(fleet: FakeFleet) -> None:
        top, rest = await answer_to(fleet, head() + BODY + b"\x00\x01\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in rest

    serve(body)


def test_a_chunk_of_no_size_is_refused() -> None:
    async def body(fleet: FakeFleet) -> None:
        sent = head(length=None, more="Transfer-Encoding: chunked\r\n")
        top, _ = await answer_to(fleet, sent, b"zz\r\n")
        assert top.startswith(b"HTTP/1.1 400 ")

    serve(body)


def alone(body: Callable[[HttpServer, asyncio.Event], Awaitable[None]]) -> None:
    """Runs `body` beside a server whose answers wait for the event."""
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await Response("done")(scope, receive, send)

    async def main() -> None:
        server, stop = HttpServer(app), asyncio.Event()
        server.listen("127.0.0.1", 0, shares_port=False)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run_until(stop, 1))
            await body(server, may_answer)
            stop.set()

    asyncio.run(main())


async def opened(
    server: HttpServer, sent: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that the server has taken, with bytes that it has read."""
    before = len(server.server_state.connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    await until(lambda: len(server.server_state.connections) > before)
    await asyncio.sleep(0.05)
    return reader, writer


async def is_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", HEALTH[:-2], HEALTH[:9]])
def test_a_connection_without_a_whole_head_ends(sent: bytes) -> None:
    async def body(server: HttpServer, _: asyncio.Event) -> None:
        reader, writer = await opened(server, sent)
        now = asyncio.get_running_loop().time()
        server.end_idle(now)
        server.end_idle(now + IDLE_S - 5)
        assert server.server_state.connections
        server.end_idle(now + IDLE_S + 5)
        assert await is_ended(reader)
        writer.close()

    alone(body)


def test_a_connection_whose_request_runs_stays() -> None:
    async def body(server: HttpServer, may_answer: asyncio.Event) -> None:
        reader, writer = await opened(server, HEALTH)
        now = asyncio.get_running_loop().time()
        server.end_idle(now)
        server.end_idle(now + IDLE_S + 5)
        may_answer.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        server.end_idle(now + IDLE_S + 5)  # the time of its own begins
        assert server.server_state.connections
        writer.close()

    alone(body)


def test_a_server_that_ends_answers_requests_on_their_way() -> None:
    async def body(server: HttpServer, may_answer: asyncio.Event) -> None:
        runs, fresh, silent = (
            await opened(server, HEALTH),
            await opened(server),
            await opened(server),
        )
        server.should_exit = True
        await until(lambda: not server.servers[0].is_serving())
        fresh[1].write(HEALTH)
        may_answer.set()
        for reader, _ in (runs, fresh):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        assert await is_ended(silent[0])
        for _, writer in (runs, fresh, silent):
            writer.close()

    alone(body)


def test_a_request_on_its_way_has_no_more_time_than_the_drain() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 0"] = holds(asyncio.Event())
        reader, writer = await connect(fleet)
        fleet.stop.set()
        await until(fleet.router.monitor.is_over.is_set)
        writer.write(head() + BODY)
        top = await reader.readuntil(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 503") and b"connection: close" in top
        writer.close()

    run(body, http_port=0, drain_s=0.4)


def test_connections_leave_descriptors_to_the_rest_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))

    async def body(server: HttpServer, may_answer: asyncio.Event) -> None:
        may_answer.set()
        kept = [await opened(server) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await is_ended(reader)
        writer.close()
        kept[0][1].write(HEALTH)
        assert (await kept[0][0].readline()).startswith(b"HTTP/1.1 200")
        for _, one in kept:
            one.close()

    alone(body)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("0.0.0.0", ["127.0.0.1", "::1"]),
        ("::", ["127.0.0.1", "::1"]),
    ],
)
def test_hosts_are_read_as_by_grpc(host: str, own: list[str]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("no request was sent")

    server = HttpServer(app)
    port = server.listen(host, 0, shares_port=False)
    assert server.taken is not None
    with server.taken:
        for address in own:
            socket.create_connection((address, port), timeout=20).close()
        taken, _ = server.taken.accept()
        with taken:  # a client whose host vanishes is noticed
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
