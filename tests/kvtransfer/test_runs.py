"""Free pages as runs: against a plain set, whatever the order of taking and giving."""

from __future__ import annotations

import random

import pytest

from effuse.kvtransfer.runs import FreeRuns


@pytest.mark.parametrize("seed", range(6))
def test_runs_hold_what_a_set_would(seed: int) -> None:
    rng = random.Random(seed)
    runs, free = FreeRuns(40), set(range(40))
    for _ in range(400):
        if rng.random() < 0.5:
            count = rng.randint(0, len(free))
            taken = runs.take(count)
            assert len(taken) == count and set(taken) <= free
            free -= set(taken)
        elif len(free) < 40:
            page_id = rng.choice([i for i in range(40) if i not in free])
            runs.give(page_id)
            free.add(page_id)
        assert runs.ids() == sorted(free) and len(runs) == len(free)


def test_what_fits_into_one_run_comes_from_one() -> None:
    runs = FreeRuns(20)
    runs.take(20)
    for page_id in (0, 1, 2, 7, 8, 9, 10, 15):
        runs.give(page_id)
    assert runs.take(3) == [0, 1, 2]
    assert runs.take(4) == [7, 8, 9, 10]


def test_no_pages_are_no_runs() -> None:
    runs = FreeRuns(0)
    assert (runs.ids(), runs.take(0), len(runs)) == ([], [], 0)
