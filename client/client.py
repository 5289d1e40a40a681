"""Clients of a running fleet, blocking and for asyncio; both typed, and without torch.

Raise what `protos/errors.py` draws: InvalidRequest with every field that is wrong, Overloaded and
Unavailable with the time to wait, DeadlineExceeded, PeerLost where nobody answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from datetime import timedelta
from typing import Self, TypeVar

import grpc
import grpc.aio

from effuse.client.answer import Answer, Event, Gathering
from effuse.client.credentials import Credentials
from effuse.client.options import DEFAULT_TARGET, Options
from effuse.client.params import Params, Prompt, Text, ids_of, make_request, make_tokenize_request
from effuse.client.retries import Call, RepeatedStream, Retries, Waiter, raising, wait
from effuse.protos.errors import Cancelled, EffuseError
from effuse.protos.stubs import generation_stub, model_stub
from effuse.protos.tls import TlsFiles
from effuse.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
)

Request = TypeVar("Request")
Response = TypeVar("Response")

_DEFAULTS = Params()
_MOST_WATCHED_S = 3600.0


class Client:
    """Asks one router; may be shared by threads. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = 120.0,
        max_attempts: int = 4,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """target: host:port of a router; http://host:port is the same, and https://host:port speaks
        TLS. timeout_s: longest that a call takes which sets none itself, all of at most
        `max_attempts` together, which span 10 s and more. tls: None is plain text, `TlsFiles()`
        trusts the system's authorities. token: for routers that ask for one. Connects at the first
        call.
        Raises ValueError, and OSError for certificates that cannot be used."""
        options = Options(timeout_s=timeout_s, max_attempts=max_attempts)
        credentials = Credentials(tls=tls, token=token)
        self._target, self._options = target, options
        self._channel = credentials.channel(target, options.channel_arguments(target))
        self._is_closed = threading.Event()
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._monitor = monitor_pb2_grpc.MonitorServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """The whole answer to one prompt, token ids included. Raises EffuseError."""
        began, retries = time.monotonic(), self._options.retries(timeout_s)
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        response = self._ask(self._generation.Generate, request, retries)
        return Answer.of(response, time.monotonic() - began)

    def stream(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Stream:
        """The answer as it is written: iterate for its text, block by block."""
        request = _streamed(prompt, params, request_id)
        retries = self._options.retries(timeout_s)

        def begin() -> Call:
            return self._generation.GenerateStream(
                request, timeout=retries.left_s, metadata=retries.metadata
            )

        return Stream(RepeatedStream(begin, retries, Waiter(self._channel), self._target))

    def cancel(self, request_id: str) -> bool:
        """Ends the request of this id, whoever asked for it; False where it did not run there.
        Raises EffuseError."""
        request = generation_pb2.CancelRequestRequest(request_id=request_id)
        response = self._ask(self._generation.CancelRequest, request)
        return response.was_running

    def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The ids that a prompt would be. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        response = self._ask(self._models.Tokenize, request)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer of these ids would have. Raises EffuseError."""
        request = model_pb2.DetokenizeRequest(token_ids=ids_of("token_ids", token_ids), model=model)
        response = self._ask(self._models.Detokenize, request)
        return response.text

    def models(self) -> list[model_pb2.Model]:
        """What the fleet serves, with limits and defaults. Raises EffuseError."""
        response = self._ask(self._models.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of their ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            response = self._ask(self._models.ListWorkers, request)
            found += response.workers
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    def watch_requests(
        self, interval_s: float = 0.25
    ) -> Generator[monitor_pb2.WatchRequestsResponse, None, None]:
        """What is queued and runs at the router, every `interval_s` seconds, until it drains, for
        an hour at most. Raises EffuseError."""
        request = monitor_pb2.WatchRequestsRequest(interval=timedelta(seconds=interval_s))
        call = self._monitor.WatchRequests(request, timeout=_MOST_WATCHED_S)
        try:
            with raising(self._target):
                yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Ends the connection and what is still asked over it."""
        self._is_closed.set()
        self._channel.close()

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        retries: Retries | None = None,
    ) -> Response:
        """The answer to one call, in as many attempts as it takes. Raises EffuseError."""
        retries = retries or self._options.retries(None)
        while True:
            try:
                with raising(self._target):
                    return method(request, timeout=retries.left_s, metadata=retries.metadata)
            except EffuseError as error:
                pause_s = None if self._is_closed.is_set() else retries.pause_s(error)
                if pause_s is None:
                    raise
            Waiter(self._channel).wait(pause_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Stream:
    """The text of one answer, the first of several, piece by piece; `answer` once it is over."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._gathering = Gathering()
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none empty. Raises EffuseError, and StreamBroken."""
        for event in self._call:
            if piece := self._gathering.take(event):
                yield piece
        self._answer = self._gathering.answer()

    @property
    def answer(self) -> Answer:
        """The whole answer; reads what is left of the stream first. Raises as iterating does."""
        if self._answer is None:
            for _ in self:
                pass
        assert self._answer is not None, "the stream was read to its end"
        return self._answer

    def cancel(self) -> None:
        """Ends the request; the fleet frees what it holds at once."""
        self._call.cancel()


class AsyncStream:
    """The same for asyncio: `await stream.answer` once it is over. Ending it ends the request."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._answers: list[Answer] = []
        # It does not refer to this object, so that it ends with it: when a loop is left.
        self._pieces = _pieces(events, self._answers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """A piece of text, not empty. Raises EffuseError, and StreamBroken."""
        return await anext(self._pieces)

    @property
    async def answer(self) -> Answer:
        """The whole answer; reads what is left of the stream first. Raises as iterating does."""
        async for _ in self:
            pass
        if not self._answers:
            raise Cancelled("the stream was ended before its answer was complete")
        return self._answers[0]

    async def aclose(self) -> None:
        """Ends the request; the fleet frees what it holds at once."""
        await self._pieces.aclose()


class AsyncClient:
    """The same for asyncio. Belongs to the event loop that uses it first; in another one its calls
    raise RuntimeError."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = 120.0,
        max_attempts: int = 4,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """As Client's. Raises ValueError and OSError."""
        options = Options(timeout_s=timeout_s, max_attempts=max_attempts)
        credentials = Credentials(tls=tls, token=token)
        self._target, self._options = target, options
        self._channel = credentials.aio_channel(target, options.channel_arguments(target))
        self._generation = generation_stub(self._channel)
        self._models = model_stub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """The whole answer to one prompt, token ids included. Raises EffuseError."""
        began, retries = time.monotonic(), self._options.retries(timeout_s)
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        response = await self._ask(self._generation.Generate, request, retries)
        return Answer.of(response, time.monotonic() - began)

    def stream(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncStream:
        """The answer as it is written: iterate for its text, block by block. Begins at the first
        piece that is awaited."""
        request = _streamed(prompt, params, request_id)
        return AsyncStream(self._events(request, self._options.deadline_s(timeout_s)))

    async def _events(
        self, request: generation_pb2.GenerateStreamRequest, timeout_s: float
    ) -> AsyncGenerator[Event, None]:
        """The events of a stream that is begun anew as long as it has brought none."""
        has_begun, retries = False, self._options.retries(timeout_s)
        while True:
            call = self._generation.GenerateStream(
                request, timeout=retries.left_s, metadata=retries.metadata
            )
            try:
                with raising(self._target):
                    async for event in call:
                        has_begun = True
                        yield event
                return
            except EffuseError as error:
                pause_s = None if has_begun else retries.pause_s(error)
                if pause_s is None:
                    raise
            finally:
                call.cancel()
            await wait(self._channel, pause_s)

    async def cancel(self, request_id: str) -> bool:
        """Ends the request of this id, whoever asked for it; False where it did not run there.
        Raises EffuseError."""
        request = generation_pb2.CancelRequestRequest(request_id=request_id)
        response = await self._ask(self._generation.CancelRequest, request)
        return response.was_running

    async def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The ids that a prompt would be. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        response = await self._ask(self._models.Tokenize, request)
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer of these ids would have. Raises EffuseError."""
        request = model_pb2.DetokenizeRequest(token_ids=ids_of("token_ids", token_ids), model=model)
        response = await self._ask(self._models.Detokenize, request)
        return response.text

    async def models(self) -> list[model_pb2.Model]:
        """What the fleet serves, with limits and defaults. Raises EffuseError."""
        response = await self._ask(self._models.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    async def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of their ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            response = await self._ask(self._models.ListWorkers, request)
            found += response.workers
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def close(self) -> None:
        """Ends the connection and what is still asked over it."""
        await self._channel.close()

    async def _ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        retries: Retries | None = None,
    ) -> Response:
        """The answer to one call, in as many attempts as it takes. Raises EffuseError."""
        retries = retries or self._options.retries(None)
        while True:
            try:
                with raising(self._target):
                    return await method(request, timeout=retries.left_s, metadata=retries.metadata)
            except EffuseError as error:
                if (pause_s := retries.pause_s(error)) is None:
                    raise
            await wait(self._channel, pause_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _pieces(
    events: AsyncGenerator[Event, None], answers: list[Answer]
) -> AsyncGenerator[str, None]:
    """The text of these events, piece by piece; the whole answer is added to `answers`."""
    gathering = Gathering()
    async with contextlib.aclosing(events):
        async for event in events:
            if piece := gathering.take(event):
                yield piece
    answers.append(gathering.answer())


def _streamed(
    prompt: Prompt, params: Params, request_id: str | None
) -> generation_pb2.GenerateStreamRequest:
    request = make_request(prompt, params, request_id=request_id, token_ids=True)
    return generation_pb2.GenerateStreamRequest(request=request)
