"""A sweep of arrival rates to the knee: the highest rate that a fleet sustains.

It sustains a rate if nine requests in ten met their objectives. Rates double until one fails, and
then halve the interval. This is a function of measurements, without I/O.

Requests that arrive within their objective's time are always on time, however slow the fleet is,
because a growing queue takes time to show.
"""

import math
from collections.abc import Sequence
from typing import Final

from effuse.cli.figures import Run

MET_SHARE: Final = 0.9
"""Share of requests that must meet the objectives."""

MOST_RUNS: Final = 16
_NEAR = 1.1  # the knee is known to a tenth
# objectives' times that arrivals must span, so that a rate above it by that tenth is late
_LONG = 10


def next_rate(runs: Sequence[Run], first: float) -> float | None:
    """The next rate to measure, beginning with `first`; None if the knee is known."""
    if not runs:
        return first
    if len(runs) >= MOST_RUNS:
        return None
    borne = knee(runs)
    above = _lowest_not_borne(runs)
    if above is None:
        top = max(runs, key=lambda run: run.rate)
        return None if _arrived_s(top) < _objective_s(top) else 2 * top.rate
    if borne is None:
        return above / 2
    return None if above <= _NEAR * borne else (above + borne) / 2


def knee(runs: Sequence[Run]) -> float | None:
    """The highest measured rate such that it and all lower ones passed; None if there is none."""
    above = _lowest_not_borne(runs)
    borne = [run.rate for run in runs if above is None or run.rate < above]
    return max(borne, default=None)


def _lowest_not_borne(runs: Sequence[Run]) -> float | None:
    return min((run.rate for run in runs if not run.met_share >= MET_SHARE), default=None)


def verdict(runs: Sequence[Run]) -> str:
    """The result of a sweep, in a line."""
    borne = knee(runs)
    if borne is None:
        lowest = min(run.rate for run in runs)
        return (
            f"no rate met the objectives: at {lowest:.3g} requests/s, fewer than 9 in 10 requests "
            "did"
        )
    few = _too_few(next(run for run in runs if run.rate == borne))
    if _lowest_not_borne(runs) is None:
        return f"the fleet sustains {borne:.3g} requests/s, the highest rate that was tried{few}"
    peak = max(run.num_met / run.total_s for run in runs)
    return (
        f"the knee is at {borne:.3g} requests/s; the highest goodput was {peak:.3g} requests/s{few}"
    )


def _too_few(run: Run) -> str:
    """A warning if a run is too short; empty for one that is long enough."""
    objective_s, arrived_s = _objective_s(run), _arrived_s(run)
    if arrived_s >= _LONG * objective_s:
        return ""
    needed = math.ceil(_LONG * objective_s * run.rate)
    return (
        f"; its {_count(run)} requests arrived within {arrived_s:.3g} s, too few to judge an "
        f"objective of {objective_s:.3g} s: send {needed} or more with --limit"
    )


def _count(run: Run) -> int:
    return len(run.samples) + run.failed


def _arrived_s(run: Run) -> float:
    """The time over which its requests arrived, from its rate."""
    return _count(run) / run.rate


def _objective_s(run: Run) -> float:
    """The longest objective of its requests."""
    goals = run.goals
    asked = [one for one in (goals.first_block_s, goals.gap_s, goals.total_s) if one < math.inf]
    return max(asked, default=0.0)
