"""OpenAI's HTTP API of a router: chats, completions, models, token ids and health.

Each call goes through the handler that gRPC's calls go through: the same checks, queue, retries,
tenants and texts. Not here: the meaning of bodies (`openai_requests.py`), the form of answers
(`openai_answers.py`), connections (`http_server.py`).
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from effuse.client.retries import REPEATED_KEY
from effuse.placement.records import ModelInfo
from effuse.protos.errors import REQUEST_ID_KEY, Bug, Cancelled, EffuseError, InvalidRequest
from effuse.router.client import (
    CANNOT_SERVE,
    STALLED_S,
    ClientGone,
    prompt_tokens_of,
    together,
)
from effuse.router.findings import shown
from effuse.router.handler import Serving
from effuse.router.openai_answers import Rendering, error_body, error_object, new_id, status_of
from effuse.router.openai_bodies import BodyReader
from effuse.router.openai_requests import Endpoint, Json
from effuse.router.request import Request
from effuse.router.router import Router
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
BODY_S: Final = 60.0
"""Longest that a client may take to send a body."""
JSON_TYPE: Final = "application/json"
HEALTH: Final = "/health"
"""Answers without a token."""
_ENDS_OF_LINES: Final = "\x85\u2028\u2029"
_GONE: Final = 499  # nginx's status of a client that has left, which is only counted
_RETRIED: Final = "x-stainless-retry-count"  # OpenAI's clients count what they send again


class HttpCall:
    """One call: its client's message, and the way back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = HttpRequest(scope, receive)
        self._receive = receive
        self._send = send
        self.request_id = new_id()
        self.has_begun = False  # whether the response's status was sent
        self.status = _GONE  # of the response; a client that has left gets none

    def time_remaining(self) -> float | None:
        """HTTP has no deadlines: a client that waits no longer closes its connection."""
        return None

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The headers, as gRPC's metadata; a call that a client sends again is marked as such."""
        headers = [(name, value) for name, value in self.request.headers.items()]
        is_again = self.request.headers.get(_RETRIED, "0") != "0"
        return [*headers, *([(REPEATED_KEY, "1")] if is_again else [])]

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Keeps the request's id for the response's headers."""
        self.request_id = dict(metadata)[REQUEST_ID_KEY]

    async def body(self, most_bytes: int) -> bytes:
        """What the client sent, of JSON's type. Raises HTTPException, and `Cancelled`."""
        headers = self.request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:  # which a web page of another origin cannot send unasked
            raise HTTPException(415, f"expected the header Content-Type: {JSON_TYPE}")
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise HTTPException(415, f"expected no Content-Encoding, got {shown(coding)}")
        pieces, num_bytes = [], 0
        announced = headers.get("content-length", "0")
        if int(announced) > most_bytes:  # before a client that waits for 100 Continue sends it
            raise _too_large(most_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in self.request.stream():
                    num_bytes += len(piece)
                    if num_bytes > most_bytes:
                        raise _too_large(most_bytes)
                    pieces.append(piece)
        except ClientDisconnect:
            raise Cancelled("the client closed the connection") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {BODY_S:g} s") from None
        return b"".join(pieces)

    async def gone(self) -> None:
        """Returns once the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a piece of a stream of events. Raises `ClientGone` if the client does not take it
        within `STALLED_S` seconds."""
        try:
            async with asyncio.timeout(STALLED_S):
                if not self.has_begun:
                    self.has_begun, self.status = True, 200
                    headers = [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),  # nginx would gather the stream
                        (REQUEST_ID_KEY.encode(), self.request_id.encode()),
                    ]
                    start = {"type": "http.response.start", "status": 200, "headers": headers}
                    await self._send(start)
                body = {"type": "http.response.body", "body": data, "more_body": not is_last}
                await self._send(body)
        except (TimeoutError, OSError) as error:
            raise ClientGone("the client reads nothing") from error

    async def respond(self, response: Response) -> None:
        self.has_begun, self.status = True, response.status_code
        response.headers[REQUEST_ID_KEY] = self.request_id
        await response(self.request.scope, self._receive, self._send)


Behaviour = Callable[[HttpCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Border:
    """One route. Whatever its behaviour raises becomes a response here, and is counted."""

    router: Router
    path: str
    behaviour: Behaviour

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call, in ASGI's form."""
        call = HttpCall(scope, receive, send)
        try:
            if self.path != HEALTH and self.router.keys is not None:
                self.router.keys.admit(dict(call.request.headers))
            await self.behaviour(call)
        except HTTPException as error:
            await call.respond(_http_error(call.request, error))
        except Exception as error:
            if not isinstance(error, EffuseError) or isinstance(error, Bug):
                correlation_id = secrets.token_hex(8)
                LOG.error("%s failed, correlation id %s", self.path, correlation_id, exc_info=error)
                error = Bug.logged(correlation_id)
            await _send_error(call, error)
        self.router.metrics.http.labels(self.path, str(call.status)).inc()


class OpenAiApi:
    """The application. One per router."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._catalogue = serving.router.seats.catalogue
        self._bodies = BodyReader(self._catalogue)
        self._most_bytes = serving.router.config.max_message_bytes
        routes: Mapping[tuple[str, str], Behaviour] = {
            ("POST", "/v1/chat/completions"): lambda call: self._generate(call, "chat"),
            ("POST", "/v1/completions"): lambda call: self._generate(call, "completion"),
            ("POST", "/v1/tokenize"): self._tokenize,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{name:path}"): self._model,
            ("GET", HEALTH): self._health,
        }
        self.app = Starlette(
            routes=[
                Route(path, _Border(serving.router, path, behaviour), methods=[method])
                for (method, path), behaviour in routes.items()
            ],
            exception_handlers={HTTPException: _http_error},
        )
        self.app.router.redirect_slashes = False

    async def _generate(self, call: HttpCall, endpoint: Endpoint) -> None:
        with self._serving.span(call):
            await _unless_gone(call, self._answer(call, await self._received(call), endpoint))

    async def _received(self, call: HttpCall) -> bytes:
        with self._serving.counting_refusals():
            return await call.body(self._most_bytes)

    async def _answer(self, call: HttpCall, body: bytes, endpoint: Endpoint) -> None:
        """Waits until the requests are accepted, and sends the answers."""
        with self._serving.counting_refusals():
            self._serving.router.quotas.check(self._serving.tenant())
            wanted = await self._bodies.read(body, endpoint)
        del body  # which may be large
        if len(wanted.requests) > 1:  # each is counted only once it runs
            count = wanted.num_answers * len(wanted.requests)
            with self._serving.counting_refusals():
                self._serving.router.quotas.check(self._serving.tenant(), count, "prompt")
        accepted = []
        for at, message in enumerate(wanted.requests):
            with wanted.in_its_words(at):
                one = await self._serving.accept(message, call, is_stream=wanted.is_stream)
            accepted.append(one)
        call.request_id = accepted[0].id  # which is also in the body
        rendering = Rendering(
            wanted, accepted[0].id, int(time.time()), self._serving.router.tokenizer,
            model=accepted[0].asked.model.name,
        )  # fmt: skip

        async def whole(prompt: int, request: Request) -> pb.GenerateResponse:
            with wanted.in_its_words(prompt):
                return await self._serving.answer_accepted(request)

        if not wanted.is_stream:
            answers = await together([whole(at, request) for at, request in enumerate(accepted)])
            await call.respond(_json(rendering.whole(answers)))
            return

        async def stream(prompt: int, request: Request) -> None:
            async def send(event: pb.GenerateStreamResponse) -> None:
                tokens = prompt_tokens_of(request)
                if data := b"".join(map(_event, rendering.chunks(prompt, event, tokens))):
                    await call.write(data)

            with wanted.in_its_words(prompt):
                await send(await self._serving.serve(request, send))

        await together([stream(at, request) for at, request in enumerate(accepted)])
        last = rendering.last_chunk()
        usage = b"" if last is None else _event(last)
        await call.write(usage + b"data: [DONE]\n\n", is_last=True)

    async def _tokenize(self, call: HttpCall) -> None:
        body = await call.body(self._most_bytes)
        await _unless_gone(call, self._answer_ids(call, body))

    async def _answer_ids(self, call: HttpCall, body: bytes) -> None:
        wanted = await self._bodies.read(body)
        (asked, *more) = wanted.requests
        if more or asked.HasField("prompt_token_ids"):
            raise InvalidRequest.of("prompt", "expected one string, got another type")
        with wanted.in_its_words():
            token_ids, model = await self._serving.tokenize(asked)
        fields = {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
        }
        await call.respond(_json(fields))

    async def _models(self, call: HttpCall) -> None:
        models = sorted(self._catalogue.live().values(), key=lambda model: model.name)
        await call.respond(_json({"object": "list", "data": list(map(_describe, models))}))

    async def _model(self, call: HttpCall) -> None:
        model = self._catalogue.find(call.request.path_params["name"])
        await call.respond(_json(_describe(model)))

    async def _health(self, call: HttpCall) -> None:
        can_serve = self._serving.router.seats.can_serve()
        status = "ok" if can_serve else CANNOT_SERVE
        await call.respond(_json({"status": status}, status=200 if can_serve else 503))


def _describe(model: ModelInfo) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,  # not known
        "owned_by": "effuse",
        "max_model_len": model.max_model_len,
    }


async def _unless_gone(call: HttpCall, answering: Awaitable[None]) -> None:
    """Returns once the call is answered, or raises `Cancelled` once its client has gone. Its
    deadline is the handler's."""
    work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(call.gone())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            raise Cancelled("the client closed the connection")
        work.result()
    except ClientGone as error:
        raise Cancelled("the client cancelled") from error
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _send_error(call: HttpCall, error: EffuseError) -> None:
    """Sends an error: as the response, or behind what was streamed. A client that has gone reads
    neither."""
    if isinstance(error, Cancelled):
        call.status = _GONE
        return
    if call.has_begun:
        call.status = int(status_of(error))
        try:
            await call.write(_event(error_body(error)), is_last=True)
        except ClientGone:
            LOG.debug("no client reads how %s ended", call.request_id)
        return
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    await call.respond(_json(error_body(error), status=int(status_of(error)), headers=headers))


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"expected a body of at most {most_bytes} bytes")


def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        message = (
            f"expected a route of this server, got {shown(f'{request.method} {request.url.path}')}"
        )
    headers = {**(error.headers or {}), REQUEST_ID_KEY: new_id()}  # a route has its call's id
    return _json(error_object(message), status=error.status_code, headers=headers)


def _json(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    data = msgspec.json.encode(value)
    return Response(data, status, headers=headers, media_type=JSON_TYPE)


def _event(value: object) -> bytes:
    """Without the characters that some clients, but not the standard of events, take for the end of
    a line. Within JSON they only occur in strings."""
    data = msgspec.json.encode(value)
    for end in _ENDS_OF_LINES:
        data = data.replace(end.encode(), b"\\u%04x" % ord(end))
    return b"data: " + data + b"\n\n"
