"""The receiving half of every connector: expected transfers, and their checks.

Nothing is placed or accepted without a check against its reservation. Arrived pages are digested in
the memory that holds them; missing or different ones are refused. Runs on the connector's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from effuse.kvtransfer.connector import (
    PROMISES,
    ArrivalRefused,
    Arrived,
    Cause,
    ConnectorEvent,
    Fenced,
    HandoffRefused,
    Promised,
)
from effuse.kvtransfer.digest import (
    Digester,
    DigestJob,
    PieceDigests,
    pages_digest,
    pieces_in_group,
    seal_of,
)
from effuse.kvtransfer.layout import Fingerprint, KVLayout, mismatch
from effuse.kvtransfer.messages import (
    Accepted,
    AttemptId,
    Begin,
    Field,
    Finish,
    Manifest,
    PageRef,
    Pages,
    Placed,
    ReceiverAddress,
    Rejected,
    Reservation,
    attempt_of,
)
from effuse.kvtransfer.transport import FromWriter, Reply, Transport


@dataclass(frozen=True, slots=True)
class Destination:
    """The receiver's identity, which a writer must name."""

    incarnation: str
    fingerprint: Fingerprint
    layout: KVLayout


@dataclass(slots=True)
class Expected:
    """One expected transfer, and its arrived parts."""

    reservation: Reservation
    writer: str | None  # incarnation of the only allowed writer, if that is known
    layout: KVLayout
    since: float
    reply: Reply | None = None  # of the accepted writer
    covered: npt.NDArray[np.bool_] = field(init=False)  # [pages, groups] that arrived
    pieces: PieceDigests = field(init=False)  # [pages, pieces] found in memory
    digesting: list[tuple[Pages, DigestJob]] = field(default_factory=list)
    manifest: Manifest | None = None
    began_at: float = 0.0  # when its last page was final, by our clock; set with the manifest

    def __post_init__(self) -> None:
        num_pages, groups = len(self.reservation.pages), self.layout.num_groups
        self.covered = np.zeros((num_pages, groups), dtype=np.bool_)
        self.pieces = np.zeros((num_pages, groups * pieces_in_group(self.layout)), dtype=np.int64)

    def span(self, pages: Pages) -> tuple[slice, slice]:
        """Indices of these pages and groups in `covered`."""
        return (
            slice(pages.first, pages.first + len(pages.pages)),
            slice(pages.group, pages.end_group),
        )

    def take_digests(self) -> bool:
        """Takes finished digests; returns whether all are."""
        if not self.digesting:
            return True
        left = []
        width = pieces_in_group(self.layout)
        for pages, job in self.digesting:
            found = job.poll()
            if found is None:
                left.append((pages, job))
                continue
            rows, groups = self.span(pages)
            self.pieces[rows, groups.start * width : groups.stop * width] = found
        self.digesting = left
        return not left


class Receptions:
    """All transfers that may write into one pool."""

    def __init__(
        self,
        transport: Transport,
        digester: Digester,
        destination: Destination,
        emit: Callable[[ConnectorEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._digester = digester
        self._destination = destination
        self._emit = emit
        self._now = now
        self._expected: dict[str, Expected] = {}
        # Abandoned, and perhaps still in progress: the address that their writers know.
        self._given_up: dict[str, ReceiverAddress] = {}
        self._cut_off: dict[str, ReceiverAddress] = {}  # those of them whose writer is gone
        self._shut: set[ReceiverAddress] = set()  # one for each writer that died
        self._placing: dict[str, Expected] = {}  # abandoned while copies into pages are running

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def is_moving(self) -> bool:
        """Whether bytes are arriving or are being digested."""
        has_some = any(e.digesting or e.covered.any() for e in self._expected.values())
        return has_some or bool(self._placing)

    @property
    def has_begun(self) -> bool:
        """Whether an accepted writer may write at any moment."""
        return any(e.reply is not None for e in self._expected.values())

    # Requests of the engine.

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on. If its address was shut off since the reservation, it
        is refused immediately, because its writer would get no answer and wait for the whole lease.
        """
        transfer_id = reservation.transfer_id
        layout, since = self._destination.layout, self._now()
        self._expected[transfer_id] = Expected(reservation, writer, layout, since)
        if reservation.address in self._shut:
            why = "its connection was shut off, because another writer on it died"
            self._emit(ArrivalRefused(transfer_id, Cause.PEER, why))
            self.forget(transfer_id)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        expected = self._expected.pop(transfer_id, None)
        if expected is not None:
            self._given_up[transfer_id] = expected.reservation.address
        if not self._transport.is_two_sided or transfer_id in self._placing:
            return  # the latter: it was refused here, and the engine follows
        if expected is None or expected.take_digests():
            self._free(transfer_id)
        else:  # a device digests after its copy
            self._placing[transfer_id] = expected

    def fence(self, transfer_id: str, *, has_drained: bool) -> None:
        """The writer of a forgotten transfer has finished or is gone; see Connector.fence."""
        address = self._given_up.get(transfer_id)
        if self._transport.is_two_sided:
            return  # forgetting was enough
        if address is None or has_drained:
            self._free(transfer_id)
            return
        self._cut_off[transfer_id] = address
        self._transport.renew(address)

    # Messages of writers.

    def take(self, heard: FromWriter) -> None:
        """Follows a writer's message, or refuses its transfer and reports to both sides."""
        message = heard.message
        transfer_id = attempt_of(message).transfer_id
        try:
            self._obey(heard)
        except HandoffRefused as refusal:
            self._refuse(transfer_id, refusal, heard.reply)
        if isinstance(message, Pages) and self._transport.is_two_sided:
            self._transport.answer(heard.reply, Placed(transfer_id, message.first, message.group))

    def turn(self) -> bool:
        """Completes finished transfers; closes addresses to which no writer may write any more."""
        moved = False
        for expected in list(self._expected.values()):
            if expected.take_digests() and expected.manifest is not None:
                self._conclude(expected, expected.manifest)
                moved = True
        for transfer_id, expected in list(self._placing.items()):
            if expected.take_digests():
                del self._placing[transfer_id]
                self._free(transfer_id)
                moved = True
        if self._cut_off:
            moved |= self._shut_off()
        return moved

    def _obey(self, heard: FromWriter) -> None:
        match heard.message:
            case Begin() as begin:
                expected = self._identified(begin.attempt, begin.source, begin.destination)
                self._check_fingerprint(begin.fingerprint)
                self._transport.learn(heard.reply, begin)
                # The first message does not count, unless it is so late that the next one may be
                # too late.
                lease_s = expected.reservation.lease_s
                is_late = self._now() - expected.since > lease_s / PROMISES
                if (expected.reply is not None or is_late) and expected.manifest is None:
                    self._emit(Promised(begin.attempt.transfer_id))
                expected.reply = heard.reply
            case Pages() as pages:
                self._take_pages(pages, heard.payload)
            case Finish() as finish:
                self._take_manifest(finish)

    def _take_pages(self, pages: Pages, payload: Sequence[memoryview]) -> None:
        expected = self._identified(pages.attempt, pages.source, pages.destination)
        if expected.reply is None:
            raise HandoffRefused(Cause.FINGERPRINT, "pages arrived before their fingerprint")
        check_span(expected.reservation, pages.first, pages.pages)
        groups = range(pages.group, pages.end_group)
        if not groups or groups.stop > expected.layout.num_groups:
            raise HandoffRefused(
                Cause.COVERAGE,
                f"groups {groups.start}..{groups.stop} are not within the "
                f"{expected.layout.num_groups} groups",
            )
        span = expected.span(pages)
        if expected.covered[span].any():
            raise HandoffRefused(
                Cause.COVERAGE,
                f"pages {pages.first}..{pages.first + len(pages.pages)} overlap earlier ones",
            )
        ids = [page.page_id for page in pages.pages]
        if self._transport.is_two_sided:
            self._check_size(len(ids), groups, payload)
            self._transport.place(ids, groups, payload)
        elif payload:
            raise HandoffRefused(Cause.MALFORMED, "written pages also arrived as bytes")
        expected.covered[span] = True
        job = self._digester.begin(ids, groups, expected.reservation.digest_seed)
        expected.digesting.append((pages, job))

    def _check_size(self, num_pages: int, groups: range, payload: Sequence[memoryview]) -> None:
        size = len(groups) * self._destination.layout.group_bytes
        sizes = [part.nbytes for part in payload]
        # there is no more room in a GPU's buffers
        if num_pages * size > self._transport.chunk_bytes:
            raise HandoffRefused(
                Cause.SIZE,
                f"{num_pages * size} bytes in one piece, expected at most "
                f"{self._transport.chunk_bytes}",
            )
        if sum(sizes) != num_pages * size or any(nbytes % size for nbytes in sizes):
            raise HandoffRefused(
                Cause.SIZE, f"expected {num_pages} pieces of {size} bytes, got {sizes}"
            )

    def _take_manifest(self, finish: Finish) -> None:
        manifest = finish.manifest
        expected = self._identified(
            manifest.attempt, manifest.source_incarnation, manifest.destination_incarnation
        )
        if expected.manifest is not None:
            raise HandoffRefused(Cause.MALFORMED, "a second manifest arrived")
        if finish.seal != seal_of(manifest, finish.elapsed_us):
            raise HandoffRefused(Cause.SEAL, "the end of the push does not match its seal")
        self._check_fingerprint(manifest.fingerprint)
        check_num_bytes(expected.reservation, manifest.num_bytes)
        missing = np.flatnonzero(~expected.covered.all(axis=1))
        if len(missing):
            index = int(missing[0])
            page = expected.reservation.pages[index]
            raise HandoffRefused(Cause.COVERAGE, f"page {index} ({page}) never arrived")
        expected.manifest = manifest
        expected.began_at = self._now() - finish.elapsed_us / 1e6

    def _conclude(self, expected: Expected, manifest: Manifest) -> None:
        transfer_id = manifest.transfer_id
        try:
            check_digest(manifest.digest, pages_digest(expected.pieces))
        except HandoffRefused as refusal:
            assert expected.reply is not None, "its manifest was accepted"
            self._refuse(transfer_id, refusal, expected.reply)
            return
        del self._expected[transfer_id]
        self._emit(Arrived(transfer_id, manifest, self._now() - expected.began_at))
        if expected.reply is not None:
            self._transport.answer(expected.reply, Accepted(transfer_id))

    def _refuse(self, transfer_id: str, refusal: HandoffRefused, reply: Reply) -> None:
        """The only way in which an expected transfer is refused; others just get an answer."""
        if transfer_id in self._expected:
            self._emit(ArrivalRefused(transfer_id, refusal.cause, str(refusal)))
            self.forget(transfer_id)
        rejected = Rejected(transfer_id, refusal.cause.value, str(refusal)[:512])
        self._transport.answer(reply, rejected)

    def _identified(self, attempt: AttemptId, source: str, destination: str) -> Expected:
        own = self._destination.incarnation
        if destination != own:
            raise HandoffRefused(
                Cause.INCARNATION, f"it is for incarnation {destination}, this is {own}"
            )
        expected = self._expected.get(attempt.transfer_id)
        if expected is None:
            raise HandoffRefused(
                Cause.UNKNOWN_TRANSFER, f"no transfer {attempt.transfer_id} is expected here"
            )
        if attempt != expected.reservation.attempt:
            ours = expected.reservation.attempt
            raise HandoffRefused(Cause.ATTEMPT, f"expected the attempt {ours}, got {attempt}")
        if expected.writer is not None and source != expected.writer:
            raise HandoffRefused(
                Cause.INCARNATION, f"expected the writer {expected.writer}, got {source}"
            )
        return expected

    def _check_fingerprint(self, theirs: Sequence[Field]) -> None:
        found = mismatch(self._destination.fingerprint, theirs)
        if found is not None:
            raise HandoffRefused(Cause.FINGERPRINT, str(found))

    # The end of an abandoned transfer.

    def _shut_off(self) -> bool:
        """Shuts off addresses to which only writers that are gone could still write."""
        in_use = {expected.reservation.address for expected in self._expected.values()}
        unused = set(self._cut_off.values()) - in_use
        for address in unused:
            self._transport.shut_off(address)
        self._shut |= unused
        for transfer_id, address in list(self._cut_off.items()):
            if address in unused:
                self._free(transfer_id)
        return bool(unused)

    def _free(self, transfer_id: str) -> None:
        self._given_up.pop(transfer_id, None)
        self._cut_off.pop(transfer_id, None)
        self._emit(Fenced(transfer_id))


def check_span(reservation: Reservation, first: int, pages: Sequence[PageRef]) -> None:
    """The pages that a writer names are those reserved at [first, first + n), in this
    allocation.
    """
    reserved = reservation.pages[first : first + len(pages)]
    if first < 0 or len(reserved) != len(pages):
        raise HandoffRefused(
            Cause.COVERAGE,
            f"pages {first}..{first + len(pages)} are not within the {len(reservation.pages)} "
            "reserved ones",
        )
    if reserved == tuple(pages):
        return
    for index, (ours, theirs) in enumerate(zip(reserved, pages, strict=True), first):
        if ours != theirs:
            cause = Cause.GENERATION if ours.page_id == theirs.page_id else Cause.COVERAGE
            raise HandoffRefused(cause, f"page {index}: expected {ours}, got {theirs}")


def check_num_bytes(reservation: Reservation, written: int) -> None:
    """The writer's count of bytes equals the reserved bytes."""
    num_bytes = len(reservation.pages) * reservation.page_bytes
    if written != num_bytes:
        raise HandoffRefused(Cause.SIZE, f"expected {num_bytes} bytes, got {written}")


def check_digest(claimed: bytes, found: bytes) -> None:
    """The bytes in memory are those that were sent."""
    if claimed != found:
        raise HandoffRefused(
            Cause.DIGEST,
            f"the sender's digest of the pages is {claimed.hex()}, the memory's is {found.hex()}",
        )
