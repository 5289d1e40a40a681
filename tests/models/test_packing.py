"""How flat arrays are joined for their one copy to a device."""

from __future__ import annotations

import numpy as np

from effuse.models.packing import join_aligned


def test_joined_arrays_begin_at_16_bytes_and_hold_what_was_given() -> None:
    """Triton compiles a kernel anew for a pointer that is no multiple of 16."""
    arrays = [np.arange(count, dtype=np.int64) + 10 * count for count in (3, 0, 1, 4, 5)]
    joined, spans = join_aligned(arrays)
    assert [span.start * joined.itemsize % 16 for span in spans] == [0] * 5
    for span, array in zip(spans, arrays, strict=True):
        assert joined[span].tolist() == array.tolist()
