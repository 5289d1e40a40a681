"""The sweep approaches the knee of fleets with a known knee."""

from __future__ import annotations

import pytest

from effuse.cli.bench import MOST_RUNS, knee, next_rate, verdict
from effuse.cli.figures import Run, Sample, ServiceGoals


def _run(rate: float, capacity: float) -> Run:
    """Ten requests, of which as many are in time as the capacity allows. The fleet's work is so
    short that they arrive over ten times their objective.
    """
    met = 10 if rate <= capacity else int(10 * capacity / rate)
    samples = [Sample(8, 2, 0.1 / rate, (0.5 if at < met else 5.0) / rate) for at in range(10)]
    return Run("fleet", 10 / rate, samples, rate=rate, goals=ServiceGoals(total_s=1 / rate))


def _run_of_few(rate: float, count: int, capacity: float, most_s: float) -> Run:
    """Requests that wait for each other at a fleet that ends so many a second."""
    samples, free_at = [], 0.0
    for at in range(count):
        free_at = max(free_at, at / rate) + 1 / capacity
        samples.append(Sample(8, 2, free_at - at / rate, free_at - at / rate))
    goals = ServiceGoals(total_s=most_s)
    return Run("fleet", free_at, samples, rate=rate, goals=goals)


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
    assert "no rate met the objectives" in verdict(none)
    every = _sweep(1.0, 1e9)
    assert (knee(every), len(every)) == (2.0 ** (MOST_RUNS - 1), MOST_RUNS)
    assert "the highest rate that was tried" in verdict(every)


def test_a_rate_whose_requests_all_failed_is_not_borne() -> None:
    failed = Run("fleet", 1.0, [], failed=3, rate=8.0, goals=ServiceGoals(total_s=1.0))
    assert next_rate([failed], 8.0) == 4.0


def test_requests_that_arrive_at_once_tell_no_rate() -> None:
    """Thirty at a fleet that ends 50 a second are in time however fast they come."""
    runs: list[Run] = []
    while (rate := next_rate(runs, 10.0)) is not None:
        runs.append(_run_of_few(rate, 30, 50.0, most_s=1.5))
    assert [run.rate for run in runs] == [10.0, 20.0, 40.0]
    assert verdict(runs) == (
        "the fleet sustains 40 requests/s, the highest rate that was tried; its 30 requests "
        "arrived within 0.75 s, too few to judge an objective of 1.5 s: send 600 or more with "
        "--limit"
    )


def test_a_knee_of_few_requests_is_called_that() -> None:
    """A queue of 200 requests needs a rate well above the 50 that are ended, to be late."""
    runs: list[Run] = []
    while (rate := next_rate(runs, 10.0)) is not None:
        runs.append(_run_of_few(rate, 200, 50.0, most_s=1.5))
    found = knee(runs)
    assert found is not None and found > 60
    assert "too few to judge an objective of 1.5 s" in verdict(runs)
    many = [_run_of_few(rate, 2000, 50.0, most_s=1.5) for rate in (50.0, 54.0)]
    assert verdict(many).startswith("the knee is at 50 requests/s") and "few" not in verdict(many)
