"""The rules of a handoff: its two ends as tables, from events to instructions; the conditions that
an expected transfer must meet; and the set of aborted transfers.

No I/O and no clock. ends.py carries out the instructions, and reception.py checks the conditions. A
part of a transfer has the KV heads and layers that one writing rank and this rank both hold.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from effuse.kvtransfer.connector import Arrived, Cause, HandoffRefused
from effuse.kvtransfer.digest import Digester, PageDigests
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.messages import (
    KVPart,
    Manifest,
    PageRef,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.transport import Reply

HISTORY_LENGTH = 16


class ReceiverState(Enum):
    """State of a reservation, on the decode side."""

    RESERVED = auto()  # pages held, no writer knows them
    RECEIVING = auto()  # a writer may write at any time
    ABORTING = auto()  # abandoned; the writer may still write
    FENCING = auto()  # abandoned; the writer has stopped, but its bytes may be on their way
    VERIFIED = auto()  # ended: the pages belong to the sequence
    RELEASED = auto()  # ended: the pages are free


class ReceiverEvent(Enum):
    OFFERED = auto()
    ARRIVED = auto()  # complete and verified
    REFUSED = auto()  # it arrived and was wrong
    EXPIRED = auto()
    ABORTED = auto()
    WRITER_GONE = auto()
    FENCED = auto()  # from the connector: nothing of it arrives any more


class ReceiverDo(Enum):
    OPEN_PAGES = auto()
    EXPECT = auto()
    FORGET = auto()
    COMMIT_PAGES = auto()
    QUARANTINE_PAGES = auto()
    FENCE = auto()
    FREE_PAGES = auto()
    REPORT_VERIFIED = auto()
    REPORT_FAILED = auto()


R: TypeAlias = ReceiverState
E: TypeAlias = ReceiverEvent
D: TypeAlias = ReceiverDo
_GIVE_UP = (D.FORGET, D.QUARANTINE_PAGES)

RECEIVER: Mapping[tuple[R, E], tuple[R, tuple[D, ...]]] = {
    (R.RESERVED, E.OFFERED): (R.RECEIVING, (D.OPEN_PAGES, D.EXPECT)),
    (R.RECEIVING, E.ARRIVED): (R.VERIFIED, (D.COMMIT_PAGES, D.REPORT_VERIFIED)),
    (R.RECEIVING, E.REFUSED): (R.ABORTING, (*_GIVE_UP, D.REPORT_FAILED)),
    (R.RECEIVING, E.EXPIRED): (R.ABORTING, (*_GIVE_UP, D.REPORT_FAILED)),
    (R.RECEIVING, E.ABORTED): (R.ABORTING, _GIVE_UP),
    (R.RECEIVING, E.WRITER_GONE): (R.FENCING, (*_GIVE_UP, D.FENCE, D.REPORT_FAILED)),
    (R.ABORTING, E.ARRIVED): (R.ABORTING, ()),
    (R.ABORTING, E.REFUSED): (R.ABORTING, ()),
    (R.ABORTING, E.ABORTED): (R.ABORTING, ()),
    (R.ABORTING, E.WRITER_GONE): (R.FENCING, (D.FENCE,)),
    (R.ABORTING, E.FENCED): (R.RELEASED, (D.FREE_PAGES,)),
    (R.FENCING, E.ARRIVED): (R.FENCING, ()),
    (R.FENCING, E.REFUSED): (R.FENCING, ()),
    (R.FENCING, E.ABORTED): (R.FENCING, ()),
    (R.FENCING, E.WRITER_GONE): (R.FENCING, ()),
    (R.FENCING, E.FENCED): (R.RELEASED, (D.FREE_PAGES,)),
}


class SenderState(Enum):
    """State of a prompt's handoff, on the prefill side."""

    COMPUTING = auto()  # no reservation yet
    COMPUTED = auto()  # no reservation yet; all of it is computed or in a forward
    PUSHING = auto()  # reservation known, prompt not done
    FINISHING = auto()  # everything is pushed, but not acknowledged
    DRAINING = auto()  # abandoned; writes may be in flight
    ENDED = auto()


class SenderEvent(Enum):
    ADDRESSED = auto()  # the reservation arrived
    PAGES_READY = auto()
    COMPUTED = auto()
    ACKNOWLEDGED = auto()
    FAILED = auto()  # by the push
    EXPIRED = auto()  # no reservation arrived, or the connector is silent
    ABORTED = auto()
    DRAINED = auto()


class SenderDo(Enum):
    PUSH = auto()  # pages that are ready and not pushed yet
    FINISH = auto()
    CANCEL = auto()
    FREE_PAGES = auto()
    REPORT_PUSHED = auto()
    REPORT_FAILED = auto()


S: TypeAlias = SenderState
F: TypeAlias = SenderEvent
G: TypeAlias = SenderDo

SENDER: Mapping[tuple[S, F], tuple[S, tuple[G, ...]]] = {
    (S.COMPUTING, F.ADDRESSED): (S.PUSHING, (G.PUSH,)),
    (S.COMPUTING, F.PAGES_READY): (S.COMPUTING, ()),
    (S.COMPUTING, F.COMPUTED): (S.COMPUTED, ()),
    (S.COMPUTING, F.ABORTED): (S.ENDED, (G.FREE_PAGES,)),
    (S.COMPUTED, F.ADDRESSED): (S.FINISHING, (G.PUSH, G.FINISH)),
    (S.COMPUTED, F.EXPIRED): (S.ENDED, (G.REPORT_FAILED, G.FREE_PAGES)),
    (S.COMPUTED, F.ABORTED): (S.ENDED, (G.FREE_PAGES,)),
    (S.PUSHING, F.PAGES_READY): (S.PUSHING, (G.PUSH,)),
    (S.PUSHING, F.COMPUTED): (S.FINISHING, (G.PUSH, G.FINISH)),
    (S.PUSHING, F.FAILED): (S.DRAINING, (G.CANCEL, G.REPORT_FAILED)),
    (S.PUSHING, F.EXPIRED): (S.DRAINING, (G.CANCEL, G.REPORT_FAILED)),
    (S.PUSHING, F.ABORTED): (S.DRAINING, (G.CANCEL,)),
    (S.FINISHING, F.ACKNOWLEDGED): (S.ENDED, (G.REPORT_PUSHED, G.FREE_PAGES)),
    (S.FINISHING, F.FAILED): (S.DRAINING, (G.CANCEL, G.REPORT_FAILED)),
    (S.FINISHING, F.EXPIRED): (S.DRAINING, (G.CANCEL, G.REPORT_FAILED)),
    (S.FINISHING, F.ABORTED): (S.DRAINING, (G.CANCEL,)),
    (S.DRAINING, F.ACKNOWLEDGED): (S.DRAINING, ()),
    (S.DRAINING, F.FAILED): (S.DRAINING, ()),
    (S.DRAINING, F.ABORTED): (S.DRAINING, ()),
    (S.DRAINING, F.DRAINED): (S.ENDED, (G.FREE_PAGES,)),
}


class IllegalHandoffEvent(RuntimeError):
    """A bug: an event that cannot happen in this state."""


StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)
DoT = TypeVar("DoT", bound=Enum)


class Machine(Generic[StateT, EventT, DoT]):
    """One life according to a table, with a lease; it remembers its last steps for error texts."""

    def __init__(
        self,
        table: Mapping[tuple[StateT, EventT], tuple[StateT, tuple[DoT, ...]]],
        start: StateT,
        now: float,
        lease_s: float,
    ) -> None:
        self._table = table
        self.state = start
        self.started = now
        self.deadline = now + lease_s
        self._history: deque[str] = deque(maxlen=HISTORY_LENGTH)

    def handle(self, event: EventT, now: float) -> tuple[DoT, ...]:
        """Takes an event; returns the instructions in order. Raises IllegalHandoffEvent."""
        found = self._table.get((self.state, event))
        if found is None:
            raise IllegalHandoffEvent(
                f"{event.name} cannot happen in {self.state.name}; so far: {self.history()}"
            )
        self._history.append(f"+{now - self.started:.3f}s {self.state.name} {event.name}")
        self.state, to_do = found
        return to_do

    def allows(self, event: EventT) -> bool:
        return (self.state, event) in self._table

    def renew(self, now: float, lease_s: float) -> None:
        self.deadline = now + lease_s

    def is_overdue(self, now: float) -> bool:
        return now >= self.deadline

    def history(self) -> str:
        """The last steps, oldest first."""
        return ", ".join(self._history) or "nothing"


@dataclass(slots=True)
class Arriving:
    """One part of a transfer, which one writer sends, and its arrived pages."""

    part: KVPart
    reply: Reply  # of the accepted writer
    pages: tuple[PageRef, ...]  # of its turns
    num_bytes: int  # of its heads and layers in these pages
    covered: npt.NDArray[np.bool_]  # [pages, groups] that arrived
    digests: PageDigests  # found in memory
    manifest: Manifest | None = None
    began_at: float = 0.0  # when its last page was final, by our clock; set with the manifest
    is_verified: bool = False


@dataclass(slots=True)
class Expected:
    """One expected transfer, and its parts that have begun. All parts have equally many turns."""

    reservation: Reservation
    writer: str | None  # incarnation of the only allowed writer, if that is known
    layout: KVLayout
    since: float
    parts: dict[KVPart, Arriving] = field(default_factory=dict)

    @property
    def address(self) -> ReceiverAddress:
        """The address of this rank that its writers got."""
        return self.reservation.shards[self.layout.rank].address

    @property
    def is_moving(self) -> bool:
        """Whether bytes are arriving or are being digested."""
        return any(len(part.digests) or part.covered.any() for part in self.parts.values())

    def take_digests(self) -> bool:
        """Takes finished digests; returns whether all are."""
        are_done = [part.digests.poll() for part in self.parts.values()]
        return all(are_done)

    def let_in(self, part: KVPart, reply: Reply, digester: Digester) -> bool:
        """Accepts a part's writer; returns whether the part had begun before. Raises
        HandoffRefused for heads or layers that are not all here, or that another part has.
        """
        if part in self.parts:
            self.parts[part].reply = reply
            return True
        self._check_part(part)
        turns = next(iter(self.parts), part).turns
        if part.turn >= part.turns or part.turns != turns:
            text = f"context part {part.turn} of {part.turns} was sent, expected one of {turns}"
            raise HandoffRefused(Cause.COVERAGE, text)
        own = self.reservation.shards[self.layout.rank].part
        pages = self.reservation.pages_of(own, part)
        covered = np.zeros((len(pages), len(part.groups)), dtype=np.bool_)
        seed = self.reservation.digest_seed
        digests = PageDigests(digester, self.layout, part, len(pages), seed)
        num_bytes = len(pages) * self.layout.bytes_of(part.heads, part.groups)
        self.parts[part] = Arriving(part, reply, pages, num_bytes, covered, digests)
        return False

    def _check_part(self, part: KVPart) -> None:
        """All of it is here, and none of it is another part's."""
        for name, sent, own in (
            ("heads", part.heads, self.layout.heads),
            ("groups", part.groups, self.layout.groups),
        ):
            if not sent or sent.start < own.start or sent.stop > own.stop:
                text = (
                    f"{name} {sent.start}..{sent.stop} were sent, expected {own.start}..{own.stop}"
                )
                raise HandoffRefused(Cause.COVERAGE, text)
        for other in self.parts:
            is_same = other.turn == part.turn and _overlap(part.groups, other.groups)
            if is_same and _overlap(part.heads, other.heads):
                text = (
                    f"heads {part.first_head}..{part.end_head} overlap "
                    f"{other.first_head}..{other.end_head}"
                )
                raise HandoffRefused(Cause.COVERAGE, text)

    def arrived(self, now: float) -> Arrived | None:
        """The event for the engine, once all heads, layers and turns of this rank are verified."""
        order = sorted(self.parts, key=lambda one: (one.turn, one.first_head))
        parts = [self.parts[one] for one in order]
        expected = len(self.layout.heads) * len(self.layout.groups) * order[0].turns
        verified = [one.part for one in parts if one.is_verified]
        if sum(len(one.heads) * len(one.groups) for one in verified) < expected:
            return None
        manifest = parts[0].manifest
        assert manifest is not None, "it was verified"
        seconds = now - max(part.began_at for part in parts)
        num_bytes = sum(part.num_bytes for part in parts)
        return Arrived(manifest.transfer_id, manifest, seconds, num_bytes)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def check_span(reserved_pages: Sequence[PageRef], first: int, pages: Sequence[PageRef]) -> None:
    """The pages that a writer names are those reserved at [first, first + n), in this
    allocation.
    """
    reserved = tuple(reserved_pages[first : first + len(pages)])
    if first < 0 or len(reserved) != len(pages):
        raise HandoffRefused(
            Cause.COVERAGE,
            f"pages {first}..{first + len(pages)} are not within the {len(reserved_pages)} "
            "reserved ones",
        )
    if reserved == tuple(pages):
        return
    for index, (ours, theirs) in enumerate(zip(reserved, pages, strict=True), first):
        if ours != theirs:
            cause = Cause.GENERATION if ours.page_id == theirs.page_id else Cause.COVERAGE
            raise HandoffRefused(cause, f"page {index}: expected {ours}, got {theirs}")


def check_pages(part: Arriving) -> None:
    """Every group of layers of every page arrived."""
    missing = np.flatnonzero(~part.covered.all(axis=1))
    if len(missing):
        index = int(missing[0])
        raise HandoffRefused(Cause.COVERAGE, f"page {index} ({part.pages[index]}) never arrived")


def check_same_prompt(manifest: Manifest, others: Sequence[Manifest]) -> None:
    """All parts of a transfer are of one prompt. The hidden row is not compared, because ranks may
    round it differently.
    """
    own = msgspec.structs.replace(manifest.boundary, hidden=None)
    for other in others:
        if msgspec.structs.replace(other.boundary, hidden=None) != own:
            raise HandoffRefused(Cause.MALFORMED, "the parts are of different prompts")


def check_digest(claimed: bytes, found: bytes) -> None:
    """The bytes in memory are those that were sent."""
    if claimed != found:
        raise HandoffRefused(
            Cause.DIGEST,
            f"the sender's digest of the pages is {claimed.hex()}, the memory's is {found.hex()}",
        )
