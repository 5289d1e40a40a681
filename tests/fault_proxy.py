"""A TCP proxy with faults: cuts, truncates, slows or delays connections, by their target.

To one fixed target, or to the one that a client names first by HTTP CONNECT, as gRPC's do if the
variable `grpc_proxy` is set. The bytes that it passes on are always unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from enum import Enum
from types import TracebackType
from typing import Any, Self

_READ = 1 << 16
_CONNECT_S = 5.0
_CLOSE_S = 10.0
_SLOW_BYTES, _SLOW_S = 1024, 0.02  # 50 KB/s
_DELAY_S = 0.3


class Harm(Enum):
    """The fault of connections to a target."""

    CUT = "cut"  # they end, and new ones end at once
    TRUNCATED = "truncated"  # half of the next bytes are passed on, and then they end
    SLOWED = "slowed"
    DELAYED = "delayed"


class FaultProxy:
    """Listens while it is entered. All methods may be called from any thread."""

    def __init__(self, target: str = "") -> None:
        """`target`: host:port of all connections, from now on; empty where they name it."""
        self.address = ""  # host:port, once it is entered
        self.target = target
        self._harms: dict[str, Harm] = {}
        self._harmed: Counter[str] = Counter()
        self._open: dict[asyncio.StreamWriter, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0)).result(_CLOSE_S)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._run(self._close()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def harm(self, target: str, harm: Harm) -> None:
        """Harms what goes to a target from now on, and counts anew."""
        self._run(self._begin(target, harm)).result(_CLOSE_S)

    def heal(self, target: str) -> int:
        """Lets it be; how many connections or pieces were harmed."""
        self._harms.pop(target, None)
        return self._harmed[target]

    def harmed(self, target: str) -> int:
        """How many were, since the harm began."""
        return self._harmed[target]

    # On its own thread.

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self, target: str, harm: Harm) -> None:
        self._harmed[target] = 0
        self._harms[target] = harm
        if harm is Harm.CUT:
            for writer, one in list(self._open.items()):
                if one == target:
                    self._cut(writer)

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to its end."""
        with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
            target = self.target or await self._named(reader, writer)
            if self._harms.get(target) is Harm.CUT:
                self._harmed[target] += 1
            else:
                await self._join(target, reader, writer)
        writer.transport.abort()

    async def _named(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        async with asyncio.timeout(_CONNECT_S):
            asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        return asked.split()[1].decode()

    async def _join(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes bytes on in both directions until either ends."""
        host, _, port = target.rpartition(":")
        async with asyncio.timeout(_CONNECT_S):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self._open[writer] = target
        try:
            ways = (self._pass_on(target, reader, far_writer),
                    self._pass_on(target, far_reader, writer))  # fmt: skip
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            del self._open[writer]
            far_writer.transport.abort()

    async def _pass_on(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ):
                harm = self._harms.get(target)
                self._harmed[target] += harm is not None
                if harm is Harm.TRUNCATED:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                if harm is Harm.DELAYED:
                    await asyncio.sleep(_DELAY_S)
                at = 0
                while harm is Harm.SLOWED and at + _SLOW_BYTES < len(data):
                    writer.write(data[at : at + _SLOW_BYTES])
                    at += _SLOW_BYTES
                    await asyncio.sleep(_SLOW_S)
                writer.write(data[at:])
                await writer.drain()

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        self._harmed[self._open[writer]] += 1
        writer.transport.abort()
