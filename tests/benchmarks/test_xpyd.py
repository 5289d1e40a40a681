"""Predicted and measured rates of a fleet of X prefill and Y decode workers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from effuse.benchmarks.xpyd_report import capacity, goodput, objectives, report

LIMITS: dict[str, Any] = {
    "prefill_s": 0.05,  # 20 prompts a second
    "decode": [
        {"batch": 1, "tokens_per_s": 640.0, "gap_p99_s": 0.040},  # 5 answers a second
        {"batch": 8, "tokens_per_s": 2560.0, "gap_p99_s": 0.070},  # 20
        {"batch": 64, "tokens_per_s": 3840.0, "gap_p99_s": 0.400},  # 30
    ],
}
SHAPE = "2048/128"


def request(first_s: float = 0.1, gap_s: float = 0.04, failure: str = "") -> dict[str, Any]:
    return {"first_s": first_s, "gaps": [gap_s] * 3, "handoff_s": 0.001, "failure": failure}


def load(rate: float, good: int, bad: int) -> dict[str, Any]:
    """Two seconds of requests that met both objectives, and of ones that met none."""
    return {
        "shape": SHAPE,
        "rate": rate,
        "seconds": 2.0,
        "busy": [1.0, 0.5],
        "each": [request()] * good + [request(gap_s=1.0)] * bad,
        "requests": good + bad,
        "failed": 0,
        "failures": [],
        "tokens_per_s": 100.0,
        **{f"{name}_{part}_s": 0.1 for name in ("first", "gap", "handoff") for part in PARTS},
    }


PARTS = ("p50", "p99")


def fleet(prefill: int, decode: int, *arriving: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": decode,
        "alone": {SHAPE: [request(gap_s=0.039)]},
        "arriving": list(arriving),
        "links": {"prefill-0 to decode-0": 71e9} if prefill else {},
        "killed": None,
        **more,
    }


@pytest.mark.parametrize(
    ("prefill", "decode", "gap_s", "expected"),
    [
        (1, 3, math.inf, 20.0),  # prefill bounds
        (3, 1, math.inf, 30.0),  # decode bounds
        (3, 1, 0.08, 20.0 + 10.0 / 33),  # between the batches of 8 and 64, 1/33 of the way
        (3, 1, 0.01, 0.0),  # none does
        (2, 2, 0.08, 40.0),
        (0, 4, math.inf, 4 / (0.05 + 1 / 30)),
        (0, 4, 0.01, 4 / (0.05 + 1 / 30)),
    ],
)
def test_a_fleet_bears_what_its_busier_role_does(
    prefill: int, decode: int, gap_s: float, expected: float
) -> None:
    assert capacity(prefill, decode, LIMITS, 128, gap_s) == pytest.approx(expected)


def test_the_highest_rate_is_below_the_first_one_that_fell_short() -> None:
    one = fleet(2, 2, load(4, 8, 0), load(8, 15, 1), load(12, 20, 4), load(16, 32, 0))
    wanted = objectives({"fleets": [one]}, SHAPE)[0]
    assert wanted.gap_s == pytest.approx(0.078)
    assert goodput(one, SHAPE, wanted) == (16.0, 8.0)
    assert goodput(one, "512/128", wanted) == (0.0, 0.0)


def test_the_report_names_the_best_split_by_sum_and_as_found() -> None:
    killed = load(10, 20, 0) | {"workers": ["prefill-0", "decode-0"], "running": 7}
    content = {
        "limits": {SHAPE: LIMITS},
        "fleets": [
            fleet(2, 2, load(20, 40, 0), killed=killed),
            fleet(3, 1, load(20, 44, 0)),
            fleet(0, 4, load(20, 50, 0)),
        ],
    }
    told = report(content)
    (best,) = [line for line in told.splitlines() if line.startswith(f"| {SHAPE} | 2 |")]
    assert best.endswith("| 2P2D | 3P1D | 3P1D |")
    assert "| 2P2D | prefill-0, decode-0 | 20 | 0 | 7 | none | 100.00 | 100.00 |" in told
    assert "| 2P2D | prefill-0 to decode-0 | 71.0 |" in told


def test_nothing_is_told_of_fleets_that_did_not_run() -> None:
    told = report({"limits": {SHAPE: LIMITS}, "fleets": []})
    assert "| none | none | none |" in told and "killed" not in told
