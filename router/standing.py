"""What failed calls have told of workers: who takes part in no choice, who comes last, and which
pairs cannot hand over.

A worker that is out stays out until it says itself that it is ready (`hear`), or its life is
over. A handoff that failed is held against the pair; a worker is suspect once two others failed to
hand over with it. Pure, with the clock handed in. Not here: what a failure means (`ladder.py`),
asking workers (`fleet.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from effuse.placement.records import WorkerRecord
from effuse.router.ladder import Failure, FailureKind
from effuse.router.policy import Condition, Pair, WorkerLife

SUSPICION_S: Final = 6.0
"""How long a worker that failed comes after others: longer than its lease (3 s) holds, and than an
engine that hangs may be silent."""

FULL_S: Final = 0.5
"""How long a worker that is full is left alone, where it does not say."""

PAIR_S: Final = 0.5
MOST_PAIR_S: Final = 30.0
"""How long a pair hands nothing over after a handoff that failed; doubled by each in a row."""

DOUBT_S: Final = 60.0
"""How long after that others come first. Then one handoff shows whether the way is open again."""

_ANNOUNCED: Final[Mapping[str, Condition]] = {
    "ready": Condition.READY,
    "starting": Condition.STARTING,
}
"""What a worker that is not out is by its own record; else it takes no more requests."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A life of a worker that is out. `is_heard`: its front has answered since."""

    record: WorkerRecord
    condition: Condition
    is_heard: bool = False


@dataclass(frozen=True, slots=True)
class BrokenPair:
    """Handoffs that failed in a row, and until when no other is tried."""

    failures: int
    until: float


class Standing:
    """One router's account of workers and pairs. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._absent: dict[WorkerLife, Absence] = {}
        self._suspect_until: dict[WorkerLife, float] = {}
        self._full_until: dict[WorkerLife, float] = {}
        self._pairs: dict[Pair, BrokenPair] = {}

    # What is told.

    def note(self, failure: Failure) -> None:
        """Takes a failed attempt into account."""
        record, now = failure.worker, self._now()
        life = record.life
        match failure.outcome:
            case FailureKind.UNREADY | FailureKind.LOST:
                self._absent[life] = Absence(record, failure.condition)
            case FailureKind.FULL:
                wait_s = failure.error.retry_after_s or FULL_S
                self._full_until[life] = now + min(wait_s, SUSPICION_S)
            case FailureKind.HANDOFF if failure.pair is not None:
                self._break(failure.pair, now)
        if failure.outcome in (FailureKind.LOST, FailureKind.FAILED):
            self._suspect_until[life] = now + SUSPICION_S

    def note_try(self, pair: Pair) -> None:
        """A handoff of the pair begins. Where the last one failed, others wait for how it ends: a
        worker that nothing reaches is idle, and all would go there."""
        broken = self._pairs.get(pair)
        if broken is not None and broken.until + DOUBT_S <= self._now():
            self._pairs[pair] = BrokenPair(broken.failures, self._now())

    def note_handoff(self, pair: Pair) -> None:
        """The pair has handed over."""
        self._pairs.pop(pair, None)

    def hear(self, life: WorkerLife, condition: Condition | None) -> bool:
        """What a worker that is out says of itself, None where it does not answer. Whether it is
        back."""
        absence = self._absent.get(life)
        if absence is None:
            return False
        if condition is Condition.READY:
            del self._absent[life]
            return True
        if condition is None:
            self._absent[life] = Absence(absence.record, absence.condition)
        else:
            self._absent[life] = Absence(absence.record, condition, is_heard=True)
        return False

    def forget_gone(self, alive: Collection[WorkerRecord]) -> None:
        """Forgets what is over, given all workers that hold a lease: lives that others have
        followed, and those without a lease whose front is silent."""
        lives, names = {r.life for r in alive}, {r.worker_id for r in alive}
        self._absent = {
            life: one
            for life, one in self._absent.items()
            if life in lives or (one.is_heard and one.record.worker_id not in names)
        }
        now = self._now()
        self._suspect_until = {k: t for k, t in self._suspect_until.items() if t > now}
        self._full_until = {k: t for k, t in self._full_until.items() if t > now}
        self._pairs = {k: p for k, p in self._pairs.items() if lives.issuperset(k)}

    # What is known.

    @property
    def absent(self) -> list[WorkerRecord]:
        """Workers that are out."""
        return [one.record for one in self._absent.values()]

    def condition(self, record: WorkerRecord) -> Condition:
        """Whether it takes part."""
        absence = self._absent.get(record.life)
        if absence is not None:
            return absence.condition
        return _ANNOUNCED.get(record.state, Condition.DRAINING)

    def is_full(self, life: WorkerLife) -> bool:
        """Whether it said a moment ago that it takes no more."""
        until = self._full_until.get(life)
        return until is not None and until > self._now()

    def suspects(self) -> set[WorkerLife]:
        """Workers that come after others."""
        now = self._now()
        failed = {life for life, until in self._suspect_until.items() if until > now}
        return failed | self._blamed()

    def broken_pairs(self) -> set[Pair]:
        """Pairs that hand nothing over now."""
        now = self._now()
        return {pair for pair, broken in self._pairs.items() if broken.until > now}

    def doubtful_pairs(self) -> set[Pair]:
        """Pairs that come after others, broken ones among them."""
        now = self._now()
        return {pair for pair, broken in self._pairs.items() if broken.until + DOUBT_S > now}

    def next_change_s(self) -> float | None:
        """Seconds until a pair may hand over again or a worker is no longer full; None where
        nothing is to be waited for."""
        now = self._now()
        moments = [*self._full_until.values(), *(one.until for one in self._pairs.values())]
        return min((at - now for at in moments if at > now), default=None)

    def _break(self, pair: Pair, now: float) -> None:
        before = self._pairs.get(pair, BrokenPair(0, 0.0))
        if before.until > now:
            return  # begun before that was known
        pause_s = min(PAIR_S * 2.0**before.failures, MOST_PAIR_S)
        self._pairs[pair] = BrokenPair(min(before.failures + 1, 16), now + pause_s)

    def _blamed(self) -> set[WorkerLife]:
        """Decode workers that two prefill workers failed to reach, and prefill workers that failed
        to reach two decode workers which others do reach."""
        pairs = self.doubtful_pairs()
        if not pairs:
            return set()
        decode = _twice(receiver for _, receiver in pairs)
        return decode | _twice(writer for writer, receiver in pairs if receiver not in decode)


def _twice(lives: Iterable[WorkerLife]) -> set[WorkerLife]:
    return {life for life, count in Counter(lives).items() if count > 1}
