"""What the two ends of a connector say to each other about one transfer. Schemas only.

A sender begins, sends pages and finishes. Over ZMQ the bytes of Pages follow it in frames and are
answered; over NIXL they are written first, and Pages comes as the notification of that write.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from effuse.kvtransfer.messages import (
    MAX_MANIFEST_BYTES,
    MAX_METADATA_BYTES,
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
    """Groups [group, end_group) of layers of pages [first, first + n) of the reservation."""

    attempt: AttemptId
    source: Name
    destination: Name
    first: U32
    pages: Annotated[tuple[PageRef, ...], Meta(min_length=1, max_length=MAX_CHUNK_PAGES)]
    group: U32
    end_group: U32


class Finish(Struct, frozen=True, tag=True):
    """All pages were sent; the manifest says what they are."""

    manifest: Manifest


class Placed(Struct, frozen=True, tag=True):
    """A chunk that began with this page and group lies in the pool, or was refused."""

    transfer_id: Name
    first: U32
    group: U32


class Accepted(Struct, frozen=True, tag=True):
    """The handoff is verified."""

    transfer_id: Name


class Rejected(Struct, frozen=True, tag=True):
    """The transfer was refused."""

    transfer_id: Name
    cause: Name
    message: Text


ToReceiver = Begin | Pages | Finish
ToSender = Placed | Accepted | Rejected


def attempt_of(message: ToReceiver) -> AttemptId:
    """The attempt that a sender's message is about."""
    return message.manifest.attempt if isinstance(message, Finish) else message.attempt


def source_of(message: ToReceiver) -> str:
    """The incarnation that a sender's message comes from, by its own account."""
    return message.manifest.source_incarnation if isinstance(message, Finish) else message.source


_to_receiver = msgspec.msgpack.Decoder(ToReceiver)
_to_sender = msgspec.msgpack.Decoder(ToSender)
T = TypeVar("T")


def decode_to_receiver(data: bytes | memoryview) -> ToReceiver:
    """What a sender says. Raises MalformedMessage."""
    message: ToReceiver = _decode(_to_receiver, data)
    return message


def decode_to_sender(data: bytes | memoryview) -> ToSender:
    """A receiver's answer. Raises MalformedMessage."""
    message: ToSender = _decode(_to_sender, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedMessage(f"a message of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # last: deep nesting
        raise MalformedMessage(f"not a message between connectors: {error}") from error
