"""The benchmark table's arithmetic, on numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
import re

import pytest

from effuse.cli.figures import (
    FIGURES,
    WIDTH,
    Run,
    Sample,
    ServiceGoals,
    as_json,
    figures,
    percentile,
    table,
)

RUN = Run(
    "fleet",
    total_s=4.0,
    samples=[Sample(10, 2, 0.1, 1.0, (0.2, 0.7)), Sample(30, 6, 0.3, 3.0, (0.4,))],
    failed=1,
    rate=2.5,
    goals=ServiceGoals(first_block_s=0.3, gap_s=0.5),
)


def test_every_figure() -> None:
    """The first request has a gap that is too long, so one of three met the objectives."""
    assert figures(RUN) == {
        "rate": 2.5,
        "samples": 2,
        "failed": 1,
        "total_s": 4.0,
        "tokens": 40,
        "tokens_per_s": 10.0,
        "requests_per_s": 0.5,
        "goodput_per_s": 0.25,
        "met_share": pytest.approx(1 / 3),
        "latency_mean_s": 2.0,
        "latency_p50_s": 1.0,
        "latency_p99_s": 3.0,
        "first_block_p50_s": 0.1,
        "first_block_p99_s": 0.3,
        "gap_p50_s": 0.4,
        "gap_p99_s": 0.7,
        "tokens_per_forward": 5.0,
    }


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        (ServiceGoals(), [True, True]),
        (ServiceGoals(first_block_s=0.2), [True, False]),
        (ServiceGoals(gap_s=0.4), [False, True]),
        (ServiceGoals(total_s=0.9), [False, False]),
    ],
)
def test_every_objective_counts(goals: ServiceGoals, met: list[bool]) -> None:
    assert [goals.met_by(one) for one in RUN.samples] == met


def test_without_objectives_there_is_no_goodput() -> None:
    told = figures(Run("fleet", 1.0, RUN.samples))
    assert math.isnan(told["goodput_per_s"]) and math.isnan(told["met_share"])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_percentiles(share: float, expected: float) -> None:
    assert percentile([4, 2, 1, 3], share) == expected


def test_a_run_without_answers_has_no_latency() -> None:
    told = figures(Run("fleet", 1.0, [], failed=2))
    assert math.isnan(told["latency_p50_s"])
    assert told["tokens_per_s"] == 0


def test_the_table_fits_a_terminal() -> None:
    """Each part has one line a run, and figures line up below their headings."""
    huge = Run(
        "vanilla denoising on 64", 98765.4321, [*RUN.samples] * 9000, failed=10**6, rate=1234.5
    )
    for runs in ([RUN], [huge], [RUN, Run("a longer name", 1.0, []), huge]):
        parts = [part.split("\n") for part in table(runs).split("\n\n")]
        assert len(parts) > 1
        told: dict[str, list[str]] = {}
        for part in parts:
            assert len({len(line) for line in part}) == 1 and len(part[0]) <= WIDTH == 80
            assert len(part) == 1 + len(runs)
            headings = re.split(r"\s{2,}", part[0].strip())
            for run, line in zip(runs, part[1:], strict=True):
                cells = re.split(r"\s{2,}", line)
                assert cells[0] == run.name and len(cells) == 1 + len(headings)
                told.setdefault(run.name, []).extend(cells[1:])
        first = ["2.500", "2", "1", "4.000", "40"]
        assert runs == [huge] or told[RUN.name][: len(first)] == first


def test_figures_that_no_run_has_are_left_out() -> None:
    told = table([Run("fleet", 1.0, RUN.samples), Run("b", 1.0, RUN.samples)])
    assert "arrive/s" not in told and "goodput/s" not in told and "tokens/s" in told


def test_every_figure_has_a_name_and_a_heading_of_its_own() -> None:
    assert len({name for name, _, _ in FIGURES}) == len(FIGURES)
    assert len({heading for _, heading, _ in FIGURES}) == len(FIGURES)


def test_json_holds_every_request() -> None:
    (entry,) = as_json([RUN])
    assert entry["name"] == "fleet"
    assert entry["requests"] == [
        {
            "tokens": 10,
            "forward_passes": 2,
            "first_block_s": 0.1,
            "total_s": 1.0,
            "gaps_s": (0.2, 0.7),
        },
        {"tokens": 30, "forward_passes": 6, "first_block_s": 0.3, "total_s": 3.0, "gaps_s": (0.4,)},
    ]


def test_a_run_in_which_every_request_failed_is_json_too() -> None:
    (entry,) = json.loads(json.dumps(as_json([Run("fleet", 1.0, [], failed=3)]), allow_nan=False))
    assert (entry["failed"], entry["latency_p50_s"]) == (3, None)
