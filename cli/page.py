"""A read-only page about a running fleet, on loopback: workers, and requests while they are
denoised.

One file without external parts, which headers also forbid. It only answers GET, and refuses other
sites by their Host header.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Final

from effuse.cli.status import looks, view_as_json

HOST: Final = "127.0.0.1"
_INTERVAL_S: Final = 0.25
_MOST_VIEWERS: Final = 8  # viewers at a time; each has a thread and a stream of the router
_REQUEST_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class PageSource:
    """Inputs of the page: `target`, host:port of a router, and the current addresses of metrics,
    host:port by name."""

    target: str
    metrics: Callable[[], Mapping[str, str]]
    viewers: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_MOST_VIEWERS)
    )


@contextmanager
def served(source: PageSource, port: int) -> Iterator[str]:
    """Serves the page; port 0 takes a free one. Returns its address. Raises OSError."""
    handler = type("Handler", (PageHandler,), {"source": source})
    server = ThreadingHTTPServer((HOST, port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
    finally:
        server.socket.shutdown(socket.SHUT_RDWR)  # ends its thread, which checks twice a second
        server.shutdown()
        server.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection of a browser."""

    source: PageSource
    timeout = _REQUEST_S
    server_version, sys_version = "effuse", ""

    def handle(self) -> None:
        """Until the browser closes the connection in any way."""
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """The page, its events, and data for programs."""
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this page answers only requests for 127.0.0.1 and localhost",
            )
            return
        path = self.path.split("?")[0]
        if path == "/":
            self._answer("text/html; charset=utf-8", PAGE)
        elif path == "/events":
            self._stream()
        elif path == "/fleet.json":
            look = next(looks(self.source.target, 1.0))
            self._answer("application/json", view_as_json(look).encode())
        elif path == "/targets.json":
            served = self.source.metrics().items()
            listed = [{"targets": [at], "labels": {"process": name}} for name, at in served]
            self._answer("application/json", json.dumps(listed).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, for the viewers' privacy."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        """Server-sent events, until the browser leaves."""
        if not self.source.viewers.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many viewers of this page")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            for look in looks(self.source.target, _INTERVAL_S):
                self.wfile.write(f"data: {view_as_json(look)}\n\n".encode())
        finally:
            self.source.viewers.release()


def _policy(page: bytes) -> str:
    """Rights of the page: only its own script and style, and requests to its own origin."""

    def digest(tag: str) -> str:
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.decode(), re.DOTALL)
        return base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; "
        f"style-src 'sha256-{digest('style')}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


PAGE: Final = (files("effuse.cli") / "page.html").read_bytes()
POLICY: Final = _policy(PAGE)
