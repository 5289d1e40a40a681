"""Who may call a server: each call shows what it has, and is let in or told UNAUTHENTICATED alone;
and the secret that the processes of a fleet share, of which they show each other digests.

A call carries a digest of the secret and of the address that it goes to: who listens there learns
nothing that opens another door. Before anything else is sent, who is called proves by a digest of a
fresh nonce and of its own address that it knows the secret, so that a stranger cannot pass the
question on to one who does. Against who reads or changes what is on the wire only TLS helps.

Health is open, and so is that proof, which gives nothing away. Not here: calls (`channels.py`),
certificates (`tls.py`).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from effuse.protos.errors import DETAILS_KEY, InvalidRequest, Unauthenticated, to_status
from effuse.v1 import proof_pb2 as pb
from effuse.v1 import proof_pb2_grpc as pb_grpc

TOKEN_KEY: Final = "effuse-fleet-token"
"""Metadata under which a call carries its digest."""
LEAST_BYTES: Final = 16
MOST_BYTES: Final = 4096
NONCE_BYTES: Final = 32
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


class FleetSecret:
    """The secret, which nothing prints."""

    def __init__(self, secret: bytes) -> None:
        """Raises OSError for one that is short, or a file of something else."""
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise OSError(
                f"--fleet-secret: expected {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
            )
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> FleetSecret:
        """The content of a file, less white space around it. Raises OSError."""
        return cls(path.read_bytes().strip())

    @staticmethod
    def make(path: Path) -> None:
        """Writes a new one into a file that its owner alone may read."""
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32))

    def token(self, address: str) -> str:
        """What a call to the process announced as `address` ("host:port") carries."""
        return self.derive("call", address.encode()).hex()

    def proof(self, address: str, nonce: bytes) -> bytes:
        """What the process announced as `address` answers to a nonce."""
        return self.derive("proof", nonce, address.encode())

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that follow from the secret, for one purpose; nobody else can tell them."""
        told = b"".join(len(one).to_bytes(4, "big") + one for one in (purpose.encode(), *parts))
        return hmac.digest(self._secret, told, "sha256")


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
