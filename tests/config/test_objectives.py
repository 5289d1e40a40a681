"""Objectives of requests, their classes, and the one rule of goodput."""

from __future__ import annotations

import math

import pytest

from effuse.benchmarks.fleet_report import Objectives
from effuse.cli.figures import Sample, ServiceGoals
from effuse.config.objectives import NO_GOALS, Goals, Kept, RequestClass, parse_classes


@pytest.mark.parametrize(
    ("goals", "kept", "all_of_them"),
    [
        (NO_GOALS, Kept(None, None), None),
        (Goals(first_block_s=0.5), Kept(True, None), True),
        (Goals(first_block_s=0.49), Kept(False, None), False),
        (Goals(gap_s=0.2), Kept(None, True), True),
        (Goals(gap_s=0.19), Kept(None, False), False),  # every gap counts, not most of them
        (Goals(0.5, 0.19), Kept(True, False), False),
    ],
)
def test_what_an_answer_kept(goals: Goals, kept: Kept, all_of_them: bool | None) -> None:
    gaps = (*[0.1] * 200, 0.2)
    assert goals.kept(0.5, gaps) == kept and goals.kept(0.5, gaps).all is all_of_them
    # The command and the benchmarks judge by the same rule.
    sample = Sample(1, 1, 0.5, 9.0, gaps)
    assert ServiceGoals(goals.first_block_s, goals.gap_s).met_by(sample) is (
        all_of_them is not False
    )
    request = {"failure": "", "first_s": 0.5, "gaps": list(gaps)}
    told = Objectives(goals.first_block_s, goals.gap_s)
    assert told.met_by(request) is (all_of_them is not False)


def test_a_failed_request_keeps_none_of_its_objectives() -> None:
    assert Goals(3600.0, 3600.0).missed() == Kept(False, False)
    assert NO_GOALS.missed() == Kept(None, None)


def test_own_objectives_come_before_those_of_the_class() -> None:
    assert Goals(1.0).or_else(Goals(2.0, 3.0)).or_else(Goals(4.0, 5.0)) == Goals(1.0, 3.0)


def test_classes_of_a_flag() -> None:
    found = parse_classes("--c", ["chat:first-block=0.5,gap=0.1,priority=high", "batch:", "x"])
    assert found == {
        "chat": RequestClass(Goals(0.5, 0.1), "high"),
        "batch": RequestClass(NO_GOALS, "normal"),
        "x": RequestClass(NO_GOALS, "normal"),
    }
    assert parse_classes("--c", ["batch:priority=low"])["batch"].priority == "low"
    assert math.isinf(parse_classes("--c", ["a:gap=1"])["a"].goals.first_block_s)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([":gap=1"], "expected a name of 1 to 64 characters"),
        (["a b:gap=1"], "expected a name of 1 to 64 characters"),
        (["a", "a:gap=1"], "expected different names, got 'a' twice"),
        (["a:gap"], "expected NAME:first-block=S"),
        (["a:gap=1,gap=2"], "expected NAME:first-block=S"),
        (["a:total=1"], "expected NAME:first-block=S"),
        (["a:priority=urgent"], "expected one of low, normal, high as a priority, got 'urgent'"),
        *((["a:gap=" + bad], "expected a number above 0, at most 3600, as seconds, got")
          for bad in ("0", "-1", "nan", "inf", "3601", "soon", "")),
        ([f"c{at}" for at in range(65)], "expected at most 64 classes, got 65"),
    ],
)  # fmt: skip
def test_bad_classes(texts: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=f"^--c: {told}"):
        parse_classes("--c", texts)
