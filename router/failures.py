"""The meaning of failed attempts for the request, for the workers they failed at, and for the next
attempt.

Some failures are no attempts at all: a worker was starting, draining or full. Others are losses. A
request may have few of them in a row without a new block, and all requests together a share.

A worker that is out stays out until it reports that it is ready (`note_condition`), or its
incarnation ends. A handoff that failed counts against the pair; a worker is suspect once handoffs
with two others failed. Pure, with the clock as an argument. Not here: the reaction to a failure
(`answer.py`), asking workers (`calls.py`), engines that die of a request (`poison.py`)."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, get_args

from msgspec.structs import replace

from effuse.placement.records import Role, WorkerRecord
from effuse.protos.errors import (
    Aborted,
    Bug,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EffuseError,
    EngineLost,
    OtherRole,
    Overloaded,
    PeerLost,
    Refused,
    Replaced,
    Starting,
    TransferFailed,
    Unavailable,
    Unreserved,
)
from effuse.router.policy import Condition, Pair, Placement, WorkerLife


class FailureKind(Enum):
    """How an attempt failed."""

    UNREADY = "not ready"  # no attempt: the worker takes part in no choice until it is
    ROLE = "of another role"  # no attempt: the worker takes no such work now
    FULL = "full"  # no attempt: later again, or elsewhere
    LATE = "late"  # no attempt: no pages were free in time for a computed prompt
    LOST = "lost"  # the worker's engine or the worker has ended, or it cannot be reached
    HANDOFF = "no handoff"  # between the two of a pair
    FAILED = "failed"  # in any other way that another worker may not
    FINAL = "final"  # no attempt can do better


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
REFUSALS: Final = frozenset(
    {FailureKind.UNREADY, FailureKind.ROLE, FailureKind.FULL, FailureKind.LATE}
)

_MEANINGS: Final[Mapping[type[EffuseError], tuple[FailureKind, Condition]]] = {
    Starting: (FailureKind.UNREADY, Condition.STARTING),
    Draining: (FailureKind.UNREADY, Condition.DRAINING),
    Replaced: (FailureKind.UNREADY, Condition.STARTING),
    OtherRole: (FailureKind.ROLE, Condition.READY),
    Overloaded: (FailureKind.FULL, Condition.READY),
    Unreserved: (FailureKind.LATE, Condition.READY),
    EngineLost: (FailureKind.LOST, Condition.LOST),
    PeerLost: (FailureKind.LOST, Condition.UNREACHABLE),
    Cancelled: (FailureKind.LOST, Condition.UNREACHABLE),
    Refused: (FailureKind.FAILED, Condition.READY),
    Aborted: (FailureKind.FAILED, Condition.READY),
    Bug: (FailureKind.FAILED, Condition.READY),
    TransferFailed: (FailureKind.FAILED, Condition.READY),
    Unavailable: (FailureKind.FAILED, Condition.READY),
}
"""How an attempt failed, and the condition of the worker then."""
_IN_HANDOFF: Final = (Unavailable, TransferFailed, Refused, Aborted, DeadlineExceeded)
_RETRIED_ANYWAY: Final = (Cancelled, DeadlineExceeded)
"""A call that the other side broke off, a handoff that took too long: it was not our caller."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt and its judgement."""

    outcome: FailureKind
    error: EffuseError
    worker: WorkerRecord  # it reported the error, or was lost
    pair: Pair | None = None  # if a handoff failed


def judge(
    error: EffuseError, worker: WorkerRecord, placement: Placement, *, is_handoff: bool
) -> Failure:
    """Returns what an error of `worker` means; `is_handoff`: its pages were on their way."""
    kind, writer = type(error), placement.prefill
    if not error.retryable and kind not in _RETRIED_ANYWAY:
        return Failure(FailureKind.FINAL, error, worker)
    if is_handoff and writer is not None and kind in _IN_HANDOFF:
        pair = (writer.life, placement.decode.life)
        return Failure(FailureKind.HANDOFF, error, worker, pair)
    outcome, _ = _MEANINGS.get(kind, (FailureKind.FINAL, Condition.READY))
    return Failure(outcome, error, worker)


PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 5.0
"""How long a request avoids a worker that failed it; doubled by each failure there."""

NAMED_LOSSES: Final = 8
"""Losses that an error's text names; the last ones."""


@dataclass(slots=True)
class Setbacks:
    """The failed attempts of one request."""

    num_losses: int = 0
    losses_in_a_row: int = 0  # without a new block in between
    stalled_at: float | None = None  # since when it waits for a worker to go on with it
    # Most requests meet with nothing, so none has an empty dict of its own.
    refusals: Mapping[str, int] = field(default_factory=lambda: _NOTHING)  # by worker and reason
    _losses: tuple[str, ...] = ()
    # The failures on a worker, and until when the request avoids it.
    _failures: Mapping[WorkerLife, tuple[int, float]] = field(default_factory=lambda: _NOTHING)

    @property
    def num_refusals(self) -> int:
        return sum(self.refusals.values())

    def add(self, failure: Failure, now: float) -> None:
        """Takes a failed attempt into account."""
        life = failure.worker.life
        text = f"{failure.worker.worker_id}: {failure.error.message[:80]}"
        if failure.outcome in REFUSALS:
            name = f"{failure.worker.worker_id} {failure.outcome.value}"
            self.refusals = {**self.refusals, name: self.refusals.get(name, 0) + 1}
        else:
            self.num_losses += 1
            self._losses = (*self._losses[1 - NAMED_LOSSES :], text)
        if failure.outcome in (FailureKind.LOST, FailureKind.FAILED):
            self.losses_in_a_row += 1
            self.stalled_at = None  # its time there was no wait, and such losses have a bound
            earlier, _ = self._failures.get(life, (0, 0.0))
            pause_s = min(PAUSE_S * 2.0**earlier, MOST_PAUSE_S)
            self._failures = {**self._failures, life: (earlier + 1, now + pause_s)}

    def add_progress(self) -> None:
        """There is a new block: earlier setbacks are no sign of later ones."""
        self.losses_in_a_row = 0
        self.stalled_at = None

    def avoided(self, now: float) -> set[WorkerLife]:
        """Workers that the request avoids for now."""
        return {life for life, (_, until) in self._failures.items() if until > now}

    def next_change_s(self, now: float) -> float | None:
        """Seconds until it no longer avoids one of them; None if it avoids none."""
        return min((at - now for _, at in self._failures.values() if at > now), default=None)

    def summary(self) -> str:
        """Losses and refusals, each in a few words; empty if there were none."""
        parts = []
        if self.num_losses:
            parts.append(f"{_count(self.num_losses, 'attempt')} lost ({'; '.join(self._losses)})")
        if self.refusals:
            listed = ", ".join(
                name if times == 1 else f"{name} {times} times"
                for name, times in Counter(self.refusals).most_common(NAMED_LOSSES)
            )
            parts.append(f"{_count(self.num_refusals, 'refusal')} ({listed})")
        return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


RETRIES_PER_S: Final = 10.0
"""Attempts after losses that are always granted, so that an empty budget delays and never ends."""


class RetryBudget:
    """How many attempts after losses the router may add to its traffic, so that an outage is not
    made worse. Each request adds `share` to it, time adds `RETRIES_PER_S`, up to `most`; it begins
    full."""

    def __init__(self, share: float, most: float, now: float) -> None:
        self._share = share
        self._most = most
        self._left = most
        self._at = now
        self.num_taken = 0  # ever

    def left(self, now: float) -> float:
        """Attempts that may begin without a wait; below 0, the number that wait."""
        return min(self._most, self._left + (now - self._at) * RETRIES_PER_S)

    def add_requests(self, count: int, now: float) -> None:
        """So many were accepted: each answer that is asked for is one."""
        self._left, self._at = min(self._most, self.left(now) + count * self._share), now

    def take(self, now: float) -> float:
        """Takes an attempt out; returns the seconds until it may begin."""
        self.num_taken += 1
        self._left, self._at = self.left(now) - 1.0, now
        return max(0.0, -self._left / RETRIES_PER_S)

    def give_back(self) -> None:
        """An attempt that was taken out does not begin."""
        self._left += 1.0


SUSPICION_S: Final = 6.0
"""How long a worker that failed comes after others: longer than its lease (3 s) holds, and than an
engine that hangs may be silent."""

FULL_S: Final = 0.5
"""How long a worker that is full is avoided, if it names no time."""

ROLE_S: Final = 2.0
"""How long a worker's own word about its role counts more than its record: longer than a new record
takes to arrive. A record that is still old then leads to another refusal."""

PAIR_S: Final = 0.5
MOST_PAIR_S: Final = 30.0
"""How long a pair hands nothing over after a handoff that failed; doubled by each in a row."""

DOUBT_S: Final = 60.0
"""How long after that others come first. Then one handoff shows whether the way is open again."""

_ANNOUNCED: Final[Mapping[str, Condition]] = {
    "ready": Condition.READY,
    "starting": Condition.STARTING,
}
"""The condition of a worker that is not out, by its own record; with other records it takes no more
requests."""


@dataclass(frozen=True, slots=True)
class Absence:
    """An incarnation that is out. `has_answered`: its front has answered since."""

    record: WorkerRecord
    condition: Condition
    has_answered: bool = False


class Standing:
    """One router's account of workers and pairs. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._absent: dict[WorkerLife, Absence] = {}
        self._suspect_until: dict[WorkerLife, float] = {}
        self._full_until: dict[WorkerLife, float] = {}
        self._roles: dict[WorkerLife, tuple[Role, float]] = {}  # as refusals named them, until when
        # Handoffs of a pair that failed in a row, and until when no other is tried.
        self._pairs: dict[Pair, tuple[int, float]] = {}

    def note(self, failure: Failure) -> None:
        """Takes a failed attempt into account."""
        record, now = failure.worker, self._now()
        life = record.life
        match failure.outcome:
            case FailureKind.UNREADY | FailureKind.LOST:
                _, condition = _MEANINGS[type(failure.error)]
                self._absent[life] = Absence(record, condition)
            case FailureKind.FULL:
                wait_s = failure.error.retry_after_s or FULL_S
                self._full_until[life] = now + min(wait_s, SUSPICION_S)
            case FailureKind.ROLE if (role := _role_in(failure.error)) is not None:
                self._roles[life] = role, now + ROLE_S
            case FailureKind.HANDOFF if failure.pair is not None:
                self._break(failure.pair, now)
        if failure.outcome in (FailureKind.LOST, FailureKind.FAILED):
            self._suspect_until[life] = now + SUSPICION_S

    def note_try(self, pair: Pair) -> None:
        """A handoff of the pair begins. If the last one failed, others wait for how it ends: a
        worker that nothing reaches is idle, and all would go there."""
        failures, until = self._pairs.get(pair, (0, math.inf))
        if until + DOUBT_S <= self._now():
            self._pairs[pair] = failures, self._now()

    def note_handoff(self, pair: Pair) -> None:
        self._pairs.pop(pair, None)

    def note_condition(self, life: WorkerLife, condition: Condition | None) -> bool:
        """Takes the condition of a worker that is out, None if it does not answer.
        Returns whether it is back."""
        absence = self._absent.get(life)
        if absence is None:
            return False
        if condition is Condition.READY:
            del self._absent[life]
            return True
        has_answered = condition is not None
        self._absent[life] = Absence(absence.record, condition or absence.condition, has_answered)
        return False

    def forget_ended(self, alive: Collection[WorkerRecord]) -> None:
        """Forgets ended incarnations, given all workers that hold a lease: those with a
        successor, and those without a lease whose front is silent."""
        lives, names = {r.life for r in alive}, {r.worker_id for r in alive}
        self._absent = {
            life: one
            for life, one in self._absent.items()
            if life in lives or (one.has_answered and one.record.worker_id not in names)
        }
        now = self._now()
        self._suspect_until = {k: t for k, t in self._suspect_until.items() if t > now}
        self._full_until = {k: t for k, t in self._full_until.items() if t > now}
        self._roles = {k: one for k, one in self._roles.items() if one[1] > now}
        self._pairs = {k: p for k, p in self._pairs.items() if lives.issuperset(k)}

    @property
    def knows_roles(self) -> bool:
        """Whether a refusal has named a role lately."""
        return bool(self._roles)

    def with_role(self, record: WorkerRecord) -> WorkerRecord:
        """The record, with the role that the worker named in a refusal a moment ago."""
        if not self._roles or (found := self._roles.get(record.life)) is None:
            return record
        role, until = found
        return record if until <= self._now() else replace(record, role=role)

    @property
    def absent(self) -> list[WorkerRecord]:
        return [one.record for one in self._absent.values()]

    def condition(self, record: WorkerRecord) -> Condition:
        if self._absent and (absence := self._absent.get(record.life)) is not None:
            return absence.condition
        return _ANNOUNCED.get(record.state, Condition.DRAINING)

    def is_full(self, life: WorkerLife) -> bool:
        """Whether it reported a moment ago that it takes no more."""
        return bool(self._full_until) and self._full_until.get(life, -math.inf) > self._now()

    def suspects(self) -> set[WorkerLife]:
        now = self._now()
        failed = {life for life, until in self._suspect_until.items() if until > now}
        return failed | self._blamed()

    def broken_pairs(self) -> set[Pair]:
        """Pairs that hand nothing over now."""
        now = self._now()
        return {pair for pair, (_, until) in self._pairs.items() if until > now}

    def doubtful_pairs(self) -> set[Pair]:
        """Pairs that come after others, broken ones among them."""
        now = self._now()
        return {pair for pair, (_, until) in self._pairs.items() if until + DOUBT_S > now}

    def next_change_s(self) -> float | None:
        """Seconds until a pair may hand over again or a worker is no longer full; None if
        nothing is to be waited for."""
        now = self._now()
        moments = [*self._full_until.values(), *(until for _, until in self._pairs.values())]
        return min((at - now for at in moments if at > now), default=None)

    def _break(self, pair: Pair, now: float) -> None:
        failures, until = self._pairs.get(pair, (0, 0.0))
        if until > now:
            return  # begun before that was known
        pause_s = min(PAIR_S * 2.0**failures, MOST_PAIR_S)
        self._pairs[pair] = min(failures + 1, 16), now + pause_s

    def _blamed(self) -> set[WorkerLife]:
        """Decode workers that two prefill workers failed to reach, and prefill workers that failed
        to reach two decode workers which others do reach."""
        pairs = self.doubtful_pairs()
        if not pairs:
            return set()
        decode = _twice(receiver for _, receiver in pairs)
        return decode | _twice(writer for writer, receiver in pairs if receiver not in decode)


def _role_in(error: EffuseError) -> Role | None:
    return next((one for one in get_args(Role) if one == error.labels.get("role")), None)


def _twice(lives: Iterable[WorkerLife]) -> set[WorkerLife]:
    return {life for life, count in Counter(lives).items() if count > 1}
