"""The engine's process: takes messages, steps its core, sends events and heartbeats. Also the
common parts of both workers' cores: forwards that may fail, and an outbox.

Knows no gRPC and no model: each worker's `build.py` makes the core. The process ends with its
front, however that ended.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket as network
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import zmq

from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.resolving import resolve
from effuse.placement.records import Load
from effuse.telemetry import logs
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_home import kept_open
from effuse.worker.messages import (
    AbortDone,
    CoreEvent,
    EngineCore,
    Failed,
    FailureCode,
    Finished,
    Orders,
    PromptPushed,
    Ready,
    Shutdown,
    StartupFailed,
    ToEngine,
    ToFront,
)
from effuse.worker.watchdog import GroupBroken, Pulse

if TYPE_CHECKING:
    from effuse.worker.ranks import Ranks

LOG = logging.getLogger(__name__)
Config = TypeVar("Config", bound=WorkerConfig)
_Result = TypeVar("_Result")
_ENCODER = msgspec.msgpack.Encoder()
_ENDS = (Finished, Failed, PromptPushed, AbortDone)  # of an attempt

_PR_SET_PDEATHSIG = 1
_WAIT_DEVICE_MS = 1  # that an attempt has ended, which no descriptor shows
_WAIT_BUSY_MS = 2  # a peer or the connector may have an event soon
_WAIT_IDLE_MS = 100
_MOST_FAILED_FORWARDS = 8  # consecutive ones; then the device counts as lost and the process ends


# Called repeatedly within a long step, with the messages that have arrived; returns those that wait
# for its end, in order.
Meanwhile = Callable[[Sequence[ToEngine]], Sequence[ToEngine]]


def leave(come: Sequence[ToEngine]) -> Sequence[ToEngine]:
    return come


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that has loaded its weights and run a first forward."""

    core: EngineCore
    ready: Ready
    wakes: Sequence[int] = ()  # descriptors that are readable while the core has work
    meanwhile: Meanwhile = leave
    ranks: "Ranks | None" = None

    def close(self) -> None:
        self.core.close()
        if self.ranks is not None:
            self.ranks.close()


Builder = Callable[[Config, str, Pulse], Engine]


class EngineLoop:
    """Drives one core over one socket until it receives a shutdown."""

    def __init__(
        self,
        core: EngineCore,
        socket: "zmq.Socket[bytes]",
        pulse: Pulse,
        *,
        wakes: Sequence[int] = (),
        meanwhile: Meanwhile = leave,
        idle_ms: int | None = _WAIT_IDLE_MS,  # None waits for an event
    ) -> None:
        self._core = core
        self._socket = socket
        self._pulse = pulse
        self._idle_ms = idle_ms
        self._poller = zmq.Poller()
        for source in (socket, *wakes):
            self._poller.register(source, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._left = deque[ToEngine]()  # messages that wait for the end of a step
        self._meanwhile = meanwhile
        pulse.meanwhile = self._receive

    def run(self) -> None:
        """Runs until a `Shutdown` arrives."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Takes messages, steps once, sends events, and waits if it was idle. False at the end."""
        if not self._take():
            return False
        worked = self._core.step()
        events, load = self._core.outbox(), self._core.load()
        # The load is sent before the end of an attempt, so that it is correct for the reader of
        # that.
        beat = self._pulse.turn(load, has_end=any(isinstance(event, _ENDS) for event in events))
        send(self._socket, events if beat is None else [beat, *events])
        if not worked and not self._left:
            self._poller.poll(self._wait_ms(load))
        return True

    def _wait_ms(self, load: Load) -> int | None:
        if self._core.is_working():
            return _WAIT_DEVICE_MS
        return _WAIT_BUSY_MS if load.running or load.waiting else self._idle_ms

    def _take(self) -> bool:
        while (message := self._oldest()) is not None:
            if isinstance(message, Shutdown):
                return False
            self._core.handle(message)  # which may put off messages that come meanwhile
        return True

    def _oldest(self) -> ToEngine | None:
        return self._left.popleft() if self._left else next(self._messages(), None)

    def _receive(self) -> None:
        """From within a long step: lets the core take messages that must not wait for its end."""
        self._left = deque(self._meanwhile([*self._left, *self._messages()]))

    def _messages(self) -> Iterator[ToEngine]:
        while self._socket.poll(0, zmq.POLLIN):
            yield self._decoder.decode(self._socket.recv(zmq.NOBLOCK))


def send(socket: "zmq.Socket[bytes]", messages: Sequence[ToFront]) -> None:
    """Sends messages to the front as one frame; never waits."""
    if messages:
        socket.send(_ENCODER.encode(list(messages)), zmq.NOBLOCK)


def main(config_type: type[Config], build: Builder[Config]) -> NoReturn:
    """Runs an engine process to its end: status 0 after `Shutdown`, 2 if it could not start."""
    leave_imports()
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    die_with(orders.front_pid)
    config = read_config(orders.config, config_type)
    logs.set_up("engine", config.log_level, config.log_format)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(orders.endpoint)
    try:
        status = _run(config, orders.incarnation, build, socket)
    finally:
        socket.close()
        context.term()
    logs.leave(status)


def _run(
    config: Config, incarnation: str, build: Builder[Config], socket: "zmq.Socket[bytes]"
) -> int:
    pulse = Pulse(lambda beat: send(socket, [beat]))
    with contextlib.ExitStack() as signs_of_life:
        try:
            first = signs_of_life.enter_context(listen_while_alive(config.host))
            port = first.getsockname()[1]
            kept_open.append(first.fileno())
            signs_of_life.callback(kept_open.clear)
            with pulse.during("loading"):
                engine = build(config, incarnation, pulse)
            signs_of_life.enter_context(listen_while_alive(config.host, port))
        except (ValueError, OSError) as error:
            send(socket, [StartupFailed(message=str(error), permanent=True)])
            return 2
        end_start()
        loop = EngineLoop(
            engine.core, socket, pulse, wakes=engine.wakes, meanwhile=engine.meanwhile
        )
        send(socket, [msgspec.structs.replace(engine.ready, engine_port=port)])
        try:
            loop.run()
        finally:
            engine.close()
    return 0


def leave_imports() -> None:
    """The collection at the end of the start leaves out what was imported: torch and its few
    objects of garbage, through which a search takes 0.1 s."""
    gc.freeze()


def end_start() -> None:
    """Collects garbage from now on, but never among the current objects, which stay. A search
    through all of them would stop every thread for 0.1 s, and all handoffs with the connector's.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def listen_while_alive(host: str, port: int = 0) -> network.socket:
    """A socket that listens but never answers. The kernel closes it when the process ends, so a
    closed port shows that the engine is gone, which a killed front cannot report.

    One is opened before the engine's devices, and one after them at the same port. Kernels differ
    in the order in which they close a process's descriptors, and a device's work has ended only
    once all between are closed.
    """
    where, family = resolve(host)
    return network.create_server(
        (where, port), family=family, reuse_port=True, dualstack_ipv6=where == "::"
    )


def die_with(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; ends it if that has happened. From
    then on the parent, a front or a leader, decides when this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process has ended")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def read_config(raw: msgspec.Raw, config_type: type[Config]) -> Config:
    """Reads a config written by `config.to_json`; raises msgspec.ValidationError."""
    return msgspec.json.decode(raw, type=config_type, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind} in a config")


class ForwardFailed(Exception):
    """A forward failed, and with it only the requests in it. The message is for callers."""


class ForwardGuard:
    """Keeps an engine alive when a forward fails, unless eight consecutive ones do."""

    def __init__(self) -> None:
        self._num_failed = 0  # consecutive failures

    def run(self, forward: Callable[[], _Result], num_requests: int) -> _Result:
        """The result of `forward` over this many requests. Raises ForwardFailed if it raises
        anything; the eighth consecutive failure, and a broken group, raise the original error.
        """
        try:
            result = forward()
        except GroupBroken:
            raise
        except Exception as error:
            LOG.exception("a forward over %d requests failed", num_requests)
            self._num_failed += 1
            if self._num_failed >= _MOST_FAILED_FORWARDS:
                raise
            raise ForwardFailed("the model failed in this step") from error
        self._num_failed = 0
        return result


class Outbox:
    """Events of an engine for its front, in order, since the last drain."""

    def __init__(self) -> None:
        self._events: list[CoreEvent] = []

    def drain(self) -> Sequence[CoreEvent]:
        events, self._events = self._events, []
        return events

    def add(self, *events: CoreEvent) -> None:
        self._events += events

    def failed(
        self,
        attempt: AttemptId,
        code: FailureCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
    ) -> None:
        self.add(
            Failed(attempt=attempt, code=code, message=message, retryable=retryable, field=field)
        )

    def abort_done(self, attempt: AttemptId, *, was_running: bool) -> None:
        self.add(AbortDone(attempt=attempt, was_running=was_running))
