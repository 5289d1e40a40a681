"""Sockets to one other process of a worker, in the event loop."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import zmq
import zmq.asyncio


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

    def send(self, frame: bytes) -> None:
        """Sends a frame, if the socket is connected."""
        # A plain socket on the same handle would swallow the signal that a message can be received.
        sent = cast("asyncio.Future[object]", self.zmq.send(frame, zmq.NOBLOCK))
        with contextlib.suppress(zmq.Again):  # not connected: not yet, or no more
            sent.result()

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
