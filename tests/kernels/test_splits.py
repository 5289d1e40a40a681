"""How tokens are split over programs: all of them, in even shares, no more splits than allowed."""

import pytest

from effuse.kernels.splits import SPLIT_STEP, most_splits, tokens_per_split


@pytest.mark.parametrize(
    ("programs", "wave", "context", "expected"),
    [
        (28, 132, 3072, 4),
        (32, 132, 3072, 4),
        (448, 132, 3072, 1),
        (4, 132, 300, 3),  # no more than there are steps
        (4, 132, 0, 1),
        (0, 132, 10_000, 79),
    ],
)
def test_programs_fill_one_wave(programs: int, wave: int, context: int, expected: int) -> None:
    assert most_splits(programs, wave, context) == expected


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("num_rows", [1, 128, 160])
@pytest.mark.parametrize("context", [0, 1, 127, 128, 129, 640, 2080, 8191])
def test_shares_are_even_and_no_more_than_allowed(context: int, num_rows: int, splits: int) -> None:
    share = tokens_per_split(context, num_rows, splits)
    used = max(1, -(-context // share))
    last = context + num_rows - (used - 1) * share
    assert share % SPLIT_STEP == 0
    assert used <= splits
    assert 0 < last <= share + num_rows
    assert used < splits or last < share + SPLIT_STEP
    assert share < -(-(context + num_rows) // splits) + SPLIT_STEP
