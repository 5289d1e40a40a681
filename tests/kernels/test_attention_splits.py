"""How many splits a launch allows; how a sequence is cut is `operators.interpreted`'s to check."""

import pytest

from effuse.kernels.attention_splits_triton import most_splits


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
