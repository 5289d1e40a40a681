"""An HTTP server within a process that has an event loop and signals of its own.

uvicorn implements HTTP. This module gives it a socket, certificates that are renewed, and an end.
Not here: routes (`openai_api.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from effuse.protos.tls import Renewal, TlsFiles

KEEP_ALIVE_S: Final = 75
"""Longer than the 60 s for which proxies keep a connection: the proxy closes it, and not both."""
RENEW_S: Final = 1.0
BACKLOG: Final = 2048
"""Connections that the kernel holds until they are taken."""


class HttpServer(uvicorn.Server):
    """Serves one application. `port` is known once `listen` has returned."""

    def __init__(self, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        """Raises OSError if the certificates cannot be used."""
        self._tls = None if tls is None else _Certificates(tls)
        config = uvicorn.Config(
            app, interface="asgi3", loop="none", http="httptools", ws="none", lifespan="off",
            log_config=None, access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        config.ssl = None if self._tls is None else self._tls.context
        super().__init__(config)
        self.taken: socket.socket | None = None
        self.port = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process."""
        yield

    def listen(self, host: str, port: int, *, shares_port: bool) -> int:
        """Takes the port, any free one for 0, and returns it. Raises OSError."""
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            taken = socket.create_server(
                where[:2], family=family, backlog=BACKLOG, reuse_port=shares_port
            )
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} for HTTP: {error.strerror}") from error
        taken.setblocking(False)
        self.taken = taken
        self.port = int(taken.getsockname()[1])
        return self.port

    async def run_until(self, stop: asyncio.Event, drain_s: float) -> None:
        """Serves until `stop` is set. Then it takes no more connections, and calls that run have
        `drain_s` seconds to end."""
        assert self.taken is not None, "listen comes first"
        self.config.timeout_graceful_shutdown = max(1, round(drain_s))
        with self.taken:
            await self._run_until(stop, self.taken)

    async def _run_until(self, stop: asyncio.Event, taken: socket.socket) -> None:
        async with asyncio.TaskGroup() as beside:
            renewing = beside.create_task(self._renew())
            serving = beside.create_task(self.serve([taken]))
            # Waits without a deadline by intent: this is the life of the process.
            await stop.wait()
            self.should_exit = True
            await serving
            renewing.cancel()

    async def _renew(self) -> None:
        while self._tls is not None:
            self._tls.look()
            await asyncio.sleep(RENEW_S)


class _Certificates:
    """A TLS context that takes new files for the handshakes that follow."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._renewal = Renewal(files)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._load()

    def look(self) -> None:
        """Reads the files again if they have changed."""
        self._renewal.newest(self._load)

    def _load(self) -> None:
        assert self._files.cert is not None
        self.context.load_cert_chain(self._files.cert, self._files.key)
        if self._files.ca is not None:
            self.context.load_verify_locations(self._files.ca)
