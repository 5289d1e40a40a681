"""The ports that only answer GET: metrics of a router, and the page of `effuse up`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socketserver
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

from fuzz.drawing import Draw, garbage, mutated
from fuzz.services import Misbehaved
from fuzz.surface import Face, RanLate
from router.fakes import fake_fleet

from effuse.cli import page

DEADLINE_S: Final = 60.0
PIECE_S: Final = 0.02
"""How long a response to a part of a request is awaited: it need not come."""

REFUSALS: Final = frozenset({b"501", b"503", b"505"})
"""Statuses of servers that bad input may have: an unknown method, viewers, a version of HTTP."""

_PATHS: Final = (
    *("/", "/", "/events", "/fleet.json", "/targets.json", "/metrics", "/metrics?name[]=a"),
    *("/metrics?name[]=%ff", "//", "*", "/" + "a" * 3000, "/%00", "http://a/", "/events?a", "/a b"),
)
_HEADERS: Final = (
    *(b"Accept: application/openmetrics-text", b"Accept: \xff", b"Accept-Encoding: gzip"),
    *(b"Content-Length: -1", b"Content-Length: a", b"Host: b", b"Host: \xff", b"A", b": b", b" a"),
    *(b"Connection: keep-alive", b"Expect: 100-continue", b"X: " + b"a" * 70_000, b"A: b\r\n c"),
    *(b"Transfer-Encoding: chunked", b"Range: bytes=0-1", b"Cookie: " + b"a=b;" * 900),
)
_METHODS: Final = (*(b"GET",) * 8, b"HEAD", b"POST", b"OPTIONS", b"PUT", b"CONNECT", b"get", b"")
_VERSIONS: Final = (*(b" HTTP/1.0",) * 8, b" HTTP/1.1", b" HTTP/2.0", b" HTTP/1", b" HTTP/a.b", b"")


def drawn_request(draw: Draw, port: int) -> tuple[bytes, bool]:
    """Bytes of one request, and whether they are whole."""
    if draw.random() < 0.05:
        return garbage(draw), False
    headers = [b"Host: 127.0.0.1:%d" % port]
    headers += draw.sample(_HEADERS, draw.choice((0, 0, 1, 2)))
    first = draw.choice(_METHODS) + b" " + draw.choice(_PATHS).encode() + draw.choice(_VERSIONS)
    data = b"\r\n".join([first, *headers, b"", b""])
    if draw.random() < 0.3:
        return mutated(draw, data), False
    return data, b"HTTP/1.0" in first and b"keep-alive" not in data


@dataclass
class Pages:
    """Two servers with a thread for each connection. Each exception that ends one is kept."""

    ports: tuple[int, int]
    num_threads: int = field(default_factory=threading.active_count)
    failures: list[BaseException] = field(default_factory=list)

    def note(self, *_: object) -> None:
        """Stands for what Python's servers print."""
        if (error := sys.exception()) is not None:
            self.failures.append(error)

    async def feed(self, draw: random.Random) -> str:
        port = draw.choice(self.ports)
        data, is_whole = drawn_request(draw, port)
        return await self._call(port, data, is_whole=is_whole)

    async def _call(self, port: int, data: bytes, *, is_whole: bool) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = b""
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(DEADLINE_S if is_whole else PIECE_S):
                    writer.write(data)
                    received = await reader.read(1 << 16)
        finally:
            writer.transport.abort()
        told = f"{data[:2000]!r} got {received[:500]!r}"
        if self.failures:
            raise Misbehaved(f"{self.failures.pop()!r}: {told}")
        status = received.split(b" ", 2)[1] if received.startswith(b"HTTP/") else b""
        if status.startswith(b"5") and status not in REFUSALS:
            raise Misbehaved(f"a status of a failure of ours: {told}")
        if is_whole and not received:
            raise RanLate(told, functools.partial(self._again, port, data))
        return status.decode() or "no status"

    async def _again(self, port: int, data: bytes) -> None:
        if await self._call(port, data, is_whole=True) == "no status":
            raise Misbehaved(f"no answer to {data[:2000]!r}")

    def held(self) -> Mapping[str, int]:
        more = threading.active_count() - self.num_threads
        return {"failures": len(self.failures), "threads, in tens": max(0, more) // 10}


class PagesSurface:
    """Requests to both, which show a router whose workers are fakes."""

    name, weight, at_once = "pages and metrics", 30, 8

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        async with fake_fleet(metrics=True, metrics_port=0) as fleet:
            ports = fleet.router.ports
            source = page.PageSource(f"127.0.0.1:{ports.grpc}", lambda: {"router": "a:1"})
            with page.served(source, 0) as url:
                face = Pages((ports.metrics, int(url.rstrip("/").rpartition(":")[2])))
                kept = patch.object(socketserver.BaseServer, "handle_error", face.note)
                with kept, patch.object(page.PageHandler, "timeout", 1.0):
                    yield face
