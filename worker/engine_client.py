"""The front's end of one engine process: starts it, speaks with it, sees its end.

One object is one life of an engine, under one incarnation. What is done when it ends is
`supervisor.py`'s; what its messages mean is the attempts'.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self, cast

import msgspec
import zmq
import zmq.asyncio

from effuse.worker.config import WorkerConfig, to_json
from effuse.worker.engine_home import SOCKET, make_home
from effuse.worker.engine_process import Orders
from effuse.worker.messages import Shutdown, ToEngine, ToFront

_KILL_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.2
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class EngineGone(Exception):
    """The engine process is gone, or never became ready."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent  # starting another one will not help


def new_incarnation() -> str:
    """Returns the id of a new life: later ones sort after earlier ones, and no two are alike."""
    return f"{time.time_ns():016x}-{secrets.token_hex(8)}"


class EngineClient:
    """A running engine process and the socket to it."""

    def __init__(
        self,
        incarnation: str,
        process: asyncio.subprocess.Process,
        home: Path,
        socket: "EngineSocket",
    ) -> None:
        self.incarnation = incarnation
        self._process = process
        self.home = home  # private directory of the socket
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToFront])
        self._exited = asyncio.ensure_future(process.wait())
        self._receiving: asyncio.Future[bytes] | None = None

    @classmethod
    async def spawn(cls, module: str, config: WorkerConfig) -> Self:
        """Starts `python -m module` with a socket of its own in a private directory.

        Raises OSError if the process or the directory cannot be made.
        """
        home = make_home()
        incarnation = new_incarnation()
        socket = EngineSocket(f"ipc://{home / SOCKET}")
        try:
            process = await _start(module, _orders(socket.endpoint, incarnation, config))
        except OSError:
            socket.close()
            shutil.rmtree(home, ignore_errors=True)
            raise
        return cls(incarnation, process, home, socket)

    @property
    def pid(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Says something to the engine; never waits. To a dead engine it says it in vain."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self, timeout_s: float) -> Sequence[ToFront]:
        """Returns what the engine says next, nothing if it is silent for `timeout_s`.

        Raises `EngineGone` once the process has ended and all that it said was returned, and
        where it says what is no message.
        """
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._socket.receive())
        waited: set[asyncio.Future[bytes] | asyncio.Future[int]] = {self._receiving, self._exited}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._exited.done():  # its last words may still be on their way
            await asyncio.wait({self._receiving}, timeout=_LAST_WORDS_S)
        if self._receiving.done():
            received, self._receiving = self._receiving, None
            try:
                return self._decoder.decode(received.result())
            except _UNREADABLE as error:
                raise EngineGone(f"the engine said what is no message: {error}") from error
        if self._exited.done():
            raise EngineGone(f"the engine {_ending(self._exited.result())}")
        return []

    async def stop(self, grace_s: float) -> None:
        """Asks the engine to end and returns when it has; kills it after `grace_s`."""
        self.send(Shutdown())
        await asyncio.wait({self._exited}, timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process, if it has not ended, and frees what was held for it."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):  # it has ended a moment ago
                self._process.kill()
            await asyncio.wait({self._exited}, timeout=_KILL_TIMEOUT_S)
        if self._receiving is not None:
            self._receiving.cancel()
        self._socket.close()
        shutil.rmtree(self.home, ignore_errors=True)
        if not self._exited.done():
            raise EngineGone(f"engine process {self.pid} does not die", permanent=True)


class EngineSocket:
    """A bound PAIR socket that queues without limit: the engine must never wait for its front."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.set(option, 0)
        self._socket.bind(endpoint)

    def send(self, frame: bytes) -> None:
        # A plain socket on the same handle would swallow the signal that something can be received.
        sent = cast("asyncio.Future[object]", self._socket.send(frame, zmq.NOBLOCK))
        with contextlib.suppress(zmq.Again):  # nobody is connected: not yet, or no more
            sent.result()

    async def receive(self) -> bytes:
        return await self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _orders(endpoint: str, incarnation: str, config: WorkerConfig) -> bytes:
    return msgspec.json.encode(
        Orders(
            endpoint=endpoint,
            incarnation=incarnation,
            front_pid=os.getpid(),
            config=msgspec.Raw(to_json(config)),
        )
    )


async def _start(module: str, orders: bytes) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module), stdin=asyncio.subprocess.PIPE
    )
    if process.stdin is None:
        raise AssertionError("a pipe was asked for")
    process.stdin.write(orders)
    process.stdin.close()
    return process


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status}"
    return f"exited with status {status}"
