"""One push to one receiving rank: its pages, its progress, and its claims at the end.

Bookkeeping only: pushes.py acts on it, and the transport moves the bytes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto

from effuse.kvtransfer.connector import Cause, HandoffRefused, Pending
from effuse.kvtransfer.digest import PageDigests
from effuse.kvtransfer.layout import Identity, KVLayout
from effuse.kvtransfer.messages import (
    MAX_CHUNK_PAGES,
    Begin,
    BoundaryState,
    KVPart,
    MalformedMessage,
    Manifest,
    PageRef,
    Pages,
    ReceiverAddress,
    Reservation,
    Shard,
    check_reservation,
    mismatch,
)
from effuse.kvtransfer.transport import Chunk, Delivery, Peer

LEAST_BYTES = 4 << 20  # of groups of layers that leave before the others


class Stage(IntEnum):
    """How far a push has come."""

    PUSHING = auto()
    FINISHED = auto()  # the manifest was sent
    ACCEPTED = auto()
    OVER = auto()  # accepted, and it reads no pages any more
    FAILED = auto()


@dataclass(slots=True)
class Batch:
    """Pages that one forward makes final, layer by layer."""

    first: int  # index in the reservation
    source_pages: tuple[int, ...]
    num_final: Pending[int] | None
    step: int  # groups that leave together
    num_sent: int = 0  # groups that have left, or wait in the push's queue

    def next_groups(self, num_groups: int, num_before: int = 0) -> range:
        """Groups that may leave now, of so many; the forward stores `num_before` others first."""
        final = num_groups
        if self.num_final is not None:
            final = min(max((self.num_final() or 0) - num_before, 0), num_groups)
        if final < num_groups:
            final = self.num_sent + (final - self.num_sent) // self.step * self.step
        return range(self.num_sent, final)


@dataclass(slots=True)
class Push:
    """One part of an outgoing transfer."""

    reservation: Reservation
    shard: Shard  # of the receiving rank
    part: KVPart
    peer: Peer
    own: Identity
    digests: PageDigests
    known_at: float  # when the reservation was known
    promised_at: float = 0.0  # when the receiver last got the message that pages are still to come
    covered: set[int] = field(default_factory=set)  # indices of pages that were pushed
    batches: list[Batch] = field(default_factory=list)  # not all of whose layers have left
    queue: list[Chunk] = field(default_factory=list)
    deliveries: list[tuple[Delivery, int]] = field(default_factory=list)  # with their bytes
    manifest: Manifest | None = None  # once all pieces are digested
    boundary: Pending[BoundaryState] | None = None
    boundary_state: BoundaryState | None = None  # once it exists
    final_at: float = 0.0  # all pages and the boundary were final no earlier than this
    left_at: float | None = None  # when its first page was
    stage: Stage = Stage.PUSHING
    cancelled_at: float | None = None
    answered_at: float = 0.0  # when its receiver last sent a message, for any push
    pages: tuple[PageRef, ...] = field(init=False)  # the reserved pages that it fills

    def __post_init__(self) -> None:
        self.pages = self.reservation.pages_of(self.shard.part, self.part)

    @property
    def transfer_id(self) -> str:
        return self.reservation.transfer_id

    @property
    def deadline(self) -> float:
        """When the lease ends."""
        return max(self.known_at, self.promised_at) + self.reservation.lease_s

    @property
    def group_bytes(self) -> int:
        """Bytes of its heads in one group of layers of a page."""
        return len(self.part.heads) * self.own.layout.head_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its heads and layers in all of its pages, without boundary state."""
        return len(self.pages) * self.own.layout.bytes_of(self.part.heads, self.part.groups)

    @property
    def bytes_under_way(self) -> int:
        """Bytes of deliveries that have not ended."""
        return sum(num_bytes for _, num_bytes in self.deliveries)

    @property
    def is_quiet(self) -> bool:
        """Whether it reads or writes no pages any more, here or at the peer."""
        return not self.deliveries and not len(self.digests)

    @property
    def is_moving(self) -> bool:
        """Whether it advances by itself, or waits for the receiver's last message."""
        awaits_answer = self.stage in (Stage.FINISHED, Stage.ACCEPTED)
        return not self.is_quiet or bool(self.queue) or awaits_answer

    @property
    def awaits_forward(self) -> bool:
        """Whether a known forward has yet to make layers or the boundary final."""
        has_more = bool(self.batches) or self.boundary is not None
        return has_more and self.stage is Stage.PUSHING

    def begin(self) -> Begin:
        """Its introduction to the receiver."""
        to = self.reservation
        names = to.attempt, self.own.incarnation, to.incarnation
        return Begin(*names, self.part, self.own.fingerprint)

    def header(self, chunk: Chunk) -> Pages:
        """The message that goes with a chunk."""
        to, groups = self.reservation, chunk.groups
        names = to.attempt, self.own.incarnation, to.incarnation
        return Pages(*names, self.part, chunk.first, chunk.targets, groups.start, groups.stop)

    def cover(
        self, source_pages: tuple[int, ...], first: int, num_final: Pending[int] | None
    ) -> None:
        """Adds the pages among these that its rank holds. Raises HandoffRefused if they overlap or
        exceed the reservation."""
        count, layout = self.reservation.num_source_pages, self.own.layout
        rank, degree = layout.context_rank, layout.context_degree
        end = first + degree * len(source_pages)
        if first <= -degree or end >= count + degree:
            raise HandoffRefused(
                Cause.COVERAGE,
                f"pages {first}..{end} are not within the {count} reserved ones",
            )
        moved = self.reservation.moved(self.shard.part, self.part)
        own = dict(zip(range(first + rank, end, degree), source_pages, strict=False))
        if not (places := [at for at in own if at in moved]):
            return
        source_pages, first = tuple(own[at] for at in places), moved.index(places[0])
        span = range(first, first + len(source_pages))
        if not self.covered.isdisjoint(span):
            raise HandoffRefused(Cause.COVERAGE, f"pages {first}..{span.stop} overlap earlier ones")
        self.covered.update(span)
        # groups of layers of this many pages that justify a separate delivery
        step = -(-LEAST_BYTES // (len(source_pages) * self.group_bytes))
        step = min(len(self.part.groups), step)
        self.batches.append(Batch(first, source_pages, num_final, step))

    def queue_final(self, chunk_bytes: int) -> bool:
        """Queues layers that have become final, in chunks of at most so many bytes; whether any
        have."""
        own, before = self.part.groups, len(self.queue)
        num_before = own.start - self.own.layout.groups.start
        for batch in self.batches:
            groups = batch.next_groups(len(own), num_before)
            if groups:
                batch.num_sent = groups.stop
                self.queue += self._chunks(batch, own[groups.start : groups.stop], chunk_bytes)
        self.batches = [batch for batch in self.batches if batch.num_sent < len(own)]
        return len(self.queue) > before

    def _chunks(self, batch: Batch, groups: range, chunk_bytes: int) -> Iterator[Chunk]:
        runs, run_bytes = self.own.layout.runs(groups, self.part.heads)
        most = max(1, min(MAX_CHUNK_PAGES // runs, chunk_bytes // (runs * run_bytes)))
        for at in range(0, len(batch.source_pages), most):
            first, source_pages = batch.first + at, batch.source_pages[at : at + most]
            targets = self.pages[first : first + len(source_pages)]
            yield Chunk(first, source_pages, targets, groups, self.part.heads)

    def stop(self) -> None:
        """It has failed: nothing more leaves."""
        self.stage = Stage.FAILED
        self.queue.clear()
        self.batches.clear()

    def elapsed_s(self, now: float) -> float:
        """Seconds since both the last page was final and the reservation known."""
        return now - max(self.final_at, self.known_at)

    def account(self, boundary: BoundaryState) -> Manifest:
        """The account of the push, made once all of its pieces have been digested.

        Raises HandoffRefused if pages are missing.
        """
        missing = len(self.pages) - len(self.covered)
        if missing:
            raise HandoffRefused(Cause.COVERAGE, f"{missing} pages were not pushed")
        if self.manifest is None:
            self.manifest = Manifest(
                attempt=self.reservation.attempt,
                source=self.own.incarnation,
                destination=self.reservation.incarnation,
                part=self.part,
                fingerprint=self.own.fingerprint,
                digest=self.digests.digest(),
                num_bytes=self.num_bytes,
                boundary=boundary,
            )
        return self.manifest


def check_push(reservation: Reservation, own: Identity, transport: str) -> Reservation:
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
    found = mismatch(own.fingerprint, reservation.fingerprint)
    if found is not None:
        raise HandoffRefused(Cause.FINGERPRINT, str(found))
    for shard in reservation.shards:
        _check_shard(shard, own.layout)
    degree = reservation.context_degree
    for turn in range(degree):
        of_part = f" of part {turn} of {degree} of the context" if degree > 1 else ""
        parts = [one.part for one in reservation.shards if one.part.turn == turn]
        for group in range(own.layout.num_groups):
            held = [one for one in parts if group in one.groups]
            missing = set(range(own.layout.num_kv_heads)).difference(*(one.heads for one in held))
            if missing:
                text = f"no rank receives the KV heads {sorted(missing)}{of_part}"
                if held != parts:
                    text += f" in group {group} of layers"
                raise HandoffRefused(Cause.COVERAGE, text)
    return reservation


def shard_of(layout: KVLayout, address: ReceiverAddress) -> Shard:
    """The address of a pool of this layout, with its share of a page."""
    return Shard(address=address, part=layout.part, page_bytes=layout.page_bytes)


def _check_shard(shard: Shard, layout: KVLayout) -> None:
    heads, groups = shard.part.heads, shard.part.groups
    if not heads or heads.stop > layout.num_kv_heads:
        raise HandoffRefused(
            Cause.MALFORMED,
            f"a rank receives heads {heads.start}..{heads.stop} of {layout.num_kv_heads} KV heads",
        )
    if not groups or groups.stop > layout.num_groups:
        raise HandoffRefused(
            Cause.MALFORMED,
            f"a rank receives groups {groups.start}..{groups.stop} of {layout.num_groups} groups "
            "of layers",
        )
    expected = layout.bytes_of(heads, groups)
    if shard.page_bytes != expected:
        raise HandoffRefused(
            Cause.SIZE,
            f"pages have {expected} bytes here, but {shard.page_bytes} at the receiver",
        )


def parts_of(reservation: Reservation, layout: KVLayout) -> list[tuple[Shard, KVPart]]:
    """The parts that the rank of this layout sends, each with its receiving rank; perhaps none.

    Sending ranks that hold the same heads share the receiving ranks among them. So exactly one
    rank sends a head of a layer to a receiving rank.
    """
    parts, seen, own = [], Counter[tuple[range, range]](), layout.part
    for shard in reservation.shards:
        theirs = shard.part
        copy = seen[theirs.heads, theirs.groups]
        seen[theirs.heads, theirs.groups] += 1
        part = KVPart(
            *(max(own.first_head, theirs.first_head), min(own.end_head, theirs.end_head)),
            *(max(own.first_group, theirs.first_group), min(own.end_group, theirs.end_group)),
            *(own.turn, own.turns),
        )
        if part.heads and part.groups and copy % layout.copies == layout.copy:
            parts.append((shard, part))
    return parts
