"""The sending half that all connectors share: one push, what it covers and what it will claim.

Bookkeeping only; how bytes travel is the connector's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.digest import ReadablePages, page_digest, sealed
from effuse.kvtransfer.layout import Fingerprint, mismatch
from effuse.kvtransfer.messages import (
    BoundaryState,
    MalformedMessage,
    Manifest,
    PageRef,
    Reservation,
    check_reservation,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who pushes: what a manifest says of its writer."""

    incarnation: str
    fingerprint: Fingerprint
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages [first, first + n) of a reservation and where their bytes lie here."""

    first: int
    source_pages: tuple[int, ...]
    targets: tuple[PageRef, ...]


@dataclass(slots=True)
class Push:
    """One push in progress."""

    reservation: Reservation
    started: float
    digests: dict[int, bytes] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)
    boundary: BoundaryState | None = None

    @property
    def deadline(self) -> float:
        """When the lease ends, on the clock of `started`."""
        return self.started + self.reservation.lease_s

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, boundary state left out."""
        return len(self.reservation.pages) * self.reservation.page_bytes

    def cover(self, source_pages: Sequence[int], first: int) -> Chunk:
        """Takes note of pages to be pushed. Raises HandoffRefused where they overlap or overrun."""
        span = range(first, first + len(source_pages))
        if first < 0 or span.stop > len(self.reservation.pages):
            raise HandoffRefused(
                Cause.COVERAGE,
                f"pages {first}..{span.stop} of {len(self.reservation.pages)} reserved ones",
            )
        if not self.covered.isdisjoint(span):
            raise HandoffRefused(Cause.COVERAGE, f"pages {first}..{span.stop} overlap earlier ones")
        self.covered.update(span)
        return Chunk(first, tuple(source_pages), self.reservation.pages[first : span.stop])

    def digest(self, memory: ReadablePages, chunk: Chunk) -> None:
        """Digests the pages of a chunk where they lie."""
        for index, page_id in enumerate(chunk.source_pages, chunk.first):
            self.digests[index] = page_digest(memory.read_pages(page_id))

    def manifest(self, origin: Origin) -> Manifest:
        """The sealed account of the push. Raises HandoffRefused while pages are missing."""
        missing = len(self.reservation.pages) - len(self.digests)
        if missing or self.boundary is None:
            raise HandoffRefused(Cause.COVERAGE, f"{missing} pages were never pushed")
        return sealed(
            Manifest(
                attempt=self.reservation.attempt,
                source_incarnation=origin.incarnation,
                destination_incarnation=self.reservation.incarnation,
                fingerprint=origin.fingerprint,
                pages=self.reservation.pages,
                page_digests=tuple(digest for _, digest in sorted(self.digests.items())),
                num_bytes=self.num_bytes,
                boundary=self.boundary,
            )
        )


def checked_push(reservation: Reservation, origin: Origin, connector: str, now: float) -> Push:
    """A push into this reservation, if it may be. Raises HandoffRefused, naming both sides."""
    try:
        reservation = check_reservation(reservation)
    except MalformedMessage as error:
        raise HandoffRefused(Cause.MALFORMED, f"reservation: {error}") from error
    if reservation.address.connector != connector:
        raise HandoffRefused(
            Cause.PEER,
            f"the reservation is for {reservation.address.connector}, this is {connector}",
        )
    found = mismatch(origin.fingerprint, reservation.fingerprint)
    if found is not None:
        raise HandoffRefused(Cause.FINGERPRINT, str(found))
    if reservation.page_bytes != origin.page_bytes:
        raise HandoffRefused(
            Cause.SIZE, f"pages have {origin.page_bytes} bytes here, {reservation.page_bytes} there"
        )
    return Push(reservation, now)


def split(chunk: Chunk, most: int) -> list[Chunk]:
    """The chunk in pieces of at most `most` pages."""
    return [
        Chunk(
            chunk.first + start,
            chunk.source_pages[start : start + most],
            chunk.targets[start : start + most],
        )
        for start in range(0, len(chunk.source_pages), most)
    ]
