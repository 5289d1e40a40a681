"""Clients of a running fleet, blocking and for asyncio; both are typed and need no torch.

They raise the exceptions of `protos/errors.py`: InvalidRequest with every wrong field, Overloaded
and Unavailable with the time to wait, DeadlineExceeded, and PeerLost if no router answered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Self, TypeVar

import grpc
import grpc.aio

from effuse.client.answer import Answer
from effuse.client.credentials import Credentials
from effuse.client.params import (
    Params,
    Prompt,
    Text,
    check_text,
    ids_of,
    make_request,
    make_tokenize_request,
)
from effuse.client.retries import (
    DEFAULT_TARGET,
    Options,
    Retries,
    Waiter,
    closed,
    end_polls,
    raising,
    seconds_of,
    wait,
)
from effuse.client.streams import AsyncMethod, AsyncStream, Stream, check_message
from effuse.config.decoding import SettingError
from effuse.protos.channels import generation_stub, model_stub
from effuse.protos.errors import EffuseError
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
    """A client of one router; threads may share it. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = 120.0,
        max_attempts: int = 4,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """target: host:port of a router; http://host:port is the same, and https://host:port uses
        TLS. timeout_s: time limit of a call that sets none. It covers all of its at most
        `max_attempts` attempts, which span 10 s and more. tls: None is plain text, `TlsFiles()`
        trusts the system's authorities. token: for routers that require one. Connects at the first
        call. Raises ValueError, and OSError for certificates that cannot be used.
        """
        credentials = Credentials(tls=tls, token=token)
        shown = credentials.metadata()
        options = Options(timeout_s=timeout_s, max_attempts=max_attempts, shown=shown)
        self._target, self._options = target, options
        self._channel = credentials.channel(target, options.channel_arguments(target))
        self._is_closed, self._changed = threading.Event(), threading.Condition()
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
        """The whole answer to one prompt, including token ids. Raises EffuseError."""
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
        """The answer as a stream: iterate for its text, block by block."""
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        return self.stream_of(request, timeout_s=timeout_s)

    def stream_of(
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> Stream:
        """The same for a message, which may also ask for drafts and for the prompt's progress."""
        check_message(request)
        retries = self._options.retries(timeout_s)
        return Stream(self._generation.GenerateStream, request, retries, self._waiter())

    def cancel(self, request_id: str) -> bool:
        """Cancels a request by its id. False if it has ended, or runs at another router. Raises
        EffuseError, which is NotFound if no router knows the id.
        """
        check_text("request_id", request_id)
        request = generation_pb2.CancelRequestRequest(request_id=request_id)
        response = self._ask(self._generation.CancelRequest, request)
        return response.was_running

    def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The token ids of a prompt. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        response = self._ask(self._models.Tokenize, request)
        return tuple(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer with these ids would have. Raises EffuseError."""
        if model is not None:
            check_text("model", model)
        request = model_pb2.DetokenizeRequest(token_ids=ids_of("token_ids", token_ids), model=model)
        response = self._ask(self._models.Detokenize, request)
        return response.text

    def models(self) -> list[model_pb2.Model]:
        """The fleet's models, with limits and defaults. Raises EffuseError."""
        response = self._ask(self._models.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            response = self._ask(self._models.ListWorkers, request)
            found += response.workers
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    def plans(self) -> list[monitor_pb2.ModelPlan]:
        """How many workers should prefill and decode, for each model. Raises EffuseError."""
        return list(self._ask(self._monitor.GetPlan, monitor_pb2.GetPlanRequest()).plans)

    def watch_requests(
        self, interval_s: float = 0.25
    ) -> Generator[monitor_pb2.WatchRequestsResponse, None, None]:
        """The requests that wait or run at the router, every `interval_s` seconds, until it drains,
        for an hour at most. Raises EffuseError, and ValueError for an interval that is no number.
        """
        if not 0.05 <= (seconds := seconds_of(interval_s)) <= 60:
            raise SettingError("interval_s", "seconds from 0.05 to 60", repr(interval_s))
        request = monitor_pb2.WatchRequestsRequest(interval=timedelta(seconds=seconds))
        shown = self._options.shown
        with raising(self._target):
            call = self._monitor.WatchRequests(request, timeout=_MOST_WATCHED_S, metadata=shown)
            try:
                yield from call
            finally:
                call.cancel()

    def close(self) -> None:
        """Closes the connection and ends the calls on it."""
        with self._changed:
            self._is_closed.set()
            self._changed.notify_all()
        end_polls(self._channel)
        self._channel.close()

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        retries: Retries | None = None,
    ) -> Response:
        """The answer to one call, after as many attempts as needed. Raises EffuseError."""
        retries, waiter = retries or self._options.retries(None), self._waiter()
        while True:
            try:
                with raising(self._target):
                    return method(request, timeout=retries.left_s, metadata=retries.metadata)
            except EffuseError as error:
                if (pause_s := retries.pause_s(error)) is None:
                    raise
            waiter.wait(pause_s)

    def _waiter(self) -> Waiter:
        return Waiter(self._channel, self._target, self._is_closed, self._changed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Opened:
    """A channel with its stubs."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.generation, self.models = generation_stub(channel), model_stub(channel)
        self.pauses = set[asyncio.Task[None]]()


class AsyncClient:
    """The same for asyncio, without `plans` and `watch_requests`.

    It belongs to the first event loop that uses it; calls in another loop raise RuntimeError.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = 120.0,
        max_attempts: int = 4,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        """As in Client. Raises ValueError and OSError."""
        credentials = Credentials(tls=tls, token=token)
        shown = credentials.metadata()
        options = Options(timeout_s=timeout_s, max_attempts=max_attempts, shown=shown)
        self._target, self._options = target, options
        self._open = credentials.aio_opener(target, options.channel_arguments(target))
        self._opened: tuple[asyncio.AbstractEventLoop, _Opened] | None = None
        self._is_closed = False

    def _router(self) -> _Opened:
        """The channel, which belongs to the first event loop that uses it. Raises RuntimeError in
        another one, and Cancelled once it is closed."""
        if self._is_closed:
            raise closed(self._target)
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._opened = loop, _Opened(self._open())
        if loop is not self._opened[0]:
            raise RuntimeError(
                "this client belongs to the first event loop that used it; make another client for "
                "each further loop"
            )
        return self._opened[1]

    async def generate(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """The whole answer to one prompt, including token ids. Raises EffuseError."""
        began, retries = time.monotonic(), self._options.retries(timeout_s)
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        response = await self._ask(self._router().generation.Generate, request, retries)
        return Answer.of(response, time.monotonic() - began)

    def stream(
        self,
        prompt: Prompt,
        params: Params = _DEFAULTS,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncStream:
        """The answer as a stream: iterate for its text. Begins at the first awaited piece."""
        request = make_request(prompt, params, request_id=request_id, token_ids=True)
        return self.stream_of(request, timeout_s=timeout_s)

    def stream_of(
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncStream:
        """The same for a message, as of Client."""
        check_message(request)
        limit_s = self._options.deadline_s(timeout_s)

        def begin() -> tuple[AsyncMethod, Retries]:
            return self._router().generation.GenerateStream, self._options.retries(limit_s)

        return AsyncStream(begin, self._pause, request, self._target)

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request by its id. False if it has ended, or runs at another router. Raises
        EffuseError, which is NotFound if no router knows the id.
        """
        check_text("request_id", request_id)
        request = generation_pb2.CancelRequestRequest(request_id=request_id)
        response = await self._ask(self._router().generation.CancelRequest, request)
        return response.was_running

    async def tokenize(
        self, prompt: Text, *, model: str | None = None, parse_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The token ids of a prompt. Raises EffuseError."""
        request = make_tokenize_request(prompt, model, parse_special_tokens)
        response = await self._ask(self._router().models.Tokenize, request)
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text that an answer with these ids would have. Raises EffuseError."""
        if model is not None:
            check_text("model", model)
        request = model_pb2.DetokenizeRequest(token_ids=ids_of("token_ids", token_ids), model=model)
        response = await self._ask(self._router().models.Detokenize, request)
        return response.text

    async def models(self) -> list[model_pb2.Model]:
        """The fleet's models, with limits and defaults. Raises EffuseError."""
        response = await self._ask(self._router().models.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    async def workers(self) -> list[model_pb2.Worker]:
        """Every live worker, in the order of ids, with load and links. Raises EffuseError."""
        found: list[model_pb2.Worker] = []
        request = model_pb2.ListWorkersRequest()
        while True:
            response = await self._ask(self._router().models.ListWorkers, request)
            found += response.workers
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def close(self) -> None:
        """Closes the connection and ends the calls on it."""
        opened = None if self._is_closed or self._opened is None else self._router()
        self._is_closed = True
        if opened is not None:
            for pause in opened.pauses:
                pause.cancel()
            await opened.channel.close()

    async def _ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        retries: Retries | None = None,
    ) -> Response:
        """The answer to one call, after as many attempts as needed. Raises EffuseError."""
        retries = retries or self._options.retries(None)
        while True:
            try:
                with raising(self._target):
                    return await method(request, timeout=retries.left_s, metadata=retries.metadata)
            except EffuseError as error:
                if (pause_s := retries.pause_s(error)) is None:
                    raise
            with raising(self._target):
                await self._pause(pause_s)

    def _pause(self, pause_s: float) -> asyncio.Task[None]:
        """Ends when the next attempt is due; closing the client cancels it. Raises Cancelled."""
        opened = self._router()
        pause = asyncio.create_task(wait(opened.channel, pause_s))
        opened.pauses.add(pause)
        pause.add_done_callback(opened.pauses.discard)
        return pause

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
