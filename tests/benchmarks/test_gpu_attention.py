"""The attention benchmark's count of work."""

from __future__ import annotations

import pytest
from operators.references import visibility_mask

from effuse.benchmarks.gpu_attention import BLOCK_SIZE, Point


@pytest.mark.parametrize("in_flight", [32, 64, 100, 128])
def test_flop_are_those_of_the_visible_pairs(in_flight: int) -> None:
    point = Point("dream", 3, in_flight, 96, 32)
    seen = int(visibility_mask(in_flight, 96, 96, BLOCK_SIZE).sum())
    assert point.visible_pairs == 3 * seen
    assert point.flop == 4 * 128 * 28 * 3 * seen
    assert point.dense_flop == 4 * 128 * 28 * 3 * in_flight * (96 + in_flight)
