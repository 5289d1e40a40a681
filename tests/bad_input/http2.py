"""Just enough of HTTP/2 (RFC 9113) to send bytes that a gRPC library would not: frames by hand, no
HPACK table, one connection for each call.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
USUAL: Final = {
    ":method": "POST",
    ":scheme": "http",
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def literals(headers: Sequence[tuple[str, bytes]]) -> bytes:
    """A header block of literals that are not indexed (RFC 7541, 6.2.2)."""
    return b"".join(b"\0" + _text(name.encode()) + _text(value) for name, value in headers)


def _text(value: bytes) -> bytes:
    """A string of HPACK without Huffman's code; its length with a prefix of 7 bits."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    left, length = len(value) - 127, bytearray([127])
    while left >= 128:
        length.append(left % 128 + 128)
        left //= 128
    return bytes(length) + bytes([left]) + value


def message(body: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A message as gRPC frames it; `length` lies about it."""
    return struct.pack(">BI", flag, len(body) if length is None else length) + body


def request(path: str, body: bytes, **headers: str | None) -> bytes:
    """A whole call on stream 1. `headers` are added, underscores for hyphens; None leaves one of
    the usual ones out."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    renamed = {f":{name}" if f":{name}" in USUAL else name: v for name, v in named.items()}
    told = {**USUAL, ":path": path, **renamed}
    block = literals([(name, value.encode()) for name, value in told.items() if value is not None])
    parts = [PREFACE, frame(SETTINGS, 0, 0), frame(HEADERS, END_HEADERS, 1, block)]
    pieces = [body[at : at + 16384] for at in range(0, len(body), 16384)]
    parts += [frame(DATA, 0, 1, piece) for piece in pieces[:-1]]
    parts.append(frame(DATA, END_STREAM, 1, pieces[-1] if pieces else b""))
    return b"".join(parts)


def ask(address: str, said: bytes, timeout_s: float = 30.0) -> str:
    """Sends it on a new connection and returns how it ended: the number of gRPC's status, `reset`,
    `goaway` or `closed`.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(said)
        heard = b""
        while True:
            try:
                got = connection.recv(1 << 16)
            except ConnectionResetError:
                got = b""
            heard += got
            found = _ending(heard)
            if found or not got:
                return found or "closed"


def _ending(heard: bytes) -> str:
    """The first end of a call among the frames that came; empty where there is none yet."""
    at = 0
    while at + 9 <= len(heard):
        length = int.from_bytes(heard[at : at + 3], "big")
        kind, body = heard[at + 3], heard[at + 9 : at + 9 + length]
        at += 9 + length
        if at > len(heard):
            return ""
        if kind == HEADERS and (found := body.find(b"\x0bgrpc-status")) >= 0:
            first = found + 12
            return body[first + 1 : first + 1 + body[first]].decode()
        if kind in (RST_STREAM, GOAWAY):
            return "reset" if kind == RST_STREAM else "goaway"
    return ""
