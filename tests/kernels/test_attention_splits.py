"""How many splits a launch allows; how a sequence is cut is `operators.interpreted`'s to check."""

import pytest

from effuse.kernels.attention_splits_triton import MOST_PART_BYTES, most_splits, num_parts


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


@pytest.mark.parametrize(
    ("programs", "max_keys", "part_bytes", "expected"),
    [
        (32, 2180, 1 << 20, 5),
        (66, 2180, 1 << 20, 5),
        (67, 2180, 1 << 20, 1),  # every processor but two has a program
        (32, 512, 1 << 20, 1),
        (32, 2048, MOST_PART_BYTES // 4, 4),
        (32, 2049, MOST_PART_BYTES // 4, 1),  # too much memory
    ],
)
def test_parts_get_programs_if_half_a_wave_is_idle(
    programs: int, max_keys: int, part_bytes: int, expected: int
) -> None:
    assert num_parts(programs, 132, max_keys, part_bytes) == expected
