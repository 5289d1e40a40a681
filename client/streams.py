"""The text of an answer that arrives piece by piece, blocking and for asyncio.

If a stream breaks off, another attempt goes on with it: `Resumption` knows what the caller has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import AsyncGeneratorType
from typing import Final, Self, TypeAlias, cast

import grpc
import grpc.aio

from effuse.client.answer import Answer, Event, Gathering, text_of
from effuse.client.retries import Retries, Waiter, raising
from effuse.protos.errors import Cancelled, EffuseError, Unavailable
from effuse.v1 import generation_pb2 as pb

Method: TypeAlias = "grpc.UnaryStreamMultiCallable[pb.GenerateStreamRequest, Event]"
AsyncMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[pb.GenerateStreamRequest, Event]"
Begin = Callable[[], tuple[AsyncMethod, Retries]]
Pause = Callable[[float], asyncio.Task[None]]
_CHANGED: Final = (
    "the stream broke off, and its retry returned another answer; part of the first was already "
    "delivered, so send the request again"
)


class Resumption:
    """Lets through each text and each token of a stream once, whichever attempt brings it."""

    def __init__(self) -> None:
        self._parts: dict[int, _Answer] = {}  # by answer
        self._has_echo = False
        self._seed: int | None = None

    def begin(self, asked: pb.GenerateRequest) -> pb.GenerateRequest:
        """Returns the request of the next attempt, which brings everything from the start. If the
        caller gave neither an id nor a seed, it has the seed that an earlier attempt brought. A
        router knows the seed of an id."""
        for part in self._parts.values():
            part.text_at = part.tokens_at = 0
        if self._seed is None or asked.request_id or asked.sampling.HasField("seed"):
            return asked
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        again.sampling.seed = self._seed
        return again

    def take(self, event: Event) -> Event | None:
        """Returns what the caller does not have of an event; None if that is nothing. Raises
        Unavailable, which is not retryable, if the answer is not the one that was begun."""
        if event.HasField("echo"):
            had, self._has_echo = self._has_echo, True
            return None if had else event
        if event.HasField("seed"):
            self._seed = event.seed
        part = self._parts.setdefault(event.answer_index, _Answer())
        if event.HasField("commit"):
            return part.take_commit(event)
        if part.is_behind and event.HasField("finished"):
            raise Unavailable(_CHANGED, retryable=False)
        if part.is_behind or part.is_finished:
            return None
        part.is_finished = event.HasField("finished")
        return event


@dataclass(slots=True)
class _Answer:
    """The part of one answer that the caller has, and how far the present attempt has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty unless the request asks for them
    num_tokens: int = 0
    is_finished: bool = False
    text_at: int = 0  # characters
    tokens_at: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether the present attempt has not brought all that the caller has."""
        return self.text_at < len(self.text) or self.tokens_at < self.num_tokens

    def take_commit(self, event: Event) -> Event | None:
        """As `Resumption.take`."""
        commit = event.commit
        text = self.text[self.text_at : self.text_at + len(commit.text)]
        num_old = min(self.num_tokens - self.tokens_at, commit.num_tokens)
        ids = self.token_ids[self.tokens_at : self.tokens_at + num_old]
        if not commit.text.startswith(text) or commit.token_ids[: len(ids)] != ids:
            raise Unavailable(_CHANGED, retryable=False)
        was_behind = self.is_behind
        self.text += commit.text[len(text) :]
        self.token_ids += commit.token_ids[num_old:]
        self.num_tokens += commit.num_tokens - num_old
        self.text_at += len(commit.text)
        self.tokens_at += commit.num_tokens
        if not was_behind:
            return event
        is_new = len(text) < len(commit.text) or num_old < commit.num_tokens
        return _without(event, len(text), num_old) if is_new else None


def _without(event: Event, characters: int, tokens: int) -> Event:
    """The event without the beginning of its text and its tokens."""
    rest = Event()
    rest.CopyFrom(event)
    commit = rest.commit
    commit.text = commit.text[characters:]
    commit.token_offset += tokens
    commit.num_tokens -= tokens
    del commit.token_ids[:tokens], commit.logprobs[:tokens]
    return rest


def check_message(request: object) -> None:
    """Raises TypeError for another message, or none."""
    if not isinstance(request, pb.GenerateRequest):
        found = type(request).__name__
        raise TypeError(f"request: expected effuse.v1's GenerateRequest, got {found}")


class Stream:
    """The text of the first answer, piece by piece; `answer` is complete at the end."""

    def __init__(
        self,
        method: Method,
        request: pb.GenerateRequest,
        retries: Retries,
        waiter: Waiter,
    ) -> None:
        self._method, self._request = method, request
        self._retries, self._waiter = retries, waiter
        self._resumption, self._gathering = Resumption(), Gathering()
        self._answer: Answer | None = None
        self._call = self._begin()

    def _begin(self) -> grpc._CallIterator[Event]:
        asked = pb.GenerateStreamRequest(request=self._resumption.begin(self._request))
        retries = self._retries
        with raising(self._waiter.target):
            return self._method(asked, timeout=retries.left_s, metadata=retries.metadata)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none of them empty. Raises EffuseError and StreamBroken."""
        return filter(None, map(text_of, self.events()))

    def events(self) -> Iterator[Event]:
        """Every event, of all answers: text, ends, and what else the request asked for. Raises like
        iterating."""
        while self._answer is None:
            try:
                with raising(self._waiter.target):
                    for event in filter(None, map(self._resumption.take, self._call)):
                        self._gathering.take(event)
                        yield event
                self._answer = self._gathering.answer()
                return
            except EffuseError as error:
                if (pause_s := self._retries.pause_s(error)) is None:
                    self._call.cancel()
                    raise
            self._waiter.wait(pause_s)
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


class _Reading:
    """What a stream's reader waits for, which is an attempt or a pause, and the whole answer."""

    answer: Answer | None = None
    _waited: grpc.aio.Call | asyncio.Task[None] | None = None
    _is_over = False

    def wait_for(self, waited: grpc.aio.Call | asyncio.Task[None]) -> None:
        """Notes the next attempt or pause, and cancels it if the stream was closed."""
        self._waited = waited
        if self._is_over:
            waited.cancel()

    def end(self) -> None:
        self._is_over = True
        if self._waited is not None:
            self._waited.cancel()


class AsyncStream:
    """The same for asyncio: `await stream.answer` at the end. Closing it ends the request."""

    def __init__(
        self, begin: Begin, pause: Pause, request: pb.GenerateRequest, target: str
    ) -> None:
        """begin: called at the first awaited piece, in its event loop."""
        self._reading = _Reading()
        # It has no reference to this object, so that it ends with it when a loop is left.
        events = _events(begin, pause, request, target, self._reading)
        self._events = cast("AsyncGeneratorType[Event, None]", events)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """A piece of text, not empty. Raises EffuseError and StreamBroken."""
        while not (piece := text_of(await anext(self._events))):
            pass
        return piece

    def events(self) -> AsyncIterator[Event]:
        """Every event, as of `Stream`."""
        return self._events

    @property
    async def answer(self) -> Answer:
        """The whole answer; reads the rest of the stream first. Raises like iterating."""
        async for _ in self:
            pass
        if self._reading.answer is None:
            raise Cancelled("the stream was closed before its answer was complete")
        return self._reading.answer

    async def aclose(self) -> None:
        """Ends the request; the fleet immediately frees its resources. A task that reads the stream
        gets Cancelled."""
        self._reading.end()
        if not self._events.ag_running:  # else its reader ends it
            await self._events.aclose()


async def _events(
    begin: Begin, pause: Pause, request: pb.GenerateRequest, target: str, reading: _Reading
) -> AsyncGenerator[Event, None]:
    """The events of all attempts; `reading` has the whole answer at the end."""
    resumption, gathering = Resumption(), Gathering()
    method, retries = begin()
    while True:
        asked = pb.GenerateStreamRequest(request=resumption.begin(request))
        with raising(target):
            call = method(asked, timeout=retries.left_s, metadata=retries.metadata)
        reading.wait_for(call)
        try:
            with raising(target):
                async for event in call:
                    if (rest := resumption.take(event)) is not None:
                        gathering.take(rest)
                        yield rest
            reading.answer = gathering.answer()
            return
        except EffuseError as error:
            if (pause_s := retries.pause_s(error)) is None:
                raise
        finally:
            call.cancel()
        with raising(target):
            reading.wait_for(waited := pause(pause_s))
            await waited
