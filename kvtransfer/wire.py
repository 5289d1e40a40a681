"""What the two ends of a connector say to each other about one transfer. Schemas only.

A sender begins, sends pages in chunks and finishes. Over ZMQ the bytes follow their header in
frames and are answered; over NIXL they are written first, and a notification says where they lie.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from effuse.kvtransfer.messages import (
    MAX_MANIFEST_BYTES,
    MAX_METADATA_BYTES,
    MAX_PAGES,
    U32,
    AttemptId,
    Field,
    MalformedMessage,
    Manifest,
    Name,
    PageRef,
    Text,
)

MAX_CHUNK_PAGES = 4096


class Begin(Struct, frozen=True, tag=True):
    """A sender names itself, the life it means, and its model."""

    attempt: AttemptId
    source: Name
    destination: Name
    fingerprint: Annotated[tuple[Field, ...], Meta(max_length=64)]
    reply_to: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)] = b""  # NIXL agent metadata


class Pages(Struct, frozen=True, tag=True):
    """Pages [first, first + n) of the reservation; their bytes follow in frames."""

    attempt: AttemptId
    source: Name
    destination: Name
    first: U32
    pages: Annotated[tuple[PageRef, ...], Meta(min_length=1, max_length=MAX_CHUNK_PAGES)]


class Landed(Struct, frozen=True, tag=True):
    """Pages [first, first + n) were written into the pool by their sender."""

    attempt: AttemptId
    source: Name
    first: U32
    count: Annotated[int, Meta(ge=1, le=MAX_PAGES)]


class Finish(Struct, frozen=True, tag=True):
    """All pages were sent; the manifest says what they are."""

    manifest: Manifest


class Placed(Struct, frozen=True, tag=True):
    """A chunk lies in the pool."""

    transfer_id: Name
    first: U32


class Accepted(Struct, frozen=True, tag=True):
    """The handoff is verified."""

    transfer_id: Name


class Rejected(Struct, frozen=True, tag=True):
    """A message was refused; `first` names the chunk if it was one."""

    transfer_id: Name
    cause: Name
    message: Text
    first: U32 | None = None


ToReceiver = Begin | Pages | Landed | Finish
ToSender = Placed | Accepted | Rejected


def attempt_of(message: ToReceiver) -> AttemptId:
    """The attempt that a sender's message is about."""
    return message.manifest.attempt if isinstance(message, Finish) else message.attempt


def source_of(message: ToReceiver) -> str:
    """The incarnation that a sender's message comes from, by its own account."""
    return message.manifest.source_incarnation if isinstance(message, Finish) else message.source


_to_receiver = msgspec.msgpack.Decoder(ToReceiver)
_to_sender = msgspec.msgpack.Decoder(ToSender)
_either = msgspec.msgpack.Decoder(ToReceiver | ToSender)
T = TypeVar("T")


def decode_to_receiver(data: bytes | memoryview) -> ToReceiver:
    """What a sender says. Raises MalformedMessage."""
    message: ToReceiver = _decode(_to_receiver, data)
    return message


def decode_to_sender(data: bytes | memoryview) -> ToSender:
    """A receiver's answer. Raises MalformedMessage."""
    message: ToSender = _decode(_to_sender, data)
    return message


def decode_either(data: bytes | memoryview) -> ToReceiver | ToSender:
    """What a sender or a receiver says, where both come the same way. Raises MalformedMessage."""
    message: ToReceiver | ToSender = _decode(_either, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedMessage(f"a message of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # last: deep nesting
        raise MalformedMessage(f"not a message between connectors: {error}") from error
