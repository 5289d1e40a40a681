"""Who may call a server: each call shows what it has, and is let in or told UNAUTHENTICATED alone.

Health is open, and so is the proof of belonging, which gives nothing away. Not here: what callers
show (`fleet_secret.py`), certificates (`tls.py`).
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Final, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from effuse.protos.errors import DETAILS_KEY, InvalidRequest, Unauthenticated, to_status
from effuse.protos.fleet_secret import LEAST_BYTES, TOKEN_KEY, FleetSecret
from effuse.v1 import proof_pb2 as pb
from effuse.v1 import proof_pb2_grpc as pb_grpc

OPEN_SERVICES: Final = ("/grpc.health.v1.Health/", "/effuse.v1.ProofService/")
TOLD: Final = "this call needs credentials that are known here"
"""All that a refused caller hears, whatever is wrong."""

_LONGEST_NONCE: Final = 64

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_ProveContext: TypeAlias = "grpc.aio.ServicerContext[pb.ProveRequest, pb.ProveResponse]"

CALLER: Final[ContextVar[str]] = ContextVar("caller", default="")
"""Whose call it is that is being answered; empty where nobody asks."""


class Doorkeeper(Protocol):
    """Decides on one call."""

    def admit(self, shown: dict[str, str | bytes]) -> None:
        """Returns where the metadata of a call lets it in; raises `Unauthenticated`."""


class FleetOnly:
    """Lets in who knows the fleet's secret, and calls the process announced as `address()`."""

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


class Gate(grpc.aio.ServerInterceptor):
    """Stands before everything else of a server, what keeps handlers by name included."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        """Returns the handler of the method that is called, or one that refuses the call."""
        if not str(handler_call_details.method).startswith(OPEN_SERVICES):
            try:
                self._doorkeeper.admit(dict(handler_call_details.invocation_metadata or ()))
            except Unauthenticated:
                return cast("grpc.RpcMethodHandler[_Request, _Response]", _REFUSAL)
        return await continuation(handler_call_details)


async def _refuse(requests: AsyncIterator[object], context: _Context) -> None:
    """Ends a call before anything that it carries is read."""
    status = to_status(error := Unauthenticated(TOLD))
    details = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(error.code, status.message, details)


# On the wire methods of all four kinds are the same.
_REFUSAL: Final[grpc.RpcMethodHandler[object, object]] = grpc.stream_stream_rpc_method_handler(
    _refuse
)


class ProofServicer(pb_grpc.ProofServiceServicer):
    """Answers for the process that `address()` is the announced address of."""

    def __init__(self, secret: FleetSecret, address: Callable[[], str]) -> None:
        self._secret = secret
        self._address = address

    async def Prove(self, request: pb.ProveRequest, context: _ProveContext) -> pb.ProveResponse:
        """The proof; raises `InvalidRequest` for a nonce of another form."""
        if not LEAST_BYTES <= len(request.nonce) <= _LONGEST_NONCE:
            expected = f"expected {LEAST_BYTES} to {_LONGEST_NONCE} bytes"
            raise InvalidRequest.of("nonce", f"{expected}, got {len(request.nonce)}")
        return pb.ProveResponse(digest=self._secret.proof(self._address(), request.nonce))
