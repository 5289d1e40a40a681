"""Input that never becomes a message: bytes, sizes, encodings, tokens, HTTP/2 itself."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
from bad_input.case import BY_ANYONE, BY_LIBRARY, INVALID, NOT_FOUND, Case, Sent
from bad_input.clients import GENERATION, MODELS, WATCH, good
from bad_input.gateways import KSERVE, VLLM
from bad_input.http2 import PREFACE, SETTINGS, frame, message, request
from bad_input.workers import DECODE, PREFILL, REHEARSE, WORKER
from grpc_health.v1 import health_pb2

METHODS: Final = (
    *(f"{GENERATION}/{name}" for name in ("Generate", "GenerateStream", "GetRequest")),
    f"{GENERATION}/CancelRequest", WATCH,
    *(f"{MODELS}/{name}" for name in ("ListModels", "GetModel", "ListWorkers")),
    *(f"{MODELS}/{name}" for name in ("Tokenize", "Detokenize")),
    *(f"{VLLM}/{name}" for name in ("Generate", "Abort", "GetTokenizer")),
    *(f"{KSERVE}/{name}" for name in ("ModelInfer", "ModelStreamInfer", "ModelReady")),
)  # fmt: skip
OVERDUE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
TOO_MUCH: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN_METHOD: Final = grpc.StatusCode.UNIMPLEMENTED
STRANGER: Final = grpc.StatusCode.UNAUTHENTICATED
GARBAGE: Final = b"\xff\xff\xff\xff\x0f\x00"
LARGE: Final = b"\x1a\x80\x80\x80\x03" + b"a" * (6 << 20)  # a prompt of 6 MiB


def wire_cases() -> Iterator[tuple[str, Case]]:
    """Calls that a gRPC library makes."""
    for path in METHODS:
        sent: Sequence[Sent] = [GARBAGE]
        yield (
            f"malformed: {path.rpartition('/')[2]} of {path.split('/')[1]}",
            _malformed(path, sent),
        )
    for path in (DECODE, REHEARSE):
        yield f"malformed: {path}", _malformed(path, [GARBAGE], to="decode-0")
    yield f"malformed: {PREFILL}", _malformed(PREFILL, [GARBAGE], to="prefill-0")
    for name in ("Abort", "Drain"):
        path = f"{WORKER}/{name}"
        yield f"malformed: {name}", _malformed(path, [b"\x0a\x05ab"], to="prefill-0")
    generate = f"{GENERATION}/Generate"
    yield "truncated", _malformed(generate, [good().SerializeToString()[:-3]])
    yield "not UTF-8", _malformed(generate, [b"\x1a\x02\xc3\x28"])
    yield "a field of another type", _malformed(generate, [b"\x2a\x05hello"])
    yield "a group without an end", _malformed(generate, [b"\x1b\x0b"])
    yield "deeply nested", _malformed(generate, [_nested(200)])
    many: dict[str, Any] = {"code": TOO_MUCH, "reason": BY_LIBRARY}
    yield "oversized", Case(method=generate, sent=[LARGE], **many)
    yield "bomb", Case(method=generate, sent=[LARGE], compression=grpc.Compression.Gzip, **many)
    fat = (("authorization", "x" * 20000),)
    yield "metadata too large", Case(method=generate, sent=[good()], metadata=fat, **many)
    yield (
        "no time",
        Case(method=generate, sent=[good()], code=OVERDUE, reason=BY_ANYONE, timeout_s=1e-6),
    )
    yield (
        "time is over",
        Case(method=generate, sent=[good()], code=OVERDUE, reason=BY_ANYONE, timeout_s=-5.0),
    )
    for path in ("/effuse.v1.GenerationService/Guess", "/no.such.Service/Ask", "/", "/a/b/c"):
        yield (
            f"unknown: {path}",
            Case(method=path, sent=[good()], code=UNKNOWN_METHOD, reason="NOT_SUPPORTED"),
        )
    health = health_pb2.HealthCheckRequest(service="no.such.Service")
    yield (
        "health of nobody",
        Case(method="/grpc.health.v1.Health/Check", sent=[health], code=NOT_FOUND),
    )
    yield from _tokens()


def _malformed(path: str, sent: Sequence[Sent], **more: Any) -> Case:
    return Case(method=path, sent=sent, code=INVALID, said="protobuf message", **more)


def _nested(depth: int) -> bytes:
    """Nested lists, as an argument of a chat's template."""
    value = b"\x20\x01"  # true
    for _ in range(depth):
        value = b"\x32" + _sized(b"\x0a" + _sized(value))
    entry = b"\x0a\x01a\x12" + _sized(value)
    return b"\x4a" + _sized(b"\x12" + _sized(b"\x0a" + _sized(entry)))


def _sized(body: bytes) -> bytes:
    length, left = bytearray(), len(body)
    while left >= 128:
        length.append(left % 128 + 128)
        left //= 128
    return bytes(length) + bytes([left]) + body


def _tokens() -> Iterator[tuple[str, Case]]:
    """A caller without a key gets the same answer for every method."""
    shown: dict[str, tuple[tuple[str, str], ...]] = {
        "none": (),
        "empty": (("authorization", ""),),
        "no scheme": (("authorization", "effuse-abc"),),
        "another scheme": (("authorization", "Basic YTpi"),),
        "only a scheme": (("authorization", "Bearer "),),
        "unknown": (("authorization", "Bearer effuse-nobodys"),),
        "too long": (("authorization", "Bearer " + "x" * 600),),
        "the hash instead of the token": (("authorization", "Bearer " + "0" * 64),),
        "under another name": (("x-api-key", "effuse-abc"),),
        "a worker's": (("effuse-fleet-token", "abc"),),
    }
    for name, metadata in shown.items():
        yield f"token: {name}", _stranger(f"{GENERATION}/Generate", metadata)
    for path in (*METHODS[1:], "/no.such.Service/Ask"):
        yield f"no token: {path}", _stranger(path, ())


def _stranger(path: str, metadata: tuple[tuple[str, str], ...]) -> Case:
    return Case(
        method=path, sent=[GARBAGE], code=STRANGER, reason="UNAUTHENTICATED", metadata=metadata
    )


def spoken_by_hand(token: str) -> Iterator[tuple[str, bytes, str]]:
    """By name: the bytes of a connection, and how it must end, in the words of `http2.ask`; several
    if the library may choose.
    """
    path, body = f"{GENERATION}/Generate", good().SerializeToString()
    key = f"Bearer {token}"

    def call(said: bytes, **headers: str | None) -> bytes:
        return request(path, said, **({"authorization": key} | headers))

    zipped = gzip.compress(LARGE)
    yield "a good call", call(message(body)), "0"
    yield "a bomb of 1:1000", call(message(zipped, flag=1), grpc_encoding="gzip"), "8"
    yield "corrupt gzip", call(message(b"\x1f\x8bno", flag=1), grpc_encoding="gzip"), "13"
    yield "compressed by nothing", call(message(body, flag=1)), "13"
    yield "unknown compression", call(message(body, flag=1), grpc_encoding="zip9"), "13"
    yield "unknown flag", call(message(body, flag=7)), "3"
    yield "more bytes than are taken", call(message(b"", length=2**31)), "8"
    # The library waits for the rest, or for any message, as long as the caller allows.
    late = {"grpc_timeout": "50m"}
    yield "fewer bytes than told", call(message(body, length=len(body) + 9), **late), "4 reset"
    yield "no message", call(b"", **late), "4 reset"
    yield "no time left", call(message(body), grpc_timeout="1n"), "4"
    yield "time of no form", call(message(body), grpc_timeout="soon"), "13"
    yield "negative time", call(message(body), grpc_timeout="-1S"), "13"
    yield "much time", call(message(body), grpc_timeout="99999999H"), "0"
    yield "GET", call(message(body), method="GET"), "reset"
    yield "no trailers", call(message(body), te=None), "reset"
    yield "no path", request("", message(body), authorization=key), "12"
    yield "not a frame", PREFACE + b"\xff" * 64, "goaway closed"
    yield "no header block", PREFACE + frame(SETTINGS, 0, 0) + frame(1, 5, 1, b"\xff" * 9), "13"
    yield "HTTP/1.1", b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", "goaway closed"
    yield "TLS", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160), "goaway closed"
