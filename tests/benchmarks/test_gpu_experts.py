"""The measured tiles fit a Hopper processor, and the step's own is one of them."""

from __future__ import annotations

import pytest
import torch

from effuse.benchmarks.gpu_experts import ROWS, WIDEST, TiledProduct, tile_name, tried_tiles
from effuse.benchmarks.gpu_models import LLADA2_MINI
from effuse.kernels.experts_triton import WIDE_TILE, tiles_of

assert LLADA2_MINI.experts is not None
ROUTING = LLADA2_MINI.experts.routing
SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("rows", ROWS)
def test_tiles_fit_and_hold_the_one_that_the_step_takes(rows: int) -> None:
    picks, experts = rows * ROUTING.num_picks, ROUTING.num_weights
    shapes = ((experts, 1024, 2048), (experts, 2048, 512))
    weights = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    own = dict(zip(WIDEST, tiles_of(picks, *weights), strict=True))
    for name, widest in WIDEST.items():
        tiles = tried_tiles(picks, ROUTING.num_weights, widest)
        assert len({tile_name(tile) for tile in tiles}) == len(tiles)
        for tile in tiles:
            products = 2 if name == "gate_up" else 1
            values = tile.depth * (tile.rows + products * tile.columns)
            assert 2 * values * tile.num_stages <= SHARED_BYTES, tile
        assert own[name] in tiles, "the step's own tile is tried"
        assert (WIDE_TILE in tiles) == (name == "gate_up")


def test_a_line_names_the_fastest_first() -> None:
    tiles = {"16x64x128w4s3": 90.0, "16x32x64w4s4": 80.4, "32x64x64w4s3": 120.0}
    found = TiledProduct("down", 32, 160, 91.0, tiles, 100.0, 70.0)
    assert found.line.endswith("fastest tiles: 16x32x64w4s4 80, 16x64x128w4s3 90, 32x64x64w4s3 120")
    assert "160 experts: 91 us, torch 100, reading the weights 70" in found.line
