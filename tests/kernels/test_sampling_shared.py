"""Tiles hold the chunk they are asked for, 16 bytes a thread and place."""

from __future__ import annotations

import pytest
import torch

from effuse.kernels.sampling_shared_triton import Tile, sampling_shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [2, 97, 301, 4096, 152_064])
def test_a_tile_is_its_chunk(vocab_size: int, dtype: torch.dtype) -> None:
    shape = sampling_shape(vocab_size)
    tile = Tile.of(dtype, shape.chunk, shape.num_warps)
    assert tile.depth * tile.lanes * tile.elements == shape.chunk
    assert tile.elements * dtype.itemsize == 16
    assert tile.lanes <= 32 * shape.num_warps
    assert shape.chunk >= min(vocab_size, 2048)
