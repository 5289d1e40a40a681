"""A sweep of arrival rates to the knee: the highest rate that a fleet bears.

It bears a rate if nine requests in ten met their objectives. Rates double until one is not borne,
and then halve what lies between; a function of what was measured, without I/O.

Requests that arrive within what each may take are in time however slow the fleet is: a queue that
grows needs time to show.
"""

import math
from collections.abc import Sequence
from typing import Final

from effuse.cli.figures import Run

MET_SHARE: Final = 0.9
"""Of the requests at a rate that is borne."""

MOST_RUNS: Final = 16
_NEAR = 1.1  # the knee is known to a tenth
_LONG = 10  # objectives that requests arrive over, so that a rate above it by that tenth is late


def next_rate(runs: Sequence[Run], first: float) -> float | None:
    """The rate to be measured next, from `first` on; None where the knee is known."""
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
    """The highest rate below which every one that was measured is borne; None where none is."""
    above = _lowest_not_borne(runs)
    borne = [run.rate for run in runs if above is None or run.rate < above]
    return max(borne, default=None)


def _lowest_not_borne(runs: Sequence[Run]) -> float | None:
    return min((run.rate for run in runs if not run.met_share >= MET_SHARE), default=None)


def verdict(runs: Sequence[Run]) -> str:
    """What a sweep found, in a line."""
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
    """That a run is too short to be believed; nothing of one that is long enough."""
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
    """How long its requests took to come, by its rate."""
    return _count(run) / run.rate


def _objective_s(run: Run) -> float:
    """The longest that is asked of each of its requests."""
    goals = run.goals
    asked = [one for one in (goals.first_block_s, goals.gap_s, goals.total_s) if one < math.inf]
    return max(asked, default=0.0)
