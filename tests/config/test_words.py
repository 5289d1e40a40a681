"""Numbers and counts in sentences."""

from __future__ import annotations

import math

import pytest

from effuse.config.words import counted, plain, split_of


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (20.0, "20"),
        (9.999, "10"),
        (0.0285, "0.0285"),
        (0.00001234, "0.0000123"),
        (999.6, "1,000"),
        (44_321.0, "44,300"),
        (-1.5, "-1.5"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert plain(value) == shown


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2)] == [
        "0 workers",
        "1 worker",
        "2 workers",
    ]
    assert split_of(1, 1) == "1 prefill worker and 1 decode worker"
    assert split_of(3, 2) == "3 prefill and 2 decode workers"
