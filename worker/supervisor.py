"""Keeps an engine alive: starts its process, exchanges messages, replaces it when it ends.

Each life of an engine has its own incarnation. Attempts in a lost engine fail with a retryable
error; the front goes on. `watchdog.py` decides whether an engine hangs, and the attempts interpret
its messages.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import zmq
import zmq.asyncio

from effuse.config.checks import UNREADABLE
from effuse.placement.records import Capacity, Load
from effuse.protos import errors
from effuse.telemetry import logs
from effuse.worker import engine_home
from effuse.worker.attempts import Attempts
from effuse.worker.config import WorkerConfig, to_json
from effuse.worker.engine_home import SOCKET, make_home
from effuse.worker.messages import (
    Heartbeat,
    Orders,
    Phase,
    RankOrders,
    Ready,
    Shutdown,
    StartupFailed,
    ToEngine,
    ToFront,
)
from effuse.worker.watchdog import (
    Backoff,
    EngineEnded,
    GaveUp,
    Limits,
    Progress,
    ended_by,
    is_stopped_by_signal,
    look,
    observe,
    verdict,
)

LOG = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 10.0
_CLOSE_S = 0.2  # for the connection of an ended engine to end
_HANDED_ON_S = 0.01  # for messages in the library, once the connection has ended
_LONG_S = 1.0  # of compiling that is worth a line
_STOP_GRACE_S = 5.0
_MOST_ENDED = 1024
_RETRY_AFTER_S = 1.0  # about the time in which a small engine restarts


def new_incarnation() -> str:
    """Returns the id of a new life: later ones sort after earlier ones, and all are different."""
    return f"{time.time_ns():016x}-{secrets.token_hex(8)}"


class AsyncSocket:
    """A socket for one other process, in the event loop: sending never waits."""

    def __init__(self, kind: int, options: Mapping[int, int]) -> None:
        self._context = zmq.asyncio.Context()
        self.zmq = self._context.socket(kind)
        for option, value in options.items():
            self.zmq.set(option, value)
        self._monitor = self.zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        # Ends once the other process has disconnected, and all of its messages are received.
        self.disconnected = asyncio.ensure_future(self._monitor.recv_multipart())
        self._receiving: asyncio.Future[bytes] | None = None

    def send(self, frame: bytes) -> bool:
        """Sends a frame if the socket is connected, and returns whether it is."""
        # A plain socket on the same handle would swallow the signal that a message can be received.
        sent = cast("asyncio.Future[object]", self.zmq.send(frame, zmq.NOBLOCK))
        try:
            sent.result()
        except zmq.Again:  # not connected: not yet, or no more
            return False
        return True

    async def receive(
        self, timeout_s: float, others: Iterable[asyncio.Future[Any]] = ()
    ) -> bytes | None:
        """The next frame; None if none comes before the time or one of `others` is over."""
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self.zmq.recv())
        waited: list[asyncio.Future[Any]] = [self._receiving, *others]
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._receiving.done():
            return None
        received, self._receiving = self._receiving, None
        return received.result()

    def close(self) -> None:
        """Closes it; may be called twice."""
        if not self.zmq.closed:
            if self._receiving is not None:
                self._receiving.cancel()
            self.disconnected.cancel()
            # first, because its remaining messages would have no reader
            self.zmq.disable_monitor()
            self._monitor.close(0)
            self.zmq.close(0)
        self._context.term()


class EngineSocket(AsyncSocket):
    """A bound PAIR socket with an unlimited queue: the engine must never wait for its front."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.PAIR, dict.fromkeys((zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER), 0))
        self.endpoint = endpoint
        self.zmq.bind(endpoint)


class EngineClient:
    """A running engine process and the socket to it."""

    def __init__(
        self,
        incarnation: str,
        process: asyncio.subprocess.Process,
        home: Path,
        socket: EngineSocket,
    ) -> None:
        self.incarnation = incarnation
        self._process = process
        self.home = home  # private directory of the socket
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToFront])
        self._exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def spawn(cls, module: str, config: WorkerConfig) -> Self:
        """Starts `python -m module` with its own socket in a private directory.

        Raises OSError if the process or the directory cannot be made.
        """
        home, incarnation = make_home(), new_incarnation()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, home, ignore_errors=True)
            socket = EngineSocket(f"ipc://{home / SOCKET}")
            on_failure.callback(socket.close)
            orders = Orders(
                endpoint=socket.endpoint,
                incarnation=incarnation,
                front_pid=os.getpid(),
                config=msgspec.Raw(to_json(config)),
            )
            process = await start(module, orders)
            on_failure.pop_all()
        return cls(incarnation, process, home, socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Sends a message to the engine; never waits. A dead engine does not get it."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self, timeout_s: float) -> Sequence[ToFront]:
        """Returns the engine's next message, or None if it is silent for `timeout_s`.

        Raises `EngineEnded` once the process has ended and all of its messages were returned, and
        for an invalid message.
        """
        received = await self._socket.receive(timeout_s, [self._exited])
        if received is None and self._exited.done():
            # An engine's messages come before its connection ends.
            received = await self._socket.receive(_CLOSE_S, [self._socket.disconnected])
            if received is None:
                received = await self._socket.receive(_HANDED_ON_S)
            if received is None:
                raise ended_by(self._exited.result())
        if received is None:
            return []
        try:
            return self._decoder.decode(received)
        except UNREADABLE as error:
            raise EngineEnded(f"the engine sent an invalid message: {error}") from error

    async def stop(self, grace_s: float) -> None:
        """Asks the engine to end and returns when it has; kills it after `grace_s`."""
        self.send(Shutdown())
        await asyncio.wait({self._exited}, timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process, if it has not ended, and frees its resources."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):  # it has ended a moment ago
                self._process.kill()
            await asyncio.wait({self._exited}, timeout=_KILL_TIMEOUT_S)
        self._socket.close()
        shutil.rmtree(self.home, ignore_errors=True)
        if not self._exited.done():
            raise EngineEnded(f"engine process {self.pid} survives SIGKILL", permanent=True)


async def start(module: str, orders: Orders | RankOrders) -> asyncio.subprocess.Process:
    """Starts `python -m module` with its orders. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "effuse.worker", module), stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(orders))
    process.stdin.close()
    return process


@dataclass(slots=True)
class EngineLife:
    """An engine that is ready, and its last messages."""

    client: EngineClient
    ready: Ready
    capacity: Capacity
    load: Load
    began: float  # when it became ready

    @property
    def incarnation(self) -> str:
        return self.client.incarnation


class Supervisor:
    """Runs one engine after another; `life` is the current one, if any."""

    def __init__(
        self,
        module: str,
        config: WorkerConfig,
        attempts: Attempts,
        *,
        on_change: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._module = module
        self._config = config
        self._attempts = attempts
        self._on_change = on_change  # called whenever `life` has started or ended
        self.backoff = backoff or Backoff()
        self._progress = Progress.begin(time.monotonic())  # of the current engine, ready or not
        self._logged_phase: Phase = "serving"  # the phase that was logged last
        self._phase: Phase = "serving"  # the present one
        self._phase_at = 0.0  # its begin
        self.life: EngineLife | None = None
        self.last_life: EngineLife | None = None  # the newest that was ready, even if it has ended
        self.restarts = 0
        self.ended: deque[str] = deque(maxlen=_MOST_ENDED)  # lives whose process is gone

    def send(self, message: ToEngine, incarnation: str) -> None:
        """Sends a message to the engine of that incarnation; dropped if it is gone."""
        if self.life is not None and self.life.incarnation == incarnation:
            self.life.client.send(message)

    async def run(self) -> None:
        """Runs until cancelled, then stops the engine; raises `GaveUp`, and OSError if the first
        engine cannot be started."""
        while True:
            if (client := await self._spawn()) is not None:
                await self._live(client)
            await asyncio.sleep(self.backoff.pause_s)
            self.restarts += 1

    async def _spawn(self) -> EngineClient | None:
        """None if no next engine can be started now: a disk may be full for a moment."""
        try:
            engine_home.sweep()  # also what a lost engine has left for its ranks
            client = await EngineClient.spawn(self._module, self._config)
        except OSError as error:
            if not self.restarts:
                raise
            LOG.error("no engine can be started: %s", error)
            self.backoff = self.backoff.failed()
            if self.backoff.is_over:
                raise GaveUp(f"no engine can be started: {error}") from error
            return None
        LOG.info("engine %s starts as process %d", client.incarnation, client.pid)
        return client

    async def _live(self, client: EngineClient) -> None:
        """Returns once the engine is lost."""
        try:
            await self._follow(client)
        except EngineEnded as lost:
            await self._lose(client, lost)
        except asyncio.CancelledError:
            await client.stop(0.0 if self.life is None else _STOP_GRACE_S)
            self.life = None
            self.ended.append(client.incarnation)
            raise

    async def _follow(self, client: EngineClient) -> None:
        """Follows an engine from its start to its end, which raises `EngineEnded`."""
        config = self._config
        limits = Limits(startup_s=config.startup_timeout_s, serving_s=config.hang_timeout_s)
        patience_s = limits.serving_s / 10
        self._progress = Progress.begin(time.monotonic())
        while True:
            messages = await client.receive(patience_s)
            now = time.monotonic()
            self._progress, stood_still_s = look(self._progress, now, patience_s)
            if stood_still_s:
                LOG.warning("this process was stopped for %.1f s", stood_still_s)
            for message in messages:
                self._take(client, message, now)
            is_stopped = now - self._progress.beat_at > limits.stopped_s and is_stopped_by_signal(
                client.pid
            )
            if why := verdict(self._progress, now, limits, is_stopped=is_stopped):
                ending = "stopped" if is_stopped else "hung"
                raise EngineEnded(f"the engine hangs: {why}", ending=ending)

    def _take(self, client: EngineClient, message: ToFront, now: float) -> None:
        if isinstance(message, Heartbeat):
            self._take_beat(client, message, now)
        elif self.life is not None and not isinstance(message, Ready | StartupFailed):
            self._attempts.deliver(message)
        elif self.life is None and isinstance(message, Ready):
            self._begin_life(client, message, now)
        elif self.life is None and isinstance(message, StartupFailed):
            raise EngineEnded(message.message, permanent=message.permanent)
        else:
            when = "before it was ready" if self.life is None else "while it ran"
            raise EngineEnded(f"the engine sent {type(message).__name__} {when}")

    def _take_beat(self, client: EngineClient, beat: Heartbeat, now: float) -> None:
        logs.count(beat.dropped_lines)
        if beat.phase != self._phase:
            self._phase, self._phase_at = beat.phase, now
        # A start compiles dozens of kernels, most of them in a millisecond from the cache.
        is_long = beat.phase == "compiling" and now - self._phase_at > _LONG_S
        is_news = self.life is not None or is_long or beat.phase in ("loading", "capturing")
        if is_news and beat.phase != self._logged_phase:
            LOG.info("engine %s is now %s", client.incarnation, beat.phase)
            self._logged_phase = beat.phase
        self._progress = observe(self._progress, beat, now)
        if self.life is not None:
            self.life.load = beat.load

    def _begin_life(self, client: EngineClient, ready: Ready, now: float) -> None:
        load = Load(total_pages=ready.total_pages, free_pages=ready.total_pages)
        config = self._config
        capacity = Capacity(
            total_pages=ready.total_pages,
            page_size=ready.page_size,
            ranks=config.num_ranks,
            context_ranks=config.context_degree,
            stages=config.pipeline_parallel_size,
            max_num_seqs=config.max_num_seqs * config.num_replicas,
            max_num_batched_tokens=config.max_num_batched_tokens * config.num_replicas,
            replicas=config.num_replicas,
        )
        self.life = self.last_life = EngineLife(client, ready, capacity, load, now)
        self._progress = replace(self._progress, is_ready=True)
        self._logged_phase = "serving"
        LOG.info("engine %s is ready", client.incarnation)
        self._on_change()

    async def _lose(self, client: EngineClient, lost: EngineEnded) -> None:
        """Removes an engine; its attempts get their errors only once its memory is freed."""
        LOG.error("engine %s is lost: %s", client.incarnation, lost)
        if self.life is None:
            self.backoff = self.backoff.failed()
        else:
            lived_s = time.monotonic() - self.life.began
            self.backoff = self.backoff.ended(lived_s, by_itself=lost.ending == "died")
        self.life = None
        self._on_change()
        await client.kill()
        self.ended.append(client.incarnation)
        self._attempts.lose_engine(
            errors.EngineLost(
                "this worker's engine failed while the request ran; a retry may succeed",
                retry_after_s=_RETRY_AFTER_S,
                labels={"incarnation": client.incarnation, "ending": lost.ending},
            )
        )
        if lost.permanent or self.backoff.is_over:
            raise GaveUp(str(lost))
