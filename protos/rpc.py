"""A gRPC server with limits and health, and the options of channels to one.

It has measured options, health and reflection, ports, SIGTERM and drain. Servicers are elsewhere;
errors are mapped in `errors.py` and `gate.py`, and `gate.py` and `tls.py` decide about access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from effuse.protos.gate import Doorkeeper, ErrorInterceptor, Health, add_reflection
from effuse.protos.tls import ServerTls

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The server's side of a call."""
MIB: Final = 1 << 20
LAST_S: Final = 5.0
"""Time for calls that still run at the end of a drain, so that their last messages arrive."""
_SETTLE_S: Final = 1.0
_LOOK_S: Final = 0.001
_LOOKS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """Limits for one peer of a server."""

    max_message_bytes: int
    max_concurrent_streams: int
    max_metadata_bytes: int = 8192
    handshake_timeout_s: float = 5.0
    max_idle_s: float = 3600.0
    """Time after which a connection without calls is closed, with a message to its owner."""
    min_ping_interval_s: float = 0.5
    max_age_s: float | None = None
    """Age at which a connection closes once its calls have ended. Clients then connect again, and
    new servers get some of them. gRPC varies it by a tenth. None: never.
    """


PUBLIC_LIMITS: Final = MessageLimits(
    max_message_bytes=4 * MIB, max_concurrent_streams=1024, max_idle_s=300.0
)
"""For clients. 4 MiB is far more than the longest prompt; KV never travels here."""

FLEET_LIMITS: Final = MessageLimits(max_message_bytes=64 * MIB, max_concurrent_streams=16384)
"""For the router's calls to workers: all of its requests share one connection."""

PROBE_LIMITS: Final = MessageLimits(max_message_bytes=4096, max_concurrent_streams=16)
"""For callers that only check health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """How soon a silent peer counts as gone. With these values a stopped process was noticed in 1
    to 3 s, a blocked event loop in 3.3 s, and a partition in 1 s. A loop must not block that long.
    """

    time_s: float = 1.0
    timeout_s: float = 1.0
    ping_timeout_s: float = 2.0


FLEET_KEEPALIVE: Final = Keepalive()

CALLER_KEEPALIVE: Final = Keepalive(time_s=20.0, timeout_s=20.0, ping_timeout_s=20.0)
"""How soon a caller counts as gone for a server, which then frees everything that its calls hold.
Clients also use it for a router.
"""

Options = list[tuple[str, int]]


def near_options() -> Options:
    """Option of a channel within a fleet or a machine: it ignores the web proxy of the environment
    (http_proxy). gRPC would use that by default, even for loopback, and the proxy would see
    everything. A proxy in gRPC's own variable is used.
    """
    is_meant = os.environ.get("grpc_proxy")  # noqa: SIM112  # as gRPC spells it
    return [] if is_meant else [("grpc.enable_http_proxy", 0)]


def server_options(
    limits: MessageLimits, keepalive: Keepalive, *, shares_port: bool = False
) -> Options:
    """Channel arguments of a server. With `shares_port` other servers that also share it may listen
    on the same port, and each gets a part of the connections.
    """
    return [
        # By default gRPC shares: a second server on a taken port would get half of the calls.
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", FLEET_LIMITS.max_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # Larger messages are refused. Between this and another limit, twice as high, gRPC refuses
        # at random.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # By default the library delays its own refusals by 0.1 to 1 s to slow down attackers. They
        # have other connections, and an honest caller would wait.
        ("grpc.http.tarpit", 0),
        ("grpc.max_connection_idle_ms", _ms(limits.max_idle_s)),
        # Without a grace period: running calls end first, however long they are.
        *(
            []
            if limits.max_age_s is None
            else [("grpc.max_connection_age_ms", _ms(limits.max_age_s))]
        ),
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(limits.min_ping_interval_s)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _ms(limits.min_ping_interval_s)),
        *keepalive_options(keepalive),
    ]


def channel_options(keepalive: Keepalive | None) -> Options:
    """Channel arguments of a client. The library never retries calls, because streams are resumed
    by our own rule of offsets.
    """
    options = [
        ("grpc.max_receive_message_length", FLEET_LIMITS.max_message_bytes),
        ("grpc.max_send_message_length", FLEET_LIMITS.max_message_bytes),
        ("grpc.enable_retries", 0),
        *reconnect_options(),
    ]
    if keepalive is None:
        return options
    return [*options, *keepalive_options(keepalive, without_calls=False)]


def reconnect_options() -> Options:
    """Channel arguments that let a client find a server again soon. gRPC's own pauses grow to two
    minutes, and it asks DNS at most twice a minute.
    """
    return [
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The name suggests a pause, but it is the time limit of one attempt to connect, handshake
        # included.
        ("grpc.min_reconnect_backoff_ms", 3000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ]


def keepalive_options(keepalive: Keepalive, *, without_calls: bool = True) -> Options:
    """Channel arguments, at either end, that detect a silent peer. A server also watches peers
    without calls, because a lost one would keep its connection. A caller does not: it may have a
    thousand connections, and a new call detects the loss as fast.
    """
    return [
        ("grpc.keepalive_time_ms", _ms(keepalive.time_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(keepalive.ping_timeout_s)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", int(without_calls)),
    ]


class RpcServer:
    """A gRPC server with errors mapped, health and reflection.

    Use: construct, add servicers to `.server`, `await start(services)`, then `serve` or `stop`.
    Health knows "" (the process answers) and the services given to `health.set`.
    """

    def __init__(
        self,
        limits: MessageLimits,
        keepalive: Keepalive = CALLER_KEEPALIVE,
        *,
        shares_port: bool = False,
        tls: ServerTls | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """tls: None is plain text. doorkeeper: decides about access; None accepts every caller."""
        options = server_options(limits, keepalive, shares_port=shares_port)
        self._border = ErrorInterceptor(doorkeeper)
        self.server = _make_server(options, self._border)
        self._tls, self._shares_port = tls, shares_port
        self._probed: grpc.aio.Server | None = None
        self.health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)

    async def start(self, address: str, services: Iterable[str]) -> int:
        """Binds `address` ("host:port"; port 0 takes a free one), starts, returns the port.

        `services`: full names for reflection; each begins as NOT_SERVING. Raises OSError if the
        port is in use or the host is not an address of this machine.
        """
        names = list(services)
        add_reflection([*names, health.SERVICE_NAME], self.server)
        for name in names:
            self.health.set(name, serving=False)
        port = _listen(self.server, address, self._tls)
        await self.server.start()
        return port

    async def start_health(self, address: str) -> int:
        """Also answers health checks, and nothing else, at `address`, in plain text and for every
        caller; returns the port. The port is shared if that of `start` is. Raises OSError like
        `start`.
        """
        options = server_options(PROBE_LIMITS, CALLER_KEEPALIVE, shares_port=self._shares_port)
        self._probed = _make_server(options, ErrorInterceptor())
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._probed)
        port = _listen(self._probed, address, None)
        await self._probed.start()
        return port

    async def settle(self, until: float) -> None:
        """Returns at a moment at which no call waits to be accepted; at the latest after
        `_SETTLE_S` or at `until`, a time of the loop. Call it before `stop`: the library would end
        waiting calls with CANCELLED, which clients other than ours do not retry.
        """
        looks, loop = 0, asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(until, loop.time() + _SETTLE_S)):
                while looks < _LOOKS:
                    before, began = self._border.num_calls, loop.time()
                    await asyncio.sleep(_LOOK_S)
                    # If this process was stopped, calls arrived meanwhile that it could not accept.
                    is_quiet = loop.time() - began < 3 * _LOOK_S
                    looks = looks + 1 if is_quiet and self._border.num_calls == before else 0

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end within `grace_s`, and cancels the rest."""
        await self.server.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0.0)


def _make_server(options: Options, border: ErrorInterceptor) -> grpc.aio.Server:
    """A server that finds a call's method by its name.

    With registered methods the library searches all of them for each call. If the server also stops
    at the moment at which a call arrives, the call is lost and hangs until its deadline (grpcio
    1.85).
    """

    def register_none(
        service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """They are already generic handlers."""

    server = grpc.aio.server(interceptors=[border], options=options)
    server.add_registered_method_handlers = register_none  # type: ignore[method-assign]
    return server


def _listen(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        text = (
            f"cannot listen on {address}: the port is in use, or the host is not an address of "
            "this machine"
        )
        raise OSError(text) from error


@contextlib.asynccontextmanager
async def shutdown_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, for as long as the context lasts."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def serve(
    rpc: RpcServer,
    stop: asyncio.Event,
    *,
    drain_s: float,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    closes_first: bool = False,
) -> None:
    """Serves until `stop` is set, then drains: it becomes unhealthy, awaits `on_drain`, and gives
    running calls the rest of `drain_s`, at most `LAST_S`. A call that arrived at the moment of the
    stop may be lost in the library, and only this limit ends it.

    `closes_first`: before `on_drain` it stops listening and sends callers elsewhere (GOAWAY), so
    that only accepted calls continue. This is for a server with a replacement: callers go there
    automatically, and the library sends again what was on its way. Without it, callers still get
    answers, which may be refusals.
    """
    loop = asyncio.get_running_loop()
    closing: asyncio.Task[None] | None = None
    grace_s = 0.0
    try:
        # Waits without a deadline on purpose: this is the life of the process.
        await stop.wait()
        until = loop.time() + drain_s
        rpc.health.drain()
        if closes_first:
            await rpc.settle(until)
            closing = asyncio.create_task(rpc.stop(drain_s))
        if on_drain is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await on_drain()
        if closing is None:
            await rpc.settle(until)
        grace_s = max(0.0, until - loop.time())
        if on_drain is not None:
            grace_s = min(grace_s, LAST_S)
    finally:
        await rpc.stop(grace_s)
        if closing is not None:
            await closing


def is_task_cancelled() -> bool:
    """Whether the current task is cancelled. grpc.aio raises CancelledError also in a task that is
    not, if its call is cancelled or its channel is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def write_ready_file(path: Path, address: str, **facts: str) -> None:
    """Writes {"address": "host:port", "pid": ...} and other facts to `path`, atomically, for
    processes that wait for this one.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"address": address, **facts, "pid": os.getpid()}) + "\n")
    partial.replace(path)


def update_ready_file(path: Path, address: str, **facts: str) -> None:
    """Writes it again with other facts, unless it is gone or another process's by now."""
    with contextlib.suppress(FileNotFoundError):
        if json.loads(path.read_text())["pid"] == os.getpid():
            write_ready_file(path, address, **facts)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
