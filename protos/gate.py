"""The gate of every server: which calls it accepts, what callers see of exceptions, and the
services that each server has.

grpcio answers a request that does not parse, and any exception, with UNKNOWN and the exception's
text. Here such a request is INVALID_ARGUMENT, and an error of the tree (`errors.py`) becomes its
status. Any other exception is INTERNAL with a fixed text and an id under which the log has the
traceback. That id is the request's if there is one; it is in the trailing metadata of every error.
A call without the right credentials only gets UNAUTHENTICATED. Health checks and the proof of a
fleet's secret (`channels.py`) need none, because they reveal nothing.

Every server has reflection in both of its versions, and health. grpcio's package only has
reflection's v1alpha, which newer tools try second or not at all. Version 1 has the same messages
under another package, so its bytes are the same. The library's servicer answers both, and v1's
descriptors are made from those of v1alpha. grpcio's own health service keeps watches open while the
server drains, which would delay its end as long as a caller likes. This one ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from effuse.protos.errors import (
    DETAILS_KEY,
    REQUEST_ID_KEY,
    Bug,
    EffuseError,
    InvalidRequest,
    NotFound,
    NotSupported,
    Unauthenticated,
    to_status,
)

OPEN_SERVICES: Final = ("/grpc.health.v1.Health/", "/effuse.v1.ProofService/")
NEEDS_CREDENTIALS: Final = "this call needs credentials that this server accepts"
"""The whole answer to a refused caller, whatever is wrong."""

CALLER: Final[ContextVar[str]] = ContextVar("caller", default="")
"""The tenant of the call that is being answered; empty outside of calls."""


class Doorkeeper(Protocol):
    """Decides on one call."""

    def admit(self, shown: dict[str, str | bytes]) -> None:
        """Returns if the metadata of a call gives access; raises `Unauthenticated` otherwise."""


LOG: Final = logging.getLogger("effuse.rpc")

_Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"
_Deserializer: TypeAlias = Callable[[bytes], Message]
_Behaviour: TypeAlias = Callable[[object, _Context], object]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class InboundMessage:
    """A message on its way to its handler, or the number of bytes that are none.

    The library holds it as long as the call, which may be an hour, so the handler empties it."""

    __slots__ = ("_message",)

    def __init__(self, message: Message | int) -> None:
        self._message: Message | int | None = message

    def take(self) -> Message | None:
        message, self._message = self._message, None
        if isinstance(message, int):
            raise InvalidRequest.of(
                "",
                f"the {message} bytes received are not a valid protobuf message of this method "
                "(malformed encoding, or a string that is not UTF-8)",
            )
        return message


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
    deserialize = handler.request_deserializer
    return make(
        _guard(behaviour, take, method),
        request_deserializer=None if deserialize is None else _safe(deserialize),
        response_serializer=handler.response_serializer,
    )


def _refusing(error: Exception, method: str) -> _Handler:
    """Ends a call before its message is read, whatever kind its method is."""

    async def refuse(requests: object, context: _Context) -> None:
        await _abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSAL: Final = _refusing(Unauthenticated(NEEDS_CREDENTIALS), "")


def _behaviour_of(handler: _Handler) -> tuple[_Behaviour, Callable[..., _Handler]]:
    asks, answers = (
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    kind = f"{asks}_{answers}"
    return getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")


def _safe(deserialize: _Deserializer) -> Callable[[bytes], InboundMessage]:
    def safe(data: bytes) -> InboundMessage:
        try:
            return InboundMessage(deserialize(data))
        except (DecodeError, UnicodeDecodeError):
            return InboundMessage(len(data))

    return safe


def _guard_message(request: object) -> object:
    return request.take() if isinstance(request, InboundMessage) else request


async def _guard_stream(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    async for request in requests:
        yield _guard_message(request)


def _guard(
    behaviour: _Behaviour, take: Callable[[Any], object], method: str
) -> Callable[[object, _Context], Awaitable[object]]:
    async def guarded(request: object, context: _Context) -> object:
        try:
            answer = behaviour(take(request), context)
            if not isinstance(answer, AsyncIterator):
                return await cast(Awaitable[object], answer)
            async for response in answer:  # of a library's servicer
                await context.write(cast(Message, response))
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  the border: nothing may pass it unmapped
            await _abort(context, error, method)
        return None

    return guarded


async def _abort(context: _Context, error: Exception, method: str) -> None:
    if isinstance(error, NotImplementedError):  # a library's servicer that lacks a method
        error = NotSupported(f"this server has no method {method[:100]}")
    trailers = tuple(context.trailing_metadata() or ())
    request_id = next((str(value) for key, value in trailers if key == REQUEST_ID_KEY), "")
    if not request_id:
        request_id = secrets.token_hex(8)
        trailers += ((REQUEST_ID_KEY, request_id),)
    sent = error if isinstance(error, EffuseError) else Bug("")
    if isinstance(sent, Bug):
        LOG.error("%s failed, correlation id %s", method, request_id, exc_info=error)
        sent = Bug.logged(request_id, retryable=sent.retryable)
    status = to_status(sent)
    details = (DETAILS_KEY, status.SerializeToString())
    with contextlib.suppress(grpc.aio.InternalError):  # the call has ended already
        await context.abort(sent.code, status.message, (*trailers, details))


_AnyContext: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ALPHA: Final[str] = reflection.SERVICE_NAME
V1: Final = ALPHA.replace(".v1alpha.", ".v1.")
_V1_PACKAGE: Final = V1.rpartition(".")[0]
_V1_FILE: Final = f"{_V1_PACKAGE.replace('.', '/')}/reflection.proto"


def add_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Makes `server` describe `services`, given by their full names, and reflection itself."""
    names = [*services, V1, ALPHA]
    servicer = reflection.aio.ReflectionServicer(names, pool=SymbolPool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(V1, methods)])


class SymbolPool:
    """Finds descriptors for server reflection, including methods by their full name.

    The protocol needs methods (`package.Service.Method` is a symbol) and ghz asks for them; the
    default pool only knows files, messages, enums and services.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()
        self._v1 = _version_1()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Raises KeyError for an unknown name."""
        pool = self._v1 if symbol.startswith(f"{_V1_PACKAGE}.") else self._pool
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return pool.FindMethodByName(symbol).containing_service.file

    def FindFileByName(self, name: str) -> FileDescriptor:
        """Raises KeyError for a file that was never imported."""
        pool = self._v1 if name == _V1_FILE else self._pool
        return pool.FindFileByName(name)

    def __getattr__(self, name: str) -> Any:
        """Other searches are those of the default pool."""
        return getattr(self._pool, name)


def _version_1() -> descriptor_pool.DescriptorPool:
    """v1alpha's file under v1's names, in a separate pool, since other packages may add theirs."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.ClearField("options")
    file.name, file.package = _V1_FILE, _V1_PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
        method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio ships no types
    """One per server. Knows "" (the process answers) and the services given to `set`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Event()  # one for each change
        self._is_draining = False

    def set(self, service: str, *, serving: bool) -> None:
        """Sets whether `service` can work now; has no effect once the server drains."""
        status = _SERVING if serving else _NOT_SERVING
        if not self._is_draining and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._announce()

    def drain(self) -> None:
        """Sets NOT_SERVING for every service from now on, and ends every watch with that."""
        self._is_draining = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._announce()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _AnyContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service now; raises `NotFound` if there is no service of that name."""
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(f"this server has no service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: _AnyContext
    ) -> health_pb2.HealthListResponse:
        """The status of every service now. Called if grpcio-health-checking has it (since 1.82)."""
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status)
            for service, status in self._statuses.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _AnyContext) -> None:
        """The status of a service, now and after each change, until this server drains. It waits
        for changes without a deadline on purpose: the caller ends it.
        """
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            if self._is_draining:
                return
            await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
