"""How flat arrays are joined for their one copy to a device, and where rows are stored."""

from __future__ import annotations

import numpy as np

from effuse.models.packing import join_aligned, pack_parts
from effuse.models.part import Part


def test_joined_arrays_begin_at_16_bytes_and_hold_what_was_given() -> None:
    """Triton compiles a kernel anew for a pointer that is no multiple of 16."""
    arrays = [np.arange(count, dtype=np.int64) + 10 * count for count in (3, 0, 1, 4, 5)]
    joined, spans = join_aligned(arrays)
    assert [span.start * joined.itemsize % 16 for span in spans] == [0] * 5
    for span, array in zip(spans, arrays, strict=True):
        assert joined[span].tolist() == array.tolist()


def test_rows_that_are_passed_over_take_no_place_in_the_pages() -> None:
    """A row between stored ones stores nothing, and those behind it follow those before it."""
    part = Part(
        token_ids=range(7),
        start=0,
        pages=[5, 3],
        num_stored=4,
        unstored=range(2, 5),
        block_origin=7,
    )
    packed = pack_parts([part], page_size=2, shift=False)
    assert packed.slots.tolist() == [10, 11, -1, -1, -1, 6, 7]
    assert packed.positions.tolist() == list(range(7))
