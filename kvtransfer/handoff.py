"""The two ends of a handoff as tables, from events to instructions; and the set of aborted
transfers.

No I/O and no clock. ends.py carries out the instructions.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

STORY_LENGTH = 16


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
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: EventT, now: float) -> tuple[DoT, ...]:
        """Takes an event; returns the instructions in order. Raises IllegalHandoffEvent."""
        found = self._table.get((self.state, event))
        if found is None:
            raise IllegalHandoffEvent(
                f"{event.name} cannot happen in {self.state.name}; so far: {self.story()}"
            )
        self._story.append(f"+{now - self.started:.3f}s {self.state.name} {event.name}")
        self.state, to_do = found
        return to_do

    def allows(self, event: EventT) -> bool:
        return (self.state, event) in self._table

    def renew(self, now: float, lease_s: float) -> None:
        self.deadline = now + lease_s

    def is_overdue(self, now: float) -> bool:
        return now >= self.deadline

    def story(self) -> str:
        """The last steps, oldest first."""
        return ", ".join(self._story) or "nothing"


class Tombstones:
    """Aborted transfer ids, each kept for `keep_s` seconds, and only the `most` newest of them."""

    def __init__(self, keep_s: float, most: int = 1 << 16) -> None:
        self._keep_s = keep_s
        self._most = most
        self._since: OrderedDict[str, float] = OrderedDict()  # oldest first

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._since

    def __len__(self) -> int:
        return len(self._since)

    def add(self, transfer_id: str, now: float) -> None:
        """Adds an aborted transfer, and forgets old ones."""
        self._since[transfer_id] = now
        self._since.move_to_end(transfer_id)
        while len(self._since) > self._most or self._oldest() < now - self._keep_s:
            self._since.popitem(last=False)

    def _oldest(self) -> float:
        return next(iter(self._since.values()))
