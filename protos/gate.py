"""The gate of every server: which calls it accepts, and what callers see of exceptions.

grpcio answers a request that does not parse, and any exception, with UNKNOWN and the exception's
text. Here such a request is INVALID_ARGUMENT, and an error of the tree (`errors.py`) becomes its
status. Any other exception is INTERNAL with a fixed text and an id under which the log has the
traceback. That id is the request's if there is one; it is in the trailing metadata of every error.

A call without the right credentials only gets UNAUTHENTICATED. Between a fleet's processes it
carries a digest of their secret and of the address that it goes to, so that a process that listens
there learns nothing that opens another one. Before the first call, the callee proves that it knows
the secret by a digest of a fresh nonce and its own address. A stranger cannot forward that question
to a real process. Against an attacker who reads or changes traffic only TLS helps. Health checks
and that proof need no credentials, because they reveal nothing.
"""

from __future__ import annotations

import hmac
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from effuse.protos.errors import (
    DETAILS_KEY,
    REQUEST_ID_KEY,
    Bug,
    EffuseError,
    InvalidRequest,
    NotSupported,
    Unauthenticated,
    to_status,
)
from effuse.v1 import proof_pb2 as pb
from effuse.v1 import proof_pb2_grpc as pb_grpc

TOKEN_KEY: Final = "effuse-fleet-token"
"""Metadata under which a call carries its digest."""
LEAST_BYTES: Final = 16
MOST_BYTES: Final = 4096
NONCE_BYTES: Final = 32
OPEN_SERVICES: Final = ("/grpc.health.v1.Health/", "/effuse.v1.ProofService/")
TOLD: Final = "this call needs credentials that this server accepts"
"""The whole answer to a refused caller, whatever is wrong."""

_LONGEST_NONCE: Final = 64

_ProveContext: TypeAlias = "grpc.aio.ServicerContext[pb.ProveRequest, pb.ProveResponse]"

CALLER: Final[ContextVar[str]] = ContextVar("caller", default="")
"""The tenant of the call that is being answered; empty outside of calls."""


class FleetSecret:
    """The secret, which is never printed."""

    def __init__(self, secret: bytes) -> None:
        """Raises OSError if the file is too short or too long."""
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise OSError(
                f"--fleet-secret: expected {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
            )
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> FleetSecret:
        """The content of a file without surrounding white space. Raises OSError."""
        return cls(path.read_bytes().strip())

    @staticmethod
    def make(path: Path) -> None:
        """Writes a new secret into a file that only its owner may read."""
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32))

    def token(self, address: str) -> str:
        """The token of a call to the process announced as `address` ("host:port")."""
        return self.derive("call", address.encode()).hex()

    def proof(self, address: str, nonce: bytes) -> bytes:
        """The answer of the process announced as `address` to a nonce."""
        return self.derive("proof", nonce, address.encode())

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes derived from the secret for one purpose; only its owners can compute them."""
        told = b"".join(len(one).to_bytes(4, "big") + one for one in (purpose.encode(), *parts))
        return hmac.digest(self._secret, told, "sha256")


class Doorkeeper(Protocol):
    """Decides on one call."""

    def admit(self, shown: dict[str, str | bytes]) -> None:
        """Returns if the metadata of a call gives access; raises `Unauthenticated` otherwise."""


class FleetOnly:
    """Accepts calls with the fleet's secret for the process announced as `address()`."""

    def __init__(self, secret: FleetSecret, address: Callable[[], str]) -> None:
        self._secret = secret
        self._address = address

    def admit(self, shown: dict[str, str | bytes]) -> None:
        """Raises `Unauthenticated`."""
        token, address = shown.get(TOKEN_KEY), self._address()
        if not (isinstance(token, str) and address and token.isascii()):
            raise Unauthenticated(TOLD)
        if not hmac.compare_digest(token, self._secret.token(address)):
            raise Unauthenticated(TOLD)


class ProofServicer(pb_grpc.ProofServiceServicer):
    """Proves for the process whose announced address is `address()`."""

    def __init__(self, secret: FleetSecret, address: Callable[[], str]) -> None:
        self._secret = secret
        self._address = address

    async def Prove(self, request: pb.ProveRequest, context: _ProveContext) -> pb.ProveResponse:
        """The proof; raises `InvalidRequest` for a nonce of another form."""
        if not LEAST_BYTES <= len(request.nonce) <= _LONGEST_NONCE:
            expected = f"expected {LEAST_BYTES} to {_LONGEST_NONCE} bytes"
            raise InvalidRequest.of("nonce", f"{expected}, got {len(request.nonce)}")
        return pb.ProveResponse(digest=self._secret.proof(self._address(), request.nonce))


LOG: Final = logging.getLogger("effuse.rpc")

_Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"
_Deserializer: TypeAlias = Callable[[bytes], Message]
_Behaviour: TypeAlias = Callable[[object, _Context], object]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Replaces a request whose bytes are not a message of the method."""

    num_bytes: int

    def error(self) -> InvalidRequest:
        """The message to the caller."""
        return InvalidRequest.of(
            "",
            f"the {self.num_bytes} bytes received are not a valid protobuf message of this method "
            "(malformed encoding, or a string that is not UTF-8)",
        )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Comes before all handlers of a server, including those found by name. Wraps each once; later
    calls find it in a table."""

    def __init__(self, doorkeeper: Doorkeeper | None = None) -> None:
        """doorkeeper: decides about access; None accepts every caller."""
        self._doorkeeper = doorkeeper
        self._wrapped: dict[str, _Handler] = {}
        self.num_calls = 0
        """Calls accepted so far."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        """Returns the wrapped handler of the method, or one that refuses it."""
        self.num_calls += 1
        method = str(handler_call_details.method)
        if self._doorkeeper is not None and not method.startswith(OPEN_SERVICES):
            try:
                self._doorkeeper.admit(dict(handler_call_details.invocation_metadata or ()))
            except Unauthenticated:
                return cast("grpc.RpcMethodHandler[_Request, _Response]", _REFUSAL)
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # not kept, because callers may invent any number of names
                refusal = _refusing(NotImplementedError(), method)
                return cast("grpc.RpcMethodHandler[_Request, _Response]", refusal)
            self._wrapped[method] = _wrap(cast(_Handler, handler), method)
        return cast("grpc.RpcMethodHandler[_Request, _Response]", self._wrapped[method])


def _wrap(handler: _Handler, method: str) -> _Handler:
    behaviour, make = _behaviour_of(handler)
    take: Callable[[Any], object] = _guard_stream if handler.request_streaming else _guard_message
    guard = _guard_generator if inspect.isasyncgenfunction(behaviour) else _guard_coroutine
    deserialize = handler.request_deserializer
    return make(
        guard(behaviour, take, method),
        request_deserializer=None if deserialize is None else _safe(deserialize),
        response_serializer=handler.response_serializer,
    )


def _refusing(error: Exception, method: str) -> _Handler:
    """Ends a call before its message is read, whatever kind its method is."""

    async def refuse(requests: object, context: _Context) -> None:
        await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSAL: Final = _refusing(Unauthenticated(TOLD), "")


def _behaviour_of(handler: _Handler) -> tuple[_Behaviour, Callable[..., _Handler]]:
    asks, answers = (
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    kind = f"{asks}_{answers}"
    return getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")


def _safe(deserialize: _Deserializer) -> Callable[[bytes], Message | Malformed]:
    def safe(data: bytes) -> Message | Malformed:
        try:
            return deserialize(data)
        except (DecodeError, UnicodeDecodeError):
            return Malformed(len(data))

    return safe


def _guard_message(request: object) -> object:
    if isinstance(request, Malformed):
        raise request.error()
    return request


async def _guard_stream(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    async for request in requests:
        yield _guard_message(request)


def _guard_coroutine(
    behaviour: _Behaviour, take: Callable[[Any], object], method: str
) -> Callable[[object, _Context], Awaitable[object]]:
    async def guarded(request: object, context: _Context) -> object:
        try:
            return await cast(Awaitable[object], behaviour(take(request), context))
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  the border: nothing may pass it unmapped
            await _abort(context, error, method)
            return None

    return guarded


def _guard_generator(
    behaviour: _Behaviour, take: Callable[[Any], object], method: str
) -> Callable[[object, _Context], AsyncIterator[object]]:
    async def guarded(request: object, context: _Context) -> AsyncIterator[object]:
        try:
            async for response in cast(AsyncIterator[object], behaviour(take(request), context)):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  the border: nothing may pass it unmapped
            await _abort(context, error, method)

    return guarded


async def _abort(context: _Context, error: Exception, method: str) -> None:
    if isinstance(error, NotImplementedError):  # a library's servicer that lacks a method
        error = NotSupported(f"this server has no method {method[:100]}")
    trailers = tuple(context.trailing_metadata() or ())
    request_id = next((str(value) for key, value in trailers if key == REQUEST_ID_KEY), "")
    if not request_id:
        request_id = secrets.token_hex(8)
        trailers += ((REQUEST_ID_KEY, request_id),)
    told = error if isinstance(error, EffuseError) else Bug("")
    if isinstance(told, Bug):
        LOG.error("%s failed, correlation id %s", method, request_id, exc_info=error)
        told = Bug.told(request_id, retryable=told.retryable)
    status = to_status(told)
    details = (DETAILS_KEY, status.SerializeToString())
    await context.abort(told.code, status.message, (*trailers, details))
