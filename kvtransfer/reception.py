"""The receiving half of every connector: expected transfers, and their checks.

Nothing is placed or accepted without a check against its reservation. Arrived pages are digested in
the memory that holds them; missing or different ones are refused. Runs on the connector's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import (
    PROMISES,
    ArrivalRefused,
    Cause,
    Fenced,
    HandoffRefused,
    Promised,
)
from effuse.kvtransfer.digest import seal_of
from effuse.kvtransfer.handoff import (
    Arriving,
    Expected,
    check_digest,
    check_pages,
    check_same_prompt,
    check_span,
)
from effuse.kvtransfer.messages import (
    Accepted,
    Begin,
    Envelope,
    Field,
    Finish,
    Manifest,
    Pages,
    Placed,
    ReceiverAddress,
    Rejected,
    Reservation,
    envelope_of,
    mismatch,
)
from effuse.kvtransfer.transport import ConnectorParts, FromWriter, Reply


@dataclass(eq=False)
class Receptions(ConnectorParts):
    """All transfers that may write into one pool."""

    _expected: dict[str, Expected] = field(init=False, default_factory=dict)
    # Abandoned, and perhaps still in progress: the address that their writers know.
    _given_up: dict[str, ReceiverAddress] = field(init=False, default_factory=dict)
    # Those of them whose writer is gone.
    _cut_off: dict[str, ReceiverAddress] = field(init=False, default_factory=dict)
    # One for each writer that died.
    _shut: set[ReceiverAddress] = field(init=False, default_factory=set)
    # Abandoned while copies into pages are running.
    _placing: dict[str, Expected] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def is_moving(self) -> bool:
        """Whether bytes are arriving or are being digested."""
        return any(e.is_moving for e in self._expected.values()) or bool(self._placing)

    @property
    def has_begun(self) -> bool:
        """Whether an accepted writer may write at any moment."""
        return any(e.parts for e in self._expected.values())

    # Requests of the engine.

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on. If its address was shut off since the reservation, it
        is refused immediately, because its writer would get no answer and wait for the whole lease.
        """
        transfer_id = reservation.transfer_id
        layout, since = self._own.layout, self._now()
        self._expected[transfer_id] = expected = Expected(reservation, writer, layout, since)
        if expected.address in self._shut:
            why = "its connection was closed, because another writer on it died"
            self._emit(ArrivalRefused(transfer_id, Cause.PEER, why))
            self.forget(transfer_id)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        expected = self._expected.pop(transfer_id, None)
        if expected is not None:
            self._given_up[transfer_id] = expected.address
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

    def take(self, received: FromWriter) -> None:
        """Follows a writer's message, or refuses its transfer and reports to both sides."""
        message, reply = received.message, received.reply
        transfer_id = envelope_of(message).transfer_id
        try:
            self._handle(received)
        except HandoffRefused as refusal:
            self._refuse(transfer_id, refusal, reply)
        if isinstance(message, Pages) and self._transport.is_two_sided:
            self._transport.answer(reply, Placed(transfer_id, message.first, message.group))

    def turn(self) -> bool:
        """Completes finished transfers; closes addresses to which no writer may write any more."""
        moved = False
        for expected in list(self._expected.values()):
            for part in expected.parts.values():
                if part.is_verified or not part.digests.poll() or part.manifest is None:
                    continue
                moved = True
                if not self._conclude(expected, part, part.manifest):
                    break
        for transfer_id, expected in list(self._placing.items()):
            if expected.take_digests():
                del self._placing[transfer_id]
                self._free(transfer_id)
                moved = True
        if self._cut_off:
            moved |= self._shut_off()
        return moved

    def _handle(self, received: FromWriter) -> None:
        expected = self._identified(envelope_of(received.message))
        match received.message:
            case Begin() as begin:
                self._check_fingerprint(begin.fingerprint)
                self._transport.connect(received.reply, begin)
                is_known = expected.let_in(begin.part, received.reply, self._digester)
                # The first message does not count, unless it is so late that the next one may be
                # too late.
                lease_s = expected.reservation.lease_s
                is_late = self._now() - expected.since > lease_s / PROMISES
                if (is_known or is_late) and expected.parts[begin.part].manifest is None:
                    self._emit(Promised(begin.transfer_id))
            case Pages() as pages:
                self._take_pages(expected, pages, received.payload)
            case Finish() as finish:
                self._take_manifest(expected, finish)

    def _take_pages(self, expected: Expected, pages: Pages, payload: Sequence[memoryview]) -> None:
        part = expected.parts.get(pages.part)
        if part is None:
            raise HandoffRefused(Cause.FINGERPRINT, "pages arrived before their fingerprint")
        check_span(part.pages, pages.first, pages.pages)
        groups = range(pages.group, pages.end_group)
        of_part = pages.part.groups
        if not groups or groups.start < of_part.start or groups.stop > of_part.stop:
            raise HandoffRefused(
                Cause.COVERAGE,
                f"groups {groups.start}..{groups.stop} are not within the groups "
                f"{of_part.start}..{of_part.stop}",
            )
        columns = slice(groups.start - of_part.start, groups.stop - of_part.start)
        covered = part.covered[pages.first : pages.first + len(pages.pages), columns]
        if covered.any():
            raise HandoffRefused(
                Cause.COVERAGE,
                f"pages {pages.first}..{pages.first + len(pages.pages)} overlap earlier ones",
            )
        ids = [page.page_id for page in pages.pages]
        if self._transport.is_two_sided:
            self._check_size(len(ids), groups, pages.part.heads, payload)
            self._transport.place(ids, groups, payload, pages.part.heads)
        elif payload:
            raise HandoffRefused(
                Cause.MALFORMED, "pages arrived both by one-sided write and as bytes"
            )
        covered[:] = True
        part.digests.begin(pages.first, ids, groups)

    def _check_size(
        self, num_pages: int, groups: range, heads: range, payload: Sequence[memoryview]
    ) -> None:
        size = len(heads) * self._own.layout.head_bytes
        count, sizes = num_pages * len(groups), [part.nbytes for part in payload]
        # there is no more room in a GPU's buffers
        if count * size > self._transport.most_bytes:
            raise HandoffRefused(
                Cause.SIZE,
                f"{count * size} bytes in one piece, expected at most {self._transport.most_bytes}",
            )
        if sum(sizes) != count * size or any(nbytes % size for nbytes in sizes):
            raise HandoffRefused(
                Cause.SIZE, f"expected {count} pieces of {size} bytes, got {sizes}"
            )

    def _take_manifest(self, expected: Expected, finish: Finish) -> None:
        manifest = finish.manifest
        if finish.seal != seal_of(manifest, finish.elapsed_us):
            raise HandoffRefused(Cause.SEAL, "the end of the push does not match its digest")
        part = expected.parts.get(manifest.part)
        if part is None:
            raise HandoffRefused(Cause.COVERAGE, "no page of these heads arrived")
        if part.manifest is not None:
            raise HandoffRefused(Cause.MALFORMED, "a second manifest arrived")
        self._check_fingerprint(manifest.fingerprint)
        if (found := manifest.num_bytes) != part.num_bytes:
            raise HandoffRefused(Cause.SIZE, f"expected {part.num_bytes} bytes, got {found}")
        check_pages(part)
        others = [one.manifest for one in expected.parts.values() if one.manifest is not None]
        check_same_prompt(manifest, others)
        part.manifest = manifest
        part.began_at = self._now() - finish.elapsed_us / 1e6

    def _conclude(self, expected: Expected, part: Arriving, manifest: Manifest) -> bool:
        """Verifies a part whose bytes are all here; whether they are right."""
        transfer_id = manifest.transfer_id
        try:
            check_digest(manifest.digest, part.digests.digest())
        except HandoffRefused as refusal:
            self._refuse(transfer_id, refusal, part.reply)
            return False
        part.is_verified = True
        if (arrived := expected.arrived(self._now())) is not None:
            del self._expected[transfer_id]
            self._emit(arrived)
        self._transport.answer(part.reply, Accepted(transfer_id))
        return True

    def _refuse(self, transfer_id: str, refusal: HandoffRefused, reply: Reply) -> None:
        """The only way in which an expected transfer is refused; others just get an answer. The
        writers of its other parts get it too, because they write in vain.
        """
        rejected = Rejected(transfer_id, refusal.cause.value, str(refusal)[:512])
        expected = self._expected.get(transfer_id)
        if expected is not None:
            self._emit(ArrivalRefused(transfer_id, refusal.cause, str(refusal)))
            self.forget(transfer_id)
            for part in expected.parts.values():
                if part.reply != reply and not part.is_verified:
                    self._transport.answer(part.reply, rejected)
        self._transport.answer(reply, rejected)

    def _identified(self, one: Envelope) -> Expected:
        if one.destination != self._own.incarnation:
            raise HandoffRefused(
                Cause.INCARNATION,
                f"the push is for incarnation {one.destination}, this is {self._own.incarnation}",
            )
        transfer_id = one.transfer_id
        expected = self._expected.get(transfer_id)
        if expected is None:
            raise HandoffRefused(
                Cause.UNKNOWN_TRANSFER, f"no transfer {transfer_id} is expected here"
            )
        if one.attempt != (ours := expected.reservation.attempt):
            raise HandoffRefused(Cause.ATTEMPT, f"expected the attempt {ours}, got {one.attempt}")
        if expected.writer is not None and one.source != expected.writer:
            raise HandoffRefused(
                Cause.INCARNATION, f"expected the writer {expected.writer}, got {one.source}"
            )
        return expected

    def _check_fingerprint(self, theirs: Sequence[Field]) -> None:
        found = mismatch(self._own.fingerprint, theirs)
        if found is not None:
            raise HandoffRefused(Cause.FINGERPRINT, str(found))

    # The end of an abandoned transfer.

    def _shut_off(self) -> bool:
        """Shuts off addresses to which only writers that are gone could still write."""
        in_use = {expected.address for expected in self._expected.values()}
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
