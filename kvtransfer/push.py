"""One push to one receiving rank: its pages, its progress, and its claims at the end.

Bookkeeping only: pushes.py acts on it, and the transport moves the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from effuse.kvtransfer.connector import (
    Cause,
    HandoffRefused,
    Pending,
)
from effuse.kvtransfer.digest import (
    DigestJob,
    PieceDigests,
    pages_digest,
    pieces_in_head,
)
from effuse.kvtransfer.layout import Fingerprint, KVLayout, mismatch
from effuse.kvtransfer.messages import (
    BoundaryState,
    Heads,
    MalformedMessage,
    Manifest,
    ReceiverAddress,
    Reservation,
    Shard,
    check_reservation,
)
from effuse.kvtransfer.transport import Chunk, Delivery, Peer


@dataclass(frozen=True, slots=True)
class Origin:
    """The sender's identity for a manifest."""

    incarnation: str
    fingerprint: Fingerprint
    layout: KVLayout


@dataclass(slots=True)
class Batch:
    """Pages that one forward makes final, layer by layer."""

    first: int  # index in the reservation
    source_pages: tuple[int, ...]
    num_final: Pending[int] | None
    step: int  # groups that leave together
    num_sent: int = 0  # groups that have left, or wait in the push's queue

    def next_groups(self, num_groups: int) -> range:
        """Groups that may leave now."""
        final = num_groups if self.num_final is None else min(self.num_final() or 0, num_groups)
        if final < num_groups:
            final = self.num_sent + (final - self.num_sent) // self.step * self.step
        return range(self.num_sent, final)


@dataclass(frozen=True, slots=True)
class PushPart:
    """The KV heads that this rank sends to one receiving rank: those that both hold."""

    shard: Shard
    heads: range  # in the model's numbers


@dataclass(slots=True)
class Push:
    """One part of an outgoing transfer."""

    reservation: Reservation
    part: PushPart
    peer: Peer
    origin: Origin
    known_at: float  # when the reservation was known
    promised_at: float = 0.0  # when the receiver last got the message that pages are still to come
    covered: set[int] = field(default_factory=set)  # indices of pages that were pushed
    batches: list[Batch] = field(default_factory=list)  # not all of whose layers have left
    queue: list[Chunk] = field(default_factory=list)
    deliveries: list[tuple[Delivery, int]] = field(default_factory=list)  # with their bytes
    digesting: list[tuple[Chunk, DigestJob]] = field(default_factory=list)
    pieces: PieceDigests = field(init=False)  # [pages, pieces], of digested parts
    manifest: Manifest | None = None  # once all pieces are digested
    boundary: Pending[BoundaryState] | None = None
    boundary_state: BoundaryState | None = None  # once it exists
    final_at: float = 0.0  # all pages and the boundary were final no earlier than this
    left_at: float | None = None  # when its first page was
    is_finished: bool = False  # the manifest was sent
    is_accepted: bool = False
    is_over: bool = False  # accepted, and it reads no pages any more
    is_failed: bool = False
    cancelled_at: float | None = None
    heard_at: float = 0.0  # when its receiver last sent a message, for any push
    uses_peer: bool = True

    def __post_init__(self) -> None:
        shape = len(self.reservation.pages), self.origin.layout.num_groups * self.group_pieces
        self.pieces = np.zeros(shape, dtype=np.int64)

    @property
    def transfer_id(self) -> str:
        """Name of the handoff."""
        return self.reservation.transfer_id

    @property
    def deadline(self) -> float:
        """When the lease ends."""
        return max(self.known_at, self.promised_at) + self.reservation.lease_s

    @property
    def group_pieces(self) -> int:
        """Pieces of one group of layers in a page, of its heads."""
        return len(self.part.heads) * pieces_in_head(self.origin.layout)

    @property
    def page_bytes(self) -> int:
        """Bytes of its heads in a page."""
        return self.origin.layout.bytes_of(self.part.heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of its heads in all pages, without boundary state."""
        return len(self.reservation.pages) * self.page_bytes

    @property
    def bytes_under_way(self) -> int:
        """Bytes of deliveries that have not ended."""
        return sum(num_bytes for _, num_bytes in self.deliveries)

    @property
    def is_quiet(self) -> bool:
        """Whether it reads or writes no pages any more, here or at the peer."""
        return not self.deliveries and not self.digesting

    @property
    def is_moving(self) -> bool:
        """Whether it advances by itself, or waits for the receiver's last message."""
        has_more = bool(self.queue) or (self.is_finished and not self.is_over)
        return not self.is_quiet or (has_more and not self.is_failed)

    @property
    def awaits_forward(self) -> bool:
        """Whether a known forward has yet to make layers or the boundary final."""
        has_more = bool(self.batches) or self.boundary is not None
        return has_more and not self.is_finished and not self.is_failed

    def cover(self, source_pages: Sequence[int], first: int) -> None:
        """Adds pages to push. Raises HandoffRefused if they overlap or exceed the reservation."""
        span = range(first, first + len(source_pages))
        if first < 0 or span.stop > len(self.reservation.pages):
            raise HandoffRefused(
                Cause.COVERAGE,
                f"pages {first}..{span.stop} are not within the {len(self.reservation.pages)} "
                "reserved ones",
            )
        if not self.covered.isdisjoint(span):
            raise HandoffRefused(Cause.COVERAGE, f"pages {first}..{span.stop} overlap earlier ones")
        self.covered.update(span)

    def elapsed_s(self, now: float) -> float:
        """Seconds since both the last page was final and the reservation known."""
        return now - max(self.final_at, self.known_at)

    def account(self, boundary: BoundaryState) -> Manifest:
        """The account of the push, made once all of its pieces have been digested.

        Raises HandoffRefused if pages are missing.
        """
        if self.manifest is None:
            self.manifest = self._manifest(boundary)
        return self.manifest

    def _manifest(self, boundary: BoundaryState) -> Manifest:
        missing = len(self.reservation.pages) - len(self.covered)
        if missing:
            raise HandoffRefused(Cause.COVERAGE, f"{missing} pages were not pushed")
        return Manifest(
            attempt=self.reservation.attempt,
            source_incarnation=self.origin.incarnation,
            destination_incarnation=self.reservation.incarnation,
            heads=Heads(self.part.heads.start, self.part.heads.stop),
            fingerprint=self.origin.fingerprint,
            digest=pages_digest(self.pieces),
            num_bytes=self.num_bytes,
            boundary=boundary,
        )


def check_push(reservation: Reservation, origin: Origin, transport: str) -> Reservation:
    """A reservation that accepts a push. Raises HandoffRefused that names both sides."""
    try:
        reservation = check_reservation(reservation)
    except MalformedMessage as error:
        raise HandoffRefused(Cause.MALFORMED, f"reservation: {error}") from error
    for shard in reservation.shards:
        if shard.address.connector != transport:
            raise HandoffRefused(
                Cause.PEER,
                f"the reservation is for the connector {shard.address.connector}, this worker "
                f"has {transport}",
            )
    found = mismatch(origin.fingerprint, reservation.fingerprint)
    if found is not None:
        raise HandoffRefused(Cause.FINGERPRINT, str(found))
    for shard in reservation.shards:
        _check_shard(shard, origin.layout)
    missing = set(range(origin.layout.num_kv_heads)).difference(
        *(shard.heads.span for shard in reservation.shards)
    )
    if missing:
        raise HandoffRefused(Cause.COVERAGE, f"no rank receives the KV heads {sorted(missing)}")
    return reservation


def shard_of(layout: KVLayout, address: ReceiverAddress) -> Shard:
    """The address of a pool of this layout, with its share of a page."""
    heads = Heads(layout.heads.start, layout.heads.stop)
    return Shard(address=address, heads=heads, page_bytes=layout.page_bytes)


def _check_shard(shard: Shard, layout: KVLayout) -> None:
    heads = shard.heads.span
    if not heads or heads.stop > layout.num_kv_heads:
        raise HandoffRefused(
            Cause.MALFORMED,
            f"a rank receives heads {heads.start}..{heads.stop} of {layout.num_kv_heads} KV heads",
        )
    expected = layout.bytes_of(heads)
    if shard.page_bytes != expected:
        raise HandoffRefused(
            Cause.SIZE,
            f"pages have {expected} bytes here, but {shard.page_bytes} at the receiver",
        )


def parts_of(reservation: Reservation, layout: KVLayout) -> list[PushPart]:
    """The parts that the rank of this layout sends; perhaps none.

    Sending ranks that hold the same heads share the receiving ranks among them. So exactly one
    rank sends a head to a receiving rank.
    """
    parts, seen = [], Counter[Heads]()
    own_copy = layout.rank % layout.copies
    for shard in reservation.shards:
        copy = seen[shard.heads]
        seen[shard.heads] += 1
        first = max(shard.heads.first, layout.heads.start)
        heads = range(first, min(shard.heads.end, layout.heads.stop))
        if heads and copy % layout.copies == own_copy:
            parts.append(PushPart(shard, heads))
    return parts
