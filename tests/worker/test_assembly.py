"""The forward that a worker measures its memory with, which is larger than a short model's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import TinySizes, write_tiny_checkpoint
from decoding.engines import layout_of, load_tiny

from effuse.kvtransfer.memory import PageMemory
from effuse.models.runner import ModelRunner
from effuse.worker.assembly import warm_up


@pytest.mark.parametrize("num_rows", [4, 24, 25, 60])
def test_rows_to_warm_up_with_stay_within_the_models_positions(
    tmp_path: Path, num_rows: int
) -> None:
    """On a GPU a row beyond would read behind the rotary table, and nothing would say so."""
    path = write_tiny_checkpoint(tmp_path, "dream", sizes=TinySizes(max_positions=24))
    model = load_tiny(path)
    memory = PageMemory(layout_of(model, 16), num_pages=1)
    runner = ModelRunner(model, memory.layer_views(), page_size=16, block_size=4)
    warm_up(runner, num_rows)
    is_written = memory.tensor.abs().sum((0, 1, 2, 3, 5)) > 0
    assert is_written.tolist() == [True, *[False] * 15]
