"""`python -m effuse.benchmarks.gpu_experts`: the products of experts by the tiles they may take.

LLaDA2.0-mini's experts with random weights and drawn routes, at the loads of 1, 8, 32 and 64 blocks
of 32 rows. Each product with every tile, compared with torch's grouped product of sorted rows and
with the time to read the reached weights from memory. `--rows` takes other loads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from effuse.benchmarks.gpu_models import LLADA2_MINI
from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.gpu_timing import Call, copy_bytes_per_us, medians_us
from effuse.kernels.experts import route
from effuse.kernels.experts_routes_triton import launch_sort
from effuse.kernels.experts_triton import (
    WIDE_TILE,
    ProductTile,
    launch_down,
    launch_gate_up,
    rows_of_tiles,
    tiles_of,
)

Product = Literal["gate_up", "down"]

ROWS = (32, 256, 1024, 2048)
LAYERS = 3  # whose weights are rotated: more than the L2 cache holds
SHOWN = 4  # of the fastest tiles
# (columns, depth, warps, stages); 128 columns only for `down`, whose program has one product.
SHAPES = (
    *((32, 128, 4, 3), (32, 128, 4, 4), (32, 64, 4, 4), (64, 128, 4, 3), (64, 64, 4, 3)),
    *((64, 64, 4, 4), (64, 64, 8, 3), (128, 64, 4, 3), (128, 128, 4, 3), (128, 64, 8, 3)),
)
WIDEST: dict[Product, int] = {"gate_up": 64, "down": 128}
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """Microseconds of one product at one load."""

    name: Product
    rows: int
    reached: int  # experts
    taken: float  # by the tile that the step takes if experts have few picks
    tiles: dict[str, float]  # by `tile_name`
    grouped: float  # torch's
    read: float  # of the weights of the reached experts

    @property
    def line(self) -> str:
        """In words."""
        fastest = sorted(self.tiles, key=lambda name: self.tiles[name])[:SHOWN]
        shown = ", ".join(f"{name} {self.tiles[name]:.0f}" for name in fastest)
        return (
            f"{self.name:8}{self.rows:5} rows, {self.reached} experts: {self.taken:.0f} us, torch "
            f"{self.grouped:.0f}, reading the weights {self.read:.0f}; fastest tiles: {shown}"
        )


def tile_name(tile: ProductTile) -> str:
    """Rows x columns x depth, warps, stages."""
    return f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.num_warps}s{tile.num_stages}"


def tried_tiles(num_picks: int, num_experts: int, widest: int) -> list[ProductTile]:
    """Tiles with as many rows as the step takes for this many picks, with half as many and with
    twice.
    """
    taken = rows_of_tiles(num_picks, num_experts)
    rows = [each for each in (taken // 2, taken, 2 * taken) if 16 <= each <= 128]
    shapes = [shape for shape in SHAPES if shape[0] <= widest]
    tiles = [ProductTile(each, *shape) for each in rows for shape in shapes]
    return [*tiles, WIDE_TILE] if widest == WIDEST["gate_up"] else tiles


class ExpertProducts:
    """Weights of some layers on a GPU, and their products at one load after another."""

    def __init__(self) -> None:
        assert LLADA2_MINI.experts is not None
        self._routing = LLADA2_MINI.experts.routing
        hidden, inner = LLADA2_MINI.hidden_size, LLADA2_MINI.experts.intermediate_size
        count = self._routing.num_weights
        shapes: dict[Product, tuple[int, int]] = {
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self._weights = {
            name: [_random(count, *shape) for _ in range(LAYERS)] for name, shape in shapes.items()
        }
        self._bytes_per_us = copy_bytes_per_us()

    def measure(self, name: Product, rows: int) -> TiledProduct:
        """One product of this many rows."""
        weights = self._weights[name]
        scores = torch.randn(rows, self._routing.num_experts, device=CUDA)
        picks = route(scores, None, self._routing).experts
        counts = torch.bincount(picks.flatten().long(), minlength=len(weights[0]))
        ends, reached = counts.cumsum(0).int(), int((counts > 0).sum())
        tiles = tried_tiles(picks.numel(), len(ends), WIDEST[name])
        first, second = (self._weights[each][0] for each in WIDEST)
        taken = tiles_of(picks.numel(), first, second)[name == "down"]
        rivals = {tile_name(tile): _calls(name, picks, weights, tile) for tile in tiles}
        x = _random(picks.numel(), weights[0].shape[2])
        multiply = torch._grouped_mm
        times = medians_us(
            {
                "taken": _calls(name, picks, weights, taken),
                "grouped": [partial(multiply, x, w.transpose(1, 2), offs=ends) for w in weights],
                **rivals,
            }
        )
        return TiledProduct(
            name,
            rows,
            reached,
            taken=times["taken"],
            tiles={rival: times[rival] for rival in rivals},
            grouped=times["grouped"],
            read=reached * weights[0][0].nbytes / self._bytes_per_us,
        )


def _calls(
    name: Product, picks: Tensor, weights: Sequence[Tensor], tile: ProductTile
) -> list[Call]:
    """The product with each of the weights, by this tile."""
    found = launch_sort(picks, len(weights[0]), tile.rows)
    width = weights[0].shape[2]
    if name == "gate_up":
        x = _random(len(picks), width)
        return [partial(launch_gate_up, x, weight, found, tile) for weight in weights]
    activated = _random(picks.numel(), width)
    return [partial(launch_down, activated, weight, found, tile) for weight in weights]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_experts")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_experts.json"))
    asked = parser.parse_args(argv)
    products = ExpertProducts()
    found: list[TiledProduct] = []
    for rows in asked.rows or ROWS:
        for name in WIDEST:
            found.append(products.measure(name, rows))
            print(found[-1].line, flush=True)
    write_record(asked.json, [asdict(each) for each in found], [each.line for each in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
