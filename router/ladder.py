"""What a failed attempt means, what it costs the request, and when the next one may begin.

Some failures are no attempts at all: a worker was starting, draining or full. Others are losses, of
which a request may have few in a row without a new block, and the router's traffic a share. Pure,
with the clock handed in. Not here: what failures tell of workers (`standing.py`), what is done
about them (`handler.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from effuse.placement.records import WorkerRecord
from effuse.protos.errors import (
    Aborted,
    Bug,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EffuseError,
    EngineLost,
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
    FULL = "full"  # no attempt: later again, or elsewhere
    LATE = "late"  # no attempt: no pages were free in time for a computed prompt
    LOST = "lost"  # the worker's engine or the worker has ended, or it cannot be reached
    HANDOFF = "no handoff"  # between the two of a pair
    FAILED = "failed"  # in any other way that another worker may not
    FINAL = "final"  # nobody can do better


REFUSALS: Final = frozenset({FailureKind.UNREADY, FailureKind.FULL, FailureKind.LATE})

_OUTCOMES: Final[Mapping[type[EffuseError], FailureKind]] = {
    Starting: FailureKind.UNREADY,
    Draining: FailureKind.UNREADY,
    Replaced: FailureKind.UNREADY,
    Overloaded: FailureKind.FULL,
    Unreserved: FailureKind.LATE,
    EngineLost: FailureKind.LOST,
    PeerLost: FailureKind.LOST,
    Cancelled: FailureKind.LOST,
    Refused: FailureKind.FAILED,
    Aborted: FailureKind.FAILED,
    Bug: FailureKind.FAILED,
    TransferFailed: FailureKind.FAILED,
    Unavailable: FailureKind.FAILED,
}
_IN_HANDOFF: Final = (Unavailable, TransferFailed, Refused, Aborted, DeadlineExceeded)
_RETRIED_ANYWAY: Final = (Cancelled, DeadlineExceeded)
"""A call that the other side broke off, a handoff that took too long: it was not our caller."""

_CONDITIONS: Final[Mapping[type[EffuseError], Condition]] = {
    Draining: Condition.DRAINING,
    EngineLost: Condition.LOST,
    PeerLost: Condition.UNREACHABLE,
    Cancelled: Condition.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, as it is judged."""

    outcome: FailureKind
    error: EffuseError
    worker: WorkerRecord  # it said so, or was lost
    pair: Pair | None = None  # where it is a handoff that failed

    @property
    def condition(self) -> Condition:
        """What the worker is as far as this tells, where it is out."""
        return _CONDITIONS.get(type(self.error), Condition.STARTING)


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
    return Failure(_OUTCOMES.get(kind, FailureKind.FINAL), error, worker)


PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 5.0
"""How long a request leaves a worker alone that failed it; doubled by each failure there."""

TOLD_LOSSES: Final = 8
"""Losses that an error's text names; the last ones."""


@dataclass(slots=True)
class Setbacks:
    """What one request has met with."""

    num_losses: int = 0
    losses_in_a_row: int = 0  # without a new block in between
    stalled_at: float | None = None  # no worker could go on with it, nor has since
    refusals: Counter[str] = field(default_factory=Counter)  # by worker and reason
    _losses: list[str] = field(default_factory=list)
    _failures: dict[WorkerLife, int] = field(default_factory=dict)
    _avoided_until: dict[WorkerLife, float] = field(default_factory=dict)

    def add(self, failure: Failure, now: float) -> None:
        """Takes a failed attempt into account."""
        life = failure.worker.life
        told = f"{failure.worker.worker_id}: {failure.error.message[:80]}"
        if failure.outcome in REFUSALS:
            self.refusals[f"{failure.worker.worker_id} {failure.outcome.value}"] += 1
        else:
            self.num_losses += 1
            self._losses = [*self._losses[1 - TOLD_LOSSES :], told]
        if failure.outcome in (FailureKind.LOST, FailureKind.FAILED):
            self.losses_in_a_row += 1
            failures = self._failures.get(life, 0)
            pause_s = min(PAUSE_S * 2.0**failures, MOST_PAUSE_S)
            self._failures[life] = failures + 1
            self._avoided_until[life] = now + pause_s

    def begin_stall(self, now: float) -> None:
        """No worker can go on with the request now."""
        if self.stalled_at is None:
            self.stalled_at = now

    def stalled_s(self, now: float) -> float:
        """Seconds since that was so for the first time after the last block."""
        return 0.0 if self.stalled_at is None else now - self.stalled_at

    def add_progress(self) -> None:
        """There is a new block: what was met with before is no sign of what comes."""
        self.losses_in_a_row = 0
        self.stalled_at = None

    def avoided(self, now: float) -> set[WorkerLife]:
        """Workers that are left alone for now."""
        return {life for life, until in self._avoided_until.items() if until > now}

    def next_change_s(self, now: float) -> float | None:
        """Seconds until one of them is not any more; None where there is none."""
        return min((at - now for at in self._avoided_until.values() if at > now), default=None)

    def labels(self) -> dict[str, str]:
        """The same for programs."""
        return {"losses": str(self.num_losses), "refusals": str(self.refusals.total())}

    def tell(self) -> str:
        """Losses and refusals apart, in a few words; empty where there were none."""
        parts = []
        if self.num_losses:
            parts.append(f"{_count(self.num_losses, 'attempt')} lost ({'; '.join(self._losses)})")
        if self.refusals:
            told = ", ".join(
                name if times == 1 else f"{name} {times} times"
                for name, times in self.refusals.most_common(TOLD_LOSSES)
            )
            parts.append(f"{_count(self.refusals.total(), 'refusal')} ({told})")
        return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


RETRIES_PER_S: Final = 10.0
"""Attempts after losses that are always granted, so that an empty budget delays and never ends."""


class RetryBudget:
    """How many attempts after losses the router's traffic may bear, so that an outage is not made
    worse. Each request adds `share` to it, time adds `RETRIES_PER_S`, up to `most`; it begins
    full."""

    def __init__(self, share: float, most: float, now: float) -> None:
        self._share = share
        self._most = most
        self._left = most
        self._at = now

    def left(self, now: float) -> float:
        """Attempts that need not wait; below 0 as many wait."""
        return min(self._most, self._left + (now - self._at) * RETRIES_PER_S)

    def add_requests(self, count: int, now: float) -> None:
        """So many were accepted: each answer that is asked for is one."""
        self._left, self._at = min(self._most, self.left(now) + count * self._share), now

    def take(self, now: float) -> float:
        """Takes an attempt out; returns the seconds until it may begin."""
        self._left, self._at = self.left(now) - 1.0, now
        return max(0.0, -self._left / RETRIES_PER_S)
