"""Rows have their multiples of the first row's speed, as in D2F's tables."""

from __future__ import annotations

import math
import re

import pytest

from effuse.cli import figures
from effuse.cli.figures import Run, Sample


def _run(
    name: str, total_s: float, tokens: int, right: tuple[bool | None, ...], failed: int = 0
) -> Run:
    samples = [Sample(tokens, 1, 0.1, 0.1, is_right=one) for one in right]
    return Run(name, total_s, samples, failed=failed)


BASE = _run("base model", 40.0, 100, (True, False, True, True))
FAST = _run("fleet 0P8D", 5.0, 50, (True, True), failed=2)


def test_the_first_row_is_once_as_fast_as_itself() -> None:
    cells = ["40.00 (1.0x)", "10.00 (1.0x)", "10.00 (1.0x)", "75.0 %"]
    assert _cells(figures.row(BASE, BASE)) == ["base model", *cells]


def test_a_faster_row() -> None:
    """Above 1 is faster, in each column; failed requests are no right answers."""
    told = figures.row(FAST, BASE)
    cells = ["5.00 (8.0x)", "20.00 (2.0x)", "2.50 (4.0x)", "50.0 %"]
    assert _cells(told) == ["fleet 0P8D", *cells]
    assert len(told) == len(figures.headings()) <= 80


def test_what_is_not_known_is_a_dash() -> None:
    none = _run("fleet", 1.0, 0, (), failed=3)
    assert _cells(figures.row(none, BASE)) == ["fleet", "1.00", "0.00 (0.0x)", "-", "-"]
    assert _cells(figures.row(BASE, none))[1:4] == ["40.00", "10.00", "10.00"]
    partly = _run("fleet", 1.0, 8, (True, None))
    assert math.isnan(partly.accuracy) and figures.row(partly, BASE).endswith("-")


def _cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_fields_of_a_file() -> None:
    _, fields = figures.as_json([BASE, FAST])
    assert fields["latency_s"] == 2.5
    assert fields["tokens_per_s_multiple"] == pytest.approx(2.0)
    assert fields["accuracy"] == 0.5
    assert figures.as_json([_run("x", 1.0, 1, (None,))])[0]["accuracy"] is None
