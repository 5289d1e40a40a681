"""The receiving half that all connectors share: which transfers may arrive, and what must hold.

Nothing is placed and nothing is accepted that was not checked against its reservation first. The
lock makes forget() final: when it has returned, no byte of that transfer is placed any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.digest import page_digest, seal_of
from effuse.kvtransfer.layout import Fingerprint, mismatch
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import AttemptId, Field, Manifest, PageRef, Reservation


@dataclass(slots=True)
class Expected:
    """One transfer that may arrive; digests hold what was found in memory, by index."""

    reservation: Reservation
    writer: str | None
    introduced: bool = False  # its fingerprint was compared
    digests: dict[int, bytes] = field(default_factory=dict)


class Incoming:
    """Transfers that may write into this pool. Thread-safe."""

    def __init__(self, memory: PageMemory, incarnation: str, fingerprint: Fingerprint) -> None:
        self._memory = memory
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._expected: dict[str, Expected] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on."""
        with self._lock:
            self._expected[reservation.transfer_id] = Expected(reservation, writer)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        with self._lock:
            self._expected.pop(transfer_id, None)

    def knows(self, transfer_id: str) -> bool:
        """Whether this transfer may arrive."""
        return transfer_id in self._expected

    def introduce(
        self, attempt: AttemptId, source: str, destination: str, theirs: Sequence[Field]
    ) -> None:
        """Refuses a writer that means another attempt, life or model. Raises HandoffRefused."""
        with self._lock:
            expected = self._identified(attempt, source, destination)
            self._check_fingerprint(theirs)
            expected.introduced = True

    def place(
        self,
        attempt: AttemptId,
        source: str,
        destination: str,
        first: int,
        pages: Sequence[PageRef],
        payload: Sequence[memoryview],
    ) -> None:
        """Copies whole pages [first, first + n) into the pool and digests what arrived there.

        payload: the bytes of the pages in order, cut at page boundaries. Raises HandoffRefused.
        """
        with self._lock:
            expected = self._identified(attempt, source, destination)
            if not expected.introduced:
                raise HandoffRefused(Cause.FINGERPRINT, "pages came before their fingerprint")
            check_span(expected.reservation, first, pages)
            if any(index in expected.digests for index in range(first, first + len(pages))):
                raise HandoffRefused(
                    Cause.COVERAGE, f"pages {first}..{first + len(pages)} overlap earlier ones"
                )
            for index, (page, data) in enumerate(
                zip(pages, self._cut(pages, payload), strict=True), first
            ):
                self._memory.write_pages(page.page_id, data)
                self._digest(expected, index, (page,))  # while it is in the processor's cache

    def landed(self, attempt: AttemptId, source: str, first: int, count: int) -> None:
        """Digests pages that a one-sided writer says are complete. Raises HandoffRefused."""
        with self._lock:
            expected = self._identified(attempt, source, self._incarnation)
            pages = expected.reservation.pages[first : first + count]
            check_span(expected.reservation, first, pages, count)
            self._digest(expected, first, pages)

    def accept(self, manifest: Manifest, *, one_sided: bool) -> None:
        """Checks all that a manifest claims against the memory; ends the transfer either way.

        one_sided: pages without a digest yet were written by the peer itself and are digested now;
        else they never came. Raises HandoffRefused.
        """
        with self._lock:
            expected = self._identified(
                manifest.attempt, manifest.source_incarnation, manifest.destination_incarnation
            )
            del self._expected[manifest.transfer_id]
            self._check_fingerprint(manifest.fingerprint)
            check_claims(expected.reservation, manifest)
            if one_sided:
                self._digest_missing(expected)
            check_digests(expected.reservation.pages, manifest.page_digests, expected.digests)

    def _identified(self, attempt: AttemptId, source: str, destination: str) -> Expected:
        if destination != self._incarnation:
            raise HandoffRefused(
                Cause.INCARNATION,
                f"meant for incarnation {destination}, this is {self._incarnation}",
            )
        expected = self._expected.get(attempt.transfer_id)
        if expected is None:
            raise HandoffRefused(
                Cause.UNKNOWN_TRANSFER, f"transfer {attempt.transfer_id} is not expected here"
            )
        if attempt != expected.reservation.attempt:
            ours = expected.reservation.attempt
            raise HandoffRefused(Cause.ATTEMPT, f"reserved for {ours}, written for {attempt}")
        if expected.writer is not None and source != expected.writer:
            raise HandoffRefused(
                Cause.INCARNATION, f"writer {expected.writer} is expected, {source} wrote"
            )
        return expected

    def _check_fingerprint(self, theirs: Sequence[Field]) -> None:
        found = mismatch(self._fingerprint, theirs)
        if found is not None:
            raise HandoffRefused(Cause.FINGERPRINT, str(found))

    def _cut(self, pages: Sequence[PageRef], payload: Sequence[memoryview]) -> list[memoryview]:
        """The payload page by page. Raises HandoffRefused where it is not whole pages, or not n."""
        size = self._memory.page_bytes
        sizes = [part.nbytes for part in payload]
        if sum(sizes) != len(pages) * size or any(nbytes % size for nbytes in sizes):
            raise HandoffRefused(
                Cause.SIZE, f"{len(pages)} pages of {size} bytes are expected, got {sizes}"
            )
        return [part[at : at + size] for part in payload for at in range(0, part.nbytes, size)]

    def _digest(self, expected: Expected, first: int, pages: Sequence[PageRef]) -> None:
        for index, page in enumerate(pages, first):
            expected.digests[index] = page_digest(self._memory.read_pages(page.page_id))

    def _digest_missing(self, expected: Expected) -> None:
        for index, page in enumerate(expected.reservation.pages):
            if index not in expected.digests:
                self._digest(expected, index, (page,))


def check_span(
    reservation: Reservation, first: int, pages: Sequence[PageRef], count: int | None = None
) -> None:
    """Pages named by a writer are those reserved at [first, first + n), in this allocation."""
    reserved = reservation.pages[first : first + len(pages)]
    if first < 0 or len(reserved) != len(pages) or count not in (None, len(pages)):
        raise HandoffRefused(
            Cause.COVERAGE,
            f"pages {first}..{first + len(pages)} of {len(reservation.pages)} reserved ones",
        )
    for index, (ours, theirs) in enumerate(zip(reserved, pages, strict=True), first):
        if ours != theirs:
            cause = Cause.GENERATION if ours.page_id == theirs.page_id else Cause.COVERAGE
            raise HandoffRefused(cause, f"page {index}: {ours} is reserved, {theirs} was written")


def check_claims(reservation: Reservation, manifest: Manifest) -> None:
    """Everything a manifest says that needs no look at the memory."""
    if not manifest.seal:
        raise HandoffRefused(Cause.SEAL, "the manifest has no seal")
    if manifest.seal != seal_of(manifest):
        raise HandoffRefused(Cause.SEAL, "the manifest does not match its seal")
    if len(manifest.pages) != len(reservation.pages):
        raise HandoffRefused(
            Cause.COVERAGE,
            f"{len(reservation.pages)} pages are reserved, {len(manifest.pages)} were written",
        )
    check_span(reservation, 0, manifest.pages)
    num_bytes = len(reservation.pages) * reservation.page_bytes
    if manifest.num_bytes != num_bytes:
        raise HandoffRefused(
            Cause.SIZE, f"{num_bytes} bytes are reserved, {manifest.num_bytes} were written"
        )
    if len(manifest.page_digests) != len(manifest.pages):
        raise HandoffRefused(
            Cause.DIGEST, f"{len(manifest.page_digests)} digests for {len(manifest.pages)} pages"
        )


def check_digests(
    pages: Sequence[PageRef], claimed: Sequence[bytes], found: dict[int, bytes]
) -> None:
    """What lies in memory is what was sent, page by page, and every page came."""
    for index, (page, digest) in enumerate(zip(pages, claimed, strict=True)):
        if index not in found:
            raise HandoffRefused(Cause.COVERAGE, f"page {index} ({page}) never arrived")
        if found[index] != digest:
            raise HandoffRefused(
                Cause.DIGEST,
                f"page {index} ({page}): digest {digest.hex()} was sent, "
                f"{found[index].hex()} is in memory",
            )
