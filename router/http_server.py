"""An HTTP server within a process that has an event loop and signals of its own.

uvicorn implements HTTP. This module gives it a socket, certificates that are renewed, and an end.
Not here: routes (`openai_api.py`).
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from effuse.protos.errors import REQUEST_ID_KEY
from effuse.protos.tls import Certificates, TlsFiles, be_lenient
from effuse.router.openai_answers import error_object, new_id

KEEP_ALIVE_S: Final = 75
"""Longer than the 60 s for which proxies keep a connection: the proxy closes it, and not both."""
IDLE_S: Final = KEEP_ALIVE_S + 15.0
"""Longest that a connection may take to send the head of a request, or to read a response."""
LOOK_S: Final = 1.0
"""Between two looks at certificates and at idle connections."""
BACKLOG: Final = 2048
"""Connections that the kernel holds until they are taken."""
HANDSHAKE_S: Final = 5.0
"""Longest that a TLS handshake may take; a connection counts only behind it."""
PROBES: Final = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""So that a client whose host has vanished is noticed within 40 s."""
GRACE_S: Final = 1.0
"""How long a server that ends waits for requests on connections that clients have opened."""
LINGER_S: Final = 5.0
LINGER_BYTES: Final = 64 << 20
"""How long, and for how much of a request, a connection stays open behind an early response."""


class _Lingering:
    """A transport that at its end discards the rest of a request before it closes.

    The kernel resets a connection that is closed with unread input. A client that writes its whole
    body first would then see the reset instead of the response.
    """

    def __init__(self, transport: asyncio.Transport, has_more: Callable[[], bool]) -> None:
        self._transport = transport
        self._has_more = has_more
        self.bytes_left: int | None = None  # that it still discards; None before its end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.bytes_left is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._has_more():
            self._transport.close()
            return
        self.bytes_left = LINGER_BYTES
        if self._transport.can_write_eof():  # not over TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def discard(self, num_bytes: int) -> None:
        assert self.bytes_left is not None, "it is not at its end"
        self.bytes_left -= num_bytes
        if self.bytes_left < 0:
            self._transport.close()


class _Connection(H11Protocol):
    """One connection. h11 bounds heads, and obeys HTTP/1.0 and requests that offer an upgrade."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keeps half of the process's descriptors for its other connections."""
        super().connection_made(transport)
        self._lingering = _Lingering(transport, self._has_more)
        self.transport = cast(asyncio.Transport, self._lingering)
        if 2 * len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            transport.abort()

    def _has_more(self) -> bool:
        """Whether the client may still send a part of its request, or of what is no HTTP."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if self._lingering.bytes_left is None:
            super().data_received(data)
        else:
            self._lingering.discard(len(data))

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.transport.is_closing() or self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP in the form of other errors, unless an answer is under way."""
        if not self.is_idle and self.cycle.response_started:
            self.transport.close()
            return
        data = msgspec.json.encode(error_object(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"{REQUEST_ID_KEY}: {new_id()}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.transport.write(head.encode() + data)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves one application. `port` is known once `listen` has returned."""

    def __init__(self, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        """Raises OSError if the certificates cannot be used."""
        self._tls = None if tls is None else _Loading(tls)
        # Below its errors uvicorn logs lines that any client can cause.
        config = uvicorn.Config(
            app, interface="asgi3", loop="none", http=_Connection, ws="none", lifespan="off",
            log_config=None, log_level="error", access_log=False, server_header=False,
            proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        config.ssl = None if self._tls is None else self._tls.first
        super().__init__(config)
        self.taken: socket.socket | None = None
        self.port = 0
        self._idle_since: dict[tuple[object, object], float] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process."""
        yield

    def listen(self, host: str, port: int, *, shares_port: bool) -> int:
        """Takes the port, any free one for 0, and returns it. Raises OSError."""
        try:
            taken = _listening(host.strip("[]"), port, shares_port)  # brackets as for gRPC
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} for HTTP: {error.strerror}") from error
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its connections inherit it
        for option, value in PROBES.items():
            taken.setsockopt(socket.IPPROTO_TCP, option, value)
        taken.setblocking(False)
        self.taken = taken
        self.port = int(taken.getsockname()[1])
        return self.port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's, which has no limit for handshakes."""
        await self.lifespan.startup()
        made = partial(
            _Connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop, context = asyncio.get_running_loop(), self.config.ssl
        limit_s = None if context is None else HANDSHAKE_S
        self.servers = [
            await loop.create_server(
                made, sock=one, ssl=context, backlog=BACKLOG, ssl_handshake_timeout=limit_s
            )
            for one in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also answers requests that are on their way: uvicorn's would close their connections."""
        for server in self.servers:
            server.close()
        headers = self.server_state.default_headers
        headers.append((b"connection", b"close"))
        for one in self.server_state.connections:
            if isinstance(one, _Connection) and one.cycle is not None:
                one.cycle.default_headers = headers
        for _ in range(10):
            await asyncio.sleep(GRACE_S / 10)
            if self.config.ssl is None and not self.server_state.connections:
                break  # with TLS a handshake may still bring one
        await super().shutdown(sockets)

    async def run_until(self, stop: asyncio.Event, drain_s: float) -> None:
        """Serves until `stop` is set. Then it takes no more connections, and calls that run, or
        that arrive within `GRACE_S`, have `drain_s` seconds to end."""
        assert self.taken is not None, "call listen first"
        self.config.timeout_graceful_shutdown = max(1, round(drain_s - GRACE_S))
        with self.taken:
            async with asyncio.TaskGroup() as beside:
                looking = beside.create_task(self._look())
                serving = beside.create_task(self.serve([self.taken]))
                # Waits without a deadline by intent: this is the life of the process.
                await stop.wait()
                self.should_exit = True
                await serving
                looking.cancel()

    async def _look(self) -> None:
        while True:
            if self._tls is not None:
                self._tls.look()
            self.end_idle(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    def end_idle(self, now: float) -> None:
        """Ends connections that have sent no whole head of a request, or have not taken the end of
        an answer, for `IDLE_S` seconds. `now` is in seconds of a monotonic clock."""
        waiting: dict[tuple[object, object], asyncio.Transport] = {
            (one, one.cycle): one.transport
            for one in self.server_state.connections
            if isinstance(one, _Connection) and one.is_idle
        }
        self._idle_since = {key: self._idle_since.get(key, now) for key in waiting}
        for key, since in self._idle_since.items():
            if now - since > IDLE_S:
                waiting[key].abort()


def _listening(host: str, port: int, shares_port: bool) -> socket.socket:
    """A socket for both families if the host is every one, as gRPC's. Raises OSError."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        every = ("::", port)
        return socket.create_server(
            every,
            family=socket.AF_INET6,
            backlog=BACKLOG,
            reuse_port=shares_port,
            dualstack_ipv6=True,
        )
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=BACKLOG, reuse_port=shares_port)


class _Loading(Certificates[ssl.SSLContext]):
    """The TLS context of a server, which takes that of new files in the handshakes that follow."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError if they cannot be used."""
        super().__init__(files, _context_of)
        self.first = self.found
        self.first.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject, _name: str, _first: ssl.SSLContext) -> None:
        connection.context = self.found


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert files.cert is not None
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)
        be_lenient(context)
        # A session that goes on would not show its certificate to the new authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context
