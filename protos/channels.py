"""Channels that add credentials to every call, and how the processes of a fleet know each other.

grpc.aio's interceptors could add them too, but they wrap calls in objects that behave differently
when a call is cancelled or ends early.

The processes of a fleet authenticate each other before they exchange anything. With certificates,
both ends show theirs on connecting. With a secret, every call carries a digest of it and of the
address that it goes to, so that a process that listens there learns nothing that opens another one.
Before the first call, the callee proves that it knows the secret by a digest of a fresh nonce and
its own address. A stranger cannot forward that question to a real process. Against an attacker who
reads or changes traffic only TLS helps.

The stubs are the generated ones, cast to asyncio's types of calls: the generator writes these only
into its stub files, and at run time one class serves both. `filled` makes their messages from
values whose fields have the same names, and `fields_of` and `numbers_of` read messages and enums.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from effuse.protos import rpc
from effuse.protos.errors import InvalidRequest, PeerLost, Unauthenticated, from_rpc_error
from effuse.protos.fleet_secret import LEAST_BYTES, FleetSecret
from effuse.protos.gate import NEEDS_CREDENTIALS
from effuse.protos.rpc import FLEET_KEEPALIVE, Keepalive
from effuse.protos.tls import ChannelTls, ServerTls, TlsFiles, check_name
from effuse.v1 import generation_pb2_grpc as generation
from effuse.v1 import model_pb2_grpc as model
from effuse.v1 import monitor_pb2_grpc as monitor
from effuse.v1 import proof_pb2
from effuse.v1 import proof_pb2_grpc as proof
from effuse.v1 import worker_pb2_grpc as worker

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")
Filled = TypeVar("Filled", bound=Message)
Stub = Callable[[grpc.aio.Channel], T]

generation_stub: Final = cast(
    "Stub[generation.GenerationServiceAsyncStub]", generation.GenerationServiceStub
)
model_stub: Final = cast("Stub[model.ModelServiceAsyncStub]", model.ModelServiceStub)
monitor_stub: Final = cast("Stub[monitor.MonitorServiceAsyncStub]", monitor.MonitorServiceStub)
prefill_stub: Final = cast("Stub[worker.PrefillServiceAsyncStub]", worker.PrefillServiceStub)
decode_stub: Final = cast("Stub[worker.DecodeServiceAsyncStub]", worker.DecodeServiceStub)
worker_stub: Final = cast("Stub[worker.WorkerServiceAsyncStub]", worker.WorkerServiceStub)
proof_stub: Final = cast("Stub[proof.ProofServiceAsyncStub]", proof.ProofServiceStub)


TOKEN_KEY: Final = "effuse-fleet-token"
"""Metadata under which a call carries its digest."""
NONCE_BYTES: Final = 32
_LONGEST_NONCE: Final = 64
FLEET_NAME: Final = "effuse-fleet"
"""DNS name in every certificate of a fleet; certificates cannot list addresses of pods."""
PROVE_S: Final = 2.0
Metadata = Sequence[tuple[str, str | bytes]]


def _carrying(kind: str) -> Callable[..., Any]:
    """The method of a `MetadataChannel` that makes the calls of this kind."""

    def make(channel: MetadataChannel, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        call = getattr(channel.inner, kind)(*args, **kwargs)

        def with_metadata(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *channel.metadata), **kwargs)

        return with_metadata

    return make


def _inner(name: str) -> Callable[..., Any]:
    return lambda channel, *args, **kwargs: getattr(channel.inner, name)(*args, **kwargs)


class MetadataChannel(grpc.aio.Channel):
    """Wraps another channel and adds `metadata` to the metadata of each call."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self.inner = channel
        self.metadata = tuple(metadata)

    unary_unary = _carrying("unary_unary")
    unary_stream = _carrying("unary_stream")
    stream_unary = _carrying("stream_unary")
    stream_stream = _carrying("stream_stream")
    close = _inner("close")
    get_state = _inner("get_state")
    wait_for_state_change = _inner("wait_for_state_change")
    channel_ready = _inner("channel_ready")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class FleetOnly:
    """Accepts calls with the fleet's secret for the process announced as `address()`."""

    def __init__(self, secret: FleetSecret, address: Callable[[], str]) -> None:
        self._token = cache(secret.token)  # of the one address
        self._address = address

    def admit(self, shown: dict[str, str | bytes]) -> None:
        token, address = shown.get(TOKEN_KEY), self._address()
        if not (isinstance(token, str) and address and token.isascii()):
            raise Unauthenticated(NEEDS_CREDENTIALS)
        if not hmac.compare_digest(token, self._token(address)):
            raise Unauthenticated(NEEDS_CREDENTIALS)


class ProofServicer(proof.ProofServiceServicer):
    """Proves for the process whose announced address is `address()`."""

    def __init__(self, secret: FleetSecret, address: Callable[[], str]) -> None:
        self._secret = secret
        self._address = address

    async def Prove(
        self, request: proof_pb2.ProveRequest, context: rpc.Context
    ) -> proof_pb2.ProveResponse:
        """The proof; raises `InvalidRequest` for a nonce of another form."""
        if not LEAST_BYTES <= len(request.nonce) <= _LONGEST_NONCE:
            expected = f"expected {LEAST_BYTES} to {_LONGEST_NONCE} bytes"
            raise InvalidRequest.of("nonce", f"{expected}, got {len(request.nonce)}")
        return proof_pb2.ProveResponse(digest=self._secret.proof(self._address(), request.nonce))


class FleetAccess:
    """How a process proves that it belongs to the fleet; by default not at all."""

    def __init__(self, tls: TlsFiles | None = None, secret: FleetSecret | None = None) -> None:
        """Raises OSError if certificates cannot be used."""
        self.secret = secret
        self._files = tls
        self._tls = None if tls is None else ChannelTls(tls)

    @classmethod
    def read(
        cls, cert: Path | None, key: Path | None, ca: Path | None, secret: Path | None
    ) -> FleetAccess:
        """The credentials in these files. Raises OSError if they cannot be used."""
        tls = None if cert is None else TlsFiles(cert=cert, key=key, ca=ca)
        if tls is not None:
            tls.check()
            tls.check_signature()
            check_name(tls, FLEET_NAME)
        return cls(tls, None if secret is None else FleetSecret.read(secret))

    def server_tls(self) -> ServerTls | None:
        """Credentials of a server that answers only its fleet."""
        return None if self._files is None else ServerTls(self._files)

    def look(self) -> int:
        """Reads certificates again if their files changed; returns how often that has happened.
        Channels made before keep the old ones.
        """
        if self._tls is None:
            return 0
        self._tls.look()
        return self._tls.version

    def connect(
        self, address: str, *, keepalive: Keepalive | None = FLEET_KEEPALIVE
    ) -> FleetChannel:
        """A channel to the process announced as `address`; it connects at the first call."""
        options = rpc.channel_options(keepalive)
        # Without filters that a fleet needs not: 2 kB less for each open call. Only the sender
        # limits the length of messages then, which is a process of the fleet. Without channelz,
        # which no server of ours offers: 3 kB less for each channel. Without probes of bandwidth:
        # each call on a channel that is seldom used is one, and commits need no wide window.
        less = {"minimal_stack": 1, "enable_channelz": 0, "http2.bdp_probe": 0}
        less_options = [(f"grpc.{name}", value) for name, value in less.items()]
        options = [*options, *rpc.near_options(), *less_options]
        if self._tls is None:
            channel = grpc.aio.insecure_channel(address, options)
        else:
            self._tls.look()
            named = ("grpc.ssl_target_name_override", FLEET_NAME)
            channel = grpc.aio.secure_channel(address, self._tls.found, [*options, named])
        return FleetChannel(channel, address, self.secret)


OPEN: Final = FleetAccess()
"""The identity of a fleet whose processes accept every client's calls."""


class FleetChannel(MetadataChannel):
    """A channel whose calls carry the fleet's token, if there is a secret."""

    def __init__(self, channel: grpc.aio.Channel, address: str, secret: FleetSecret | None) -> None:
        super().__init__(channel, [] if secret is None else [(TOKEN_KEY, secret.token(address))])
        self._address = address
        self._secret = secret
        self._is_proven = False

    async def prove(self) -> None:
        """Returns once the process at the address has proved that it knows the secret, which it
        does once in each connection. Raises `PeerLost` if it does not.
        """
        if self._secret is None:
            return
        if self._is_proven and self.get_state() is grpc.ChannelConnectivity.READY:
            return
        self._is_proven = False
        nonce = secrets.token_bytes(NONCE_BYTES)
        stub = proof_stub(self.inner)
        try:
            request = proof_pb2.ProveRequest(nonce=nonce)
            answer = await stub.Prove(request, timeout=PROVE_S)
        except grpc.aio.AioRpcError as error:
            text = f"{self._address} did not prove that it belongs to the fleet"
            raise PeerLost(f"{text}: {error.code().name}") from error
        if not hmac.compare_digest(answer.digest, self._secret.proof(self._address, nonce)):
            text = f"{self._address} does not belong to the fleet"
            raise PeerLost(f"{text}: another --fleet-secret, or it announces another address")
        self._is_proven = True


class calling:  # used like a function; a generator is larger, and stays for long
    """Turns what grpcio raises for a call to `peer` into an `EffuseError`. It raises CancelledError
    if our task is cancelled and if the call is, and only the first may pass."""

    __slots__ = ("_logs", "_peer")

    def __init__(self, peer: str, *, logs: bool = False) -> None:
        """logs: whether a status of the call is logged."""
        self._peer = peer
        self._logs = logs

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            if self._logs:
                args = (self._peer, error.code().name, error.details())
                LOG.info("%s ended its call with %s: %s", *args)
            raise from_rpc_error(error, self._peer) from error
        if isinstance(error, TimeoutError | grpc.aio.UsageError):  # the latter: a closed channel
            raise PeerLost(f"{self._peer} does not answer") from error
        if isinstance(error, asyncio.CancelledError) and not rpc.is_task_cancelled():
            raise PeerLost(f"{self._peer} closed the call") from None


def filled(kind: type[Filled], *sources: object, **others: Any) -> Filled:
    """A message with the fields that `sources` have under the same names, and with others.

    The values of message fields are filled in the same way; None in a list is an empty message.
    """
    same: dict[str, Any] = {}
    for one in sources:
        for name, inner, is_list in _shared(kind, type(one)):  # type: ignore[arg-type]  # hashable
            if name in others:
                continue
            value = getattr(one, name)
            if inner is not None and value is not None:
                value = [filled(inner, item) for item in value] if is_list else filled(inner, value)
            same[name] = value
    return kind(**same | others)


@cache
def _shared(kind: type[Message], source: type) -> list[tuple[str, Any, bool]]:
    """The fields that both have: the name, the class of a message, and whether it is a list."""
    common = [field for field in kind.DESCRIPTOR.fields if hasattr(source, field.name)]
    inner = (one.message_type and GetMessageClass(one.message_type) for one in common)  # type: ignore[arg-type]  # upb's own class, which the stub does not know
    return [(one.name, kind, one.is_repeated) for one, kind in zip(common, inner, strict=True)]


def fields_of(message: Message) -> dict[str, Any]:
    """Every field of a message as a value of JSON, zeros included, under its name in the .proto."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def numbers_of(prefix: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The numbers of an enum's values by their names in small letters, without `prefix`."""
    return {name.removeprefix(prefix).lower(): number for name, number in items}
