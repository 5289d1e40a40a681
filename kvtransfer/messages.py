"""The messages of two engines about a handoff, as checked values.

A sender begins, sends pages and finishes. Over ZMQ the bytes of Pages follow it in frames and are
acknowledged. Over NIXL they are written first, and Pages arrives as the notification of that write.

Only schemas, limits and the memory of ended transfers: a message that decodes is well-formed but
perhaps not right. handoff.py checks senders and order; transports carry the messages.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import lcm
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from effuse.config.checks import UNREADABLE

MAX_PAGES = 1 << 16
MAX_POOL_PAGES = 1 << 24
MAX_PAGE_BYTES = 1 << 28
MAX_CHUNK_PAGES = 1 << 12
MAX_METADATA_BYTES = 1 << 20
MAX_HIDDEN_BYTES = 1 << 18
MAX_TAIL_TOKENS = 1 << 12
MAX_MANIFEST_BYTES = 8 << 20
MAX_LEASE_S = 3600
MAX_RANKS = 256
MAX_HEADS = 1 << 12
MAX_GROUPS = 1 << 8
DIGEST_BYTES = 16

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=512)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
PageBytes = Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class AttemptId(Struct, frozen=True, array_like=True):
    """One attempt at a request; the transfer id names its handoff and is never used twice."""

    request_id: Name
    attempt: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    transfer_id: Name


class Tombstones:
    """Transfers that are over, each for `keep_s` seconds, and only the `most` newest ones."""

    def __init__(self, keep_s: float = 600.0, most: int = 1 << 16) -> None:
        self._keep_s = keep_s
        self._most = most
        self._since: OrderedDict[str, float] = OrderedDict()  # oldest first

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._since

    def add(self, transfer_id: str, now: float) -> None:
        """Adds a transfer, and forgets old ones."""
        self._since[transfer_id] = now
        self._since.move_to_end(transfer_id)
        before, times = now - self._keep_s, self._since.values()
        while len(self._since) > self._most or next(iter(times)) < before:
            self._since.popitem(last=False)


class PageRef(Struct, frozen=True, array_like=True):
    """One allocation of a page."""

    page_id: U32
    generation: U32


class Field(Struct, frozen=True, array_like=True):
    """One named value of a fingerprint."""

    name: Name
    value: Text


class FieldMismatch(NamedTuple):
    """The first field in which two fingerprints differ."""

    name: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return (
            f"fingerprint field {self.name!r} differs: ours is {self.ours!r}, theirs is "
            f"{self.theirs!r}"
        )


def mismatch(ours: Sequence[Field], theirs: Sequence[Field]) -> FieldMismatch | None:
    """The first difference, or None. A field that one side lacks reads as "(absent)"."""
    if ours == theirs:
        return None
    mine, other = ({one.name: one.value for one in fields} for fields in (ours, theirs))
    for name in [*mine, *(name for name in other if name not in mine)]:
        left, right = mine.get(name, "(absent)"), other.get(name, "(absent)")
        if left != right:
            return FieldMismatch(name, left, right)
    if len(theirs) != len(other):
        return FieldMismatch("(count)", str(len(ours)), f"{len(theirs)} with repeated names")
    return None


class ReceiverAddress(Struct, frozen=True, kw_only=True):
    """The address of a receiver's pool; fields that a connector does not use stay empty."""

    connector: Name
    endpoint: Text = ""
    agent_name: Annotated[str, Meta(max_length=128)] = ""
    agent_metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)] = b""
    pool_address: U63 = 0
    device_id: U32 = 0
    memory_kind: Annotated[str, Meta(pattern="^(|DRAM|VRAM)$")] = ""
    boot_id: Annotated[str, Meta(max_length=128)] = ""  # of its kernel: equal on one machine


class KVPart(Struct, frozen=True, array_like=True):
    """The share of a model that a rank holds, or sends to another one: KV heads [first_head,
    end_head) of groups [first_group, end_group) of layers, in the model's numbers, of every page.
    If ranks split the context, of every `turns`-th page of a prompt, from page `turn` on.
    """

    first_head: Annotated[int, Meta(ge=0, lt=MAX_HEADS)]
    end_head: Annotated[int, Meta(gt=0, le=MAX_HEADS)]
    first_group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    end_group: Annotated[int, Meta(gt=0, le=MAX_GROUPS)]
    turn: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    turns: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1

    @property
    def heads(self) -> range:
        """Its KV heads, which may be none."""
        return range(self.first_head, self.end_head)

    @property
    def groups(self) -> range:
        """Its groups of layers, which may be none."""
        return range(self.first_group, self.end_group)


class Shard(Struct, frozen=True, kw_only=True):
    """One receiving rank: how to reach its pool, and what its pool holds."""

    address: ReceiverAddress
    part: KVPart
    page_bytes: PageBytes


class Reservation(Struct, frozen=True, kw_only=True):
    """Pages that a decode engine holds for one handoff, and how to write into them.

    shards: one for each of its ranks, in their order; none if nothing is handed over. num_held:
    pages of the prompt's prefix that it has already; `pages` come after them. If ranks split the
    context, each of these pages has room for as many pages of the prompt, one on each rank, and
    num_written pages of the prompt are written; 0 means as many as there is room for.
    """

    attempt: AttemptId
    incarnation: Name
    shards: Annotated[tuple[Shard, ...], Meta(max_length=MAX_RANKS)]
    num_pool_pages: Annotated[int, Meta(ge=0, le=MAX_POOL_PAGES)]
    pages: Annotated[tuple[PageRef, ...], Meta(max_length=MAX_PAGES)]
    fingerprint: Annotated[tuple[Field, ...], Meta(max_length=64)]
    digest_seed: U63  # of the digests that the receiver compares
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
    num_held: Annotated[int, Meta(ge=0, le=MAX_PAGES)] = 0
    num_written: Annotated[int, Meta(ge=0, le=MAX_PAGES)] = 0

    @property
    def context_degree(self) -> int:
        """Pages of a prompt for which one of its pages has room."""
        return self.shards[0].part.turns if self.shards else 1

    @property
    def num_source_pages(self) -> int:
        """Pages that the writer sends."""
        return self.num_written or len(self.pages) * self.context_degree

    def moved(self, held: KVPart, sent: KVPart) -> range:
        """Which of the writer's pages a rank that holds one part gets from a rank that sends
        another one.
        """
        degree, num_held = held.turns, self.num_held * held.turns
        step = lcm(degree, sent.turns)
        turns = range(held.turn, step, degree)
        starts = (at for at in turns if (num_held + at) % sent.turns == sent.turn)
        found = next(starts, self.num_source_pages)
        return range(found, max(found, self.num_source_pages), step)

    def pages_of(self, held: KVPart, sent: KVPart) -> tuple[PageRef, ...]:
        """The pages in which `moved` pages lie on their rank, in their order."""
        return tuple(self.pages[at // held.turns] for at in self.moved(held, sent))

    @property
    def transfer_id(self) -> str:
        return self.attempt.transfer_id

    @property
    def connector(self) -> str:
        """The transport of the pages; "local" if nothing is handed over."""
        return self.shards[0].address.connector if self.shards else "local"


class BoundaryState(Struct, frozen=True, kw_only=True):
    """Inputs of decoding besides the pages.

    prompt_digest (digest.prompt_digest) identifies the prompt. tail_token_ids are the prompt's
    tokens whose KV is not in the pages. hidden (shifting models) is the last paged position's row
    after the final norm: [hidden_size] in the model's dtype.
    """

    prompt_len: U32
    prompt_digest: Digest
    tail_token_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_TAIL_TOKENS)]
    hidden: Annotated[bytes, Meta(max_length=MAX_HIDDEN_BYTES)] | None = None


class Envelope(Struct, frozen=True):
    """Whom a sender's message is from and for: the attempt, both ends, and the sender's part."""

    attempt: AttemptId
    source: Name  # incarnations, like the next one
    destination: Name
    part: KVPart

    @property
    def transfer_id(self) -> str:
        return self.attempt.transfer_id


class Manifest(Envelope, frozen=True, kw_only=True):
    """A writing rank's account of a finished push of this part. It has no page numbers: each
    Pages named its own, and all reserved pages must have arrived.
    """

    fingerprint: Annotated[tuple[Field, ...], Meta(max_length=64)]
    digest: Digest  # of this part of all pages in order, in the sender's memory
    num_bytes: U63
    boundary: BoundaryState


class Begin(Envelope, frozen=True, tag=True):
    """A sending rank's introduction: itself, the intended life, its part, and its model."""

    fingerprint: Annotated[tuple[Field, ...], Meta(max_length=64)]
    reply_to: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)] = b""  # NIXL agent metadata


class Pages(Envelope, frozen=True, tag=True):
    """Groups [group, end_group) of layers of pages [first, first + n) of the reservation, of the
    part that the sender introduced itself with."""

    first: U32
    pages: Annotated[tuple[PageRef, ...], Meta(min_length=1, max_length=MAX_CHUNK_PAGES)]
    group: U32
    end_group: U32


class Finish(Struct, frozen=True, tag=True):
    """All pages were sent; the manifest describes them.

    elapsed_us is the time from when the last page was final and the reservation known, to when this
    was sent. The seal is a digest of both (digest.seal_of).
    """

    manifest: Manifest
    elapsed_us: U63
    seal: Digest


class Placed(Struct, frozen=True, tag=True):
    """The chunk that began with this page and group is in the pool, or was refused."""

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


def envelope_of(message: ToReceiver) -> Envelope:
    """The envelope of a message."""
    return message.manifest if isinstance(message, Finish) else message


def writer_of(message: ToReceiver) -> str:
    """Names the rank that a sender's message comes from, by its own account."""
    one = envelope_of(message)
    return f"{one.source} {one.part.first_head} {one.part.turn} {one.part.first_group}"


_encoder = msgspec.msgpack.Encoder()
_reservations = msgspec.msgpack.Decoder(Reservation)
_to_receiver = msgspec.msgpack.Decoder(ToReceiver)
_to_sender = msgspec.msgpack.Decoder(ToSender)


T = TypeVar("T")


class MalformedMessage(ValueError):
    """A peer's bytes are not the expected message."""


def encode(message: Struct) -> bytes:
    """The message in MessagePack."""
    return _encoder.encode(message)


def decode_reservation(data: bytes | memoryview) -> Reservation:
    """A reservation from a peer. Raises MalformedMessage."""
    return _decode(_reservations, data, MAX_MANIFEST_BYTES)


def check_reservation(reservation: Reservation) -> Reservation:
    """Applies the schema to a reservation built in code, because structs are not checked when
    built.

    Raises MalformedMessage, also if a page id is outside the pool or occurs twice.
    """
    checked = decode_reservation(encode(reservation))
    ids = [page.page_id for page in checked.pages]
    if ids and max(ids) >= checked.num_pool_pages:
        raise MalformedMessage(
            f"page {max(ids)} lies outside a pool of {checked.num_pool_pages} pages"
        )
    if len(set(ids)) != len(ids):
        raise MalformedMessage("a page is reserved twice")
    degree = checked.context_degree
    if -(-checked.num_source_pages // degree) != len(checked.pages):
        raise MalformedMessage(
            f"{checked.num_source_pages} pages do not fill {len(checked.pages)} pages of {degree}"
        )
    for shard in checked.shards:
        if shard.part.turns != degree or shard.part.turn >= degree:
            raise MalformedMessage(
                f"a rank holds part {shard.part.turn} of {shard.part.turns} of the context, "
                f"the first one is of {degree}"
            )
        end = shard.address.pool_address + checked.num_pool_pages * shard.page_bytes
        if end > 1 << 63:
            raise MalformedMessage(f"the pool would end at {end:#x}, beyond 63 bits")
    return checked


def decode_to_receiver(data: bytes | memoryview) -> ToReceiver:
    """A sender's message. Raises MalformedMessage; nothing in it has been compared yet."""
    message: ToReceiver = _decode(_to_receiver, data, MAX_MANIFEST_BYTES)
    return message


def decode_to_sender(data: bytes | memoryview) -> ToSender:
    """A receiver's answer. Raises MalformedMessage."""
    message: ToSender = _decode(_to_sender, data, MAX_MANIFEST_BYTES)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, cap: int) -> T:
    if len(data) > cap:
        raise MalformedMessage(f"a message of {len(data)} bytes exceeds the cap of {cap}")
    try:
        return decoder.decode(data)
    # the last one: deep nesting
    except UNREADABLE as error:
        raise MalformedMessage(f"not a valid message: {error}") from error
