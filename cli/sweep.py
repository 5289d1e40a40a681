"""A sweep of arrival rates to the knee: the highest rate that a fleet bears.

It bears a rate if nine requests in ten met their objectives. Rates double until one is not borne,
and then halve what lies between; a function of what was measured, without I/O.
"""

from collections.abc import Sequence
from typing import Final

from effuse.cli.figures import Run

MET_SHARE: Final = 0.9
"""Of the requests at a rate that is borne."""

MOST_RUNS: Final = 16
_NEAR = 1.1  # the knee is known to a tenth


def next_rate(runs: Sequence[Run], first: float) -> float | None:
    """The rate to be measured next, from `first` on; None where the knee is known."""
    if not runs:
        return first
    if len(runs) >= MOST_RUNS:
        return None
    borne = knee(runs)
    above = _lowest_not_borne(runs)
    if above is None:
        return 2 * max(run.rate for run in runs)
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
            f"no rate was borne: at {lowest:.3g} requests/s fewer than 9 in 10 met the objectives"
        )
    if _lowest_not_borne(runs) is None:
        return f"the fleet bears {borne:.3g} requests/s, the most that was tried"
    peak = max(run.num_met / run.total_s for run in runs)
    return f"the knee is at {borne:.3g} requests/s; goodput was {peak:.3g} requests/s at most"
