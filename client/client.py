"""Clients of a running fleet, blocking and for asyncio; both typed, and without torch.

Raise what `protos/errors.py` draws: InvalidRequest with every field that is wrong, Overloaded and
Unavailable with the time to wait, DeadlineExceeded, PeerLost where nobody answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, Self, cast

import grpc
import grpc.aio

from effuse.client.answer import Answer, Event, Gathering
from effuse.client.credentials import Credentials
from effuse.client.options import DEFAULT_TARGET, Options
from effuse.client.params import Params, Prompt, Text, make_request, make_tokenize_request
from effuse.protos.errors import Cancelled, from_rpc_error
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
        TLS. timeout_s: longest that a call takes which sets none
        itself, all of at most `max_attempts` together. tls: None is plain text, `TlsFiles()` trusts
        the system's authorities. token: for routers that ask for one. Connects at the first call.
        Raises ValueError, and OSError for certificates that cannot be used."""
        options = Options(timeout_s=timeout_s, max_attempts=max_attempts)
        credentials = Credentials(tls=tls, token=token)
        self._target, self._options = target, options
        self._channel = credentials.channel(target, options.channel_arguments())
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
        began, timeout = time.monotonic(), self._options.deadline_s(timeout_s)
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        with _raising(self._target):
            response = self._generation.Generate(request, timeout=timeout)
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
        timeout = self._options.deadline_s(timeout_s)
        return Stream(self._generation.GenerateStream(request, timeout=timeout), self._target)

    def cancel(self, request_id: str) -> bool:
        """Ends the request of this id, whoever asked for it; False where it did not run there.
        Raises EffuseError."""
        with _raising(self._target):
            response = self._generation.CancelRequest(
                generation_pb2.CancelRequestRequest(request_id=request_id),
                timeout=self._options.timeout_s,
            )
        return response.was_running

    def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The ids that a prompt would be. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        with _raising(self._target):
            response = self._models.Tokenize(request, timeout=self._options.timeout_s)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer of these ids would have. Raises EffuseError."""
        request = model_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        with _raising(self._target):
            response = self._models.Detokenize(request, timeout=self._options.timeout_s)
        return response.text

    def models(self) -> list[model_pb2.Model]:
        """What the fleet serves, with limits and defaults. Raises EffuseError."""
        with _raising(self._target):
            response = self._models.ListModels(
                model_pb2.ListModelsRequest(), timeout=self._options.timeout_s
            )
        return list(response.models)

    def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of their ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            with _raising(self._target):
                response = self._models.ListWorkers(request, timeout=self._options.timeout_s)
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
            with _raising(self._target):
                yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Ends the connection and what is still asked over it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Call(Protocol):
    """A stream of events that can be ended."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> object: ...


class Stream:
    """The text of one answer, the first of several, piece by piece; `answer` once it is over."""

    def __init__(self, call: Call, target: str) -> None:
        self._call = call
        self._target = target
        self._gathering = Gathering()
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none empty. Raises EffuseError, and StreamBroken."""
        with _raising(self._target):
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
        self._channel = credentials.aio_channel(target, options.channel_arguments())
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
        began, timeout = time.monotonic(), self._options.deadline_s(timeout_s)
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        with _raising(self._target):
            response = await self._generation.Generate(request, timeout=timeout)
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
        self, request: generation_pb2.GenerateStreamRequest, timeout: float
    ) -> AsyncGenerator[Event, None]:
        call = self._generation.GenerateStream(request, timeout=timeout)
        try:
            with _raising(self._target):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def cancel(self, request_id: str) -> bool:
        """Ends the request of this id, whoever asked for it; False where it did not run there.
        Raises EffuseError."""
        with _raising(self._target):
            response = await self._generation.CancelRequest(
                generation_pb2.CancelRequestRequest(request_id=request_id),
                timeout=self._options.timeout_s,
            )
        return response.was_running

    async def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The ids that a prompt would be. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        with _raising(self._target):
            response = await self._models.Tokenize(request, timeout=self._options.timeout_s)
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer of these ids would have. Raises EffuseError."""
        request = model_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        with _raising(self._target):
            response = await self._models.Detokenize(request, timeout=self._options.timeout_s)
        return response.text

    async def models(self) -> list[model_pb2.Model]:
        """What the fleet serves, with limits and defaults. Raises EffuseError."""
        with _raising(self._target):
            response = await self._models.ListModels(
                model_pb2.ListModelsRequest(), timeout=self._options.timeout_s
            )
        return list(response.models)

    async def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of their ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            with _raising(self._target):
                response = await self._models.ListWorkers(request, timeout=self._options.timeout_s)
            found += response.workers
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def close(self) -> None:
        """Ends the connection and what is still asked over it."""
        await self._channel.close()

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


@contextlib.contextmanager
def _raising(target: str) -> Iterator[None]:
    """Turns gRPC's errors, of both kinds of channel, into ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(cast("grpc.aio.AioRpcError", error), target) from error
    except asyncio.CancelledError as error:
        # A channel that is closed says of its calls what asyncio says of a task that is cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(f"the call to {target} was cancelled, as its client was closed") from error
