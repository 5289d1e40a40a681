"""Which calls a server accepts: each call shows its credentials, and `interceptor.py` answers a bad
one only with UNAUTHENTICATED. Also the secret of a fleet's processes, and digests of it.

A call carries a digest of the secret and of the address that it goes to, so that a process that
listens there learns nothing that opens another one. Before the first call, the callee proves that
it knows the secret by a digest of a fresh nonce and its own address. A stranger cannot forward that
question to a real process. Against an attacker who reads or changes traffic only TLS helps.

Health checks and that proof need no credentials, because they reveal nothing. Calls are in
`channels.py`, certificates in `tls.py`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from effuse.protos.errors import InvalidRequest, Unauthenticated
from effuse.v1 import proof_pb2 as pb
from effuse.v1 import proof_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    import grpc.aio

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
