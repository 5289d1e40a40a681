"""The sweep closes in on the knee of fleets whose knee is known."""

from __future__ import annotations

import pytest

from effuse.cli.figures import Run, Sample, ServiceGoals
from effuse.cli.sweep import MOST_RUNS, knee, next_rate, verdict


def _run(rate: float, capacity: float) -> Run:
    """Ten requests, of which as many are in time as the capacity allows."""
    met = 10 if rate <= capacity else int(10 * capacity / rate)
    samples = [Sample(8, 2, 0.1, 0.5 if at < met else 5.0) for at in range(10)]
    return Run("fleet", 10 / rate, samples, rate=rate, goals=ServiceGoals(total_s=1.0))


def _sweep(first: float, capacity: float) -> list[Run]:
    runs: list[Run] = []
    while (rate := next_rate(runs, first)) is not None:
        runs.append(_run(rate, capacity))
    return runs


@pytest.mark.parametrize("first", [1.0, 30.0, 700.0])
@pytest.mark.parametrize("capacity", [3.0, 47.0, 100.0])
def test_the_knee_is_found(first: float, capacity: float) -> None:
    runs = _sweep(first, capacity)
    found = knee(runs)
    assert found is not None and len(runs) < MOST_RUNS
    # A rate is borne with 9 of 10 in time; the next one known is within a tenth.
    assert capacity / 1.11 <= found <= capacity / 0.89
    assert verdict(runs).startswith(f"the knee is at {found:.3g} requests/s")


def test_a_fleet_that_bears_nothing_or_everything_ends_the_sweep() -> None:
    none = _sweep(64.0, 0.0)
    assert (knee(none), len(none)) == (None, MOST_RUNS)
    assert "no rate was borne" in verdict(none)
    every = _sweep(1.0, 1e9)
    assert (knee(every), len(every)) == (2.0 ** (MOST_RUNS - 1), MOST_RUNS)
    assert "the most that was tried" in verdict(every)


def test_a_rate_whose_requests_all_failed_is_not_borne() -> None:
    failed = Run("fleet", 1.0, [], failed=3, rate=8.0, goals=ServiceGoals(total_s=1.0))
    assert next_rate([failed], 8.0) == 4.0
