"""Tiles hold the chunk they are asked for, 16 bytes a thread and place; grids hold all rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from effuse.kernels import sampling_filters_triton, sampling_triton
from effuse.kernels.sampling_shared_triton import Tile, sampling_shape
from effuse.kernels.values import RowSampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [2, 97, 301, 4096, 152_064])
def test_a_tile_is_its_chunk(vocab_size: int, dtype: torch.dtype) -> None:
    shape = sampling_shape(vocab_size)
    tile = Tile.of(dtype, shape.chunk, shape.num_warps)
    assert tile.depth * tile.lanes * tile.elements == shape.chunk
    assert tile.elements * dtype.itemsize == 16
    assert tile.lanes <= 32 * shape.num_warps
    assert shape.chunk >= min(vocab_size, 2048)


class Grids:
    """Replaces a kernel, and keeps its launch arguments."""

    def __init__(self) -> None:
        self.all: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.all.append(grid)
        return lambda *_arguments, **_options: None


def test_more_rows_than_a_grid_takes_along_its_second_dimension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA refuses more than 65535 there; a forward of a long prompt is tried with all of them."""
    grids = Grids()
    monkeypatch.setattr(sampling_filters_triton, "_cutoff_kernel", grids)
    for name in ("_greedy_kernel", "_drawn_kernel", "finish_kernel"):
        monkeypatch.setattr(sampling_triton, name, grids)
    rows = 70_000
    integers, reals = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    counters = (integers.long(), integers, integers, integers)
    sampling = RowSampling(reals, reals, integers, *counters, integers)
    sampling_triton.launch(torch.zeros(rows, 20), sampling, 5)
    assert len(grids.all) == 4 and all(grid[0] >= rows for grid in grids.all)
    assert all(size <= 65_535 for grid in grids.all for size in grid[1:])
