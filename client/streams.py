"""The text of an answer that arrives piece by piece, blocking and for asyncio.

If a stream breaks off, another attempt goes on with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Self, TypeAlias

import grpc
import grpc.aio

from effuse.client.answer import Answer, Event, Gathering
from effuse.client.resuming import Resumption
from effuse.client.retries import Retries, Waiter, raising, wait
from effuse.protos.errors import Cancelled, EffuseError
from effuse.v1 import generation_pb2 as pb

Method: TypeAlias = "grpc.UnaryStreamMultiCallable[pb.GenerateStreamRequest, Event]"
AsyncMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[pb.GenerateStreamRequest, Event]"
Begin = Callable[[], tuple[grpc.aio.Channel, AsyncMethod, Retries]]


class Stream:
    """The text of the first answer, piece by piece; `answer` is complete at the end."""

    def __init__(
        self,
        method: Method,
        request: pb.GenerateRequest,
        retries: Retries,
        waiter: Waiter,
        target: str,
    ) -> None:
        self._method, self._request = method, request
        self._retries, self._waiter, self._target = retries, waiter, target
        self._resumption, self._gathering = Resumption(), Gathering()
        self._answer: Answer | None = None
        self._call = self._begin()

    def _begin(self) -> grpc.CallIterator[Event]:
        """Makes an attempt."""
        asked = pb.GenerateStreamRequest(request=self._resumption.begin(self._request))
        retries = self._retries
        return self._method(asked, timeout=retries.left_s, metadata=retries.metadata)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none of them empty. Raises EffuseError and StreamBroken."""
        for event in self._events():
            if piece := self._gathering.take(event):
                yield piece
        self._answer = self._gathering.answer()

    def _events(self) -> Iterator[Event]:
        """The events of a stream that another attempt goes on with if it breaks off."""
        while True:
            try:
                with raising(self._target):
                    yield from filter(None, map(self._resumption.take, self._call))
                return
            except EffuseError as error:
                is_over = self._waiter.is_cancelled
                pause_s = None if is_over else self._retries.pause_s(error)
                if pause_s is None or not self._waiter.wait(pause_s):
                    self._call.cancel()
                    raise
            self._call = self._begin()
            if self._waiter.is_cancelled:
                self._call.cancel()

    @property
    def answer(self) -> Answer:
        """The whole answer; reads the rest of the stream first. Raises like iterating."""
        if self._answer is None:
            for _ in self:
                pass
        assert self._answer is not None, "the whole stream was read"
        return self._answer

    def cancel(self) -> None:
        """Ends the request; the fleet immediately frees its resources."""
        self._waiter.cancel()
        self._call.cancel()


class AsyncStream:
    """The same for asyncio: `await stream.answer` at the end. Closing it ends the request."""

    def __init__(self, begin: Begin, request: pb.GenerateRequest, target: str) -> None:
        """begin: called at the first awaited piece, in its event loop."""
        self._answers: list[Answer] = []
        # It has no reference to this object, so that it ends with it when a loop is left.
        self._pieces = _pieces(begin, request, target, self._answers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """A piece of text, not empty. Raises EffuseError and StreamBroken."""
        return await anext(self._pieces)

    @property
    async def answer(self) -> Answer:
        """The whole answer; reads the rest of the stream first. Raises like iterating."""
        async for _ in self:
            pass
        if not self._answers:
            raise Cancelled("the stream was closed before its answer was complete")
        return self._answers[0]

    async def aclose(self) -> None:
        """Ends the request; the fleet immediately frees its resources."""
        await self._pieces.aclose()


async def _pieces(
    begin: Begin, request: pb.GenerateRequest, target: str, answers: list[Answer]
) -> AsyncGenerator[str, None]:
    """The text, piece by piece; appends the whole answer to `answers` at the end."""
    resumption, gathering = Resumption(), Gathering()
    channel, method, retries = begin()
    while True:
        asked = pb.GenerateStreamRequest(request=resumption.begin(request))
        call = method(asked, timeout=retries.left_s, metadata=retries.metadata)
        try:
            with raising(target):
                async for event in call:
                    rest = resumption.take(event)
                    if rest is not None and (piece := gathering.take(rest)):
                        yield piece
            answers.append(gathering.answer())
            return
        except EffuseError as error:
            if (pause_s := retries.pause_s(error)) is None:
                raise
        finally:
            call.cancel()
        await wait(channel, pause_s)
