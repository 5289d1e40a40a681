"""`python -m effuse.benchmarks.gpu_moe`: decode steps of a model with experts, and their products.

LLaDA2.0-mini's shape with random weights decodes by block diffusion, one block of 32 rows a request
and a second one while the last is stored, `--pace` tokens a step (`gpu_script`). Random weights
would send similar rows to the same few experts, so routes are computed completely and then replaced
by drawn ones; the bare graph for comparison has products of exactly those loads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effuse.benchmarks.gpu_floor import Floor, fastest
from effuse.benchmarks.gpu_models import EXPERT_MODELS, random_model
from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.gpu_step import Bench, Result, table
from effuse.benchmarks.gpu_timing import medians_us
from effuse.config.decoding import DecodeSettings
from effuse.kernels.experts import Routes, expert_mlp, own_routes, route, router_logits
from effuse.models.config import ModelConfig
from effuse.models.group import RankPlace
from effuse.models.transformer import LayerWeights, Transformer

if TYPE_CHECKING:
    from effuse.kernels.experts_routes_triton import SortedPicks

# (batch, timed steps, steps of a turn)
BATCHES = ((1, 64, 8), (8, 32, 4), (32, 16, 2), (64, 16, 2))


class DrawnRoutes(Transformer):
    """A transformer whose row r goes to the same drawn experts in every layer and step."""

    drawn: Tensor  # [rows, K] int32

    def draw(self, num_rows: int) -> None:
        """Draws experts for this many rows, as evenly as random scores choose them."""
        assert self.config.experts is not None
        routing = self.config.experts.routing
        generator = torch.Generator(self.device).manual_seed(1)
        scores = torch.randn(num_rows, routing.num_experts, generator=generator, device=self.device)
        self.drawn = route(scores, None, routing).experts

    def _route(self, x: Tensor, router: Tensor, bias: Tensor | None) -> Routes:
        assert self.config.experts is not None
        routing = self.config.experts.routing
        weights = route(router_logits(x, router), bias, routing).weights
        routes = Routes(self.drawn[: len(x)], weights)
        shard = self.shard
        if shard.experts is None:
            return routes
        return own_routes(routes, shard.experts, routing.num_experts, shard.rank, shard.size)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The picks of some rows, sorted by expert beforehand, and random inputs of their products."""

    routes: Routes
    x: Tensor  # [T, H]
    ends: Tensor  # [E] int32: picks of this and all experts before
    rows: Tensor  # [P, H] a row for each pick
    activated: Tensor  # [P, I]
    tiles: SortedPicks | None = None  # of the step's own kernels for few picks, on a GPU
    wide: SortedPicks | None = None  # and of its kernel for many

    @classmethod
    def of(cls, picks: Tensor, layer: LayerWeights) -> ExpertLoad:
        """That of picks [T, K] in this layer."""
        num_experts, hidden, inner = layer.down.shape
        num_picks, device = picks.numel(), picks.device
        counts = torch.bincount(picks.flatten().long(), minlength=num_experts)
        made = partial(torch.randn, dtype=layer.down.dtype, device=device)
        return cls(
            Routes(picks, torch.ones(picks.shape, device=device)),
            x=made(len(picks), hidden),
            ends=counts.cumsum(0).int(),
            rows=made(num_picks, hidden),
            activated=made(num_picks, inner),
            **(_tiles(picks, num_experts) if device.type == "cuda" else {}),
        )


def _tiles(picks: Tensor, num_experts: int) -> dict[str, SortedPicks]:
    from effuse.kernels.experts_routes_triton import launch_sort
    from effuse.kernels.experts_triton import WIDE_TILE, rows_of_tiles

    rows = {"tiles": rows_of_tiles(picks.numel(), num_experts), "wide": WIDE_TILE.rows}
    return {name: launch_sort(picks, num_experts, each) for name, each in rows.items()}


def grouped(layer: LayerWeights, load: ExpertLoad) -> None:
    """Both products by torch, over sorted rows."""
    multiply = torch._grouped_mm
    multiply(load.rows, layer.gate_up.transpose(1, 2), offs=load.ends)
    multiply(load.activated, layer.down.transpose(1, 2), offs=load.ends)


def in_tiles(layer: LayerWeights, load: ExpertLoad) -> None:
    """Both products by the step's own kernels; without these, all of the experts' work."""
    if load.tiles is None:
        expert_mlp(load.x, layer.gate_up, layer.down, load.routes)
        return
    from effuse.kernels.experts_triton import launch_down, launch_gate_up, tiles_of

    of_gate_up, of_down = tiles_of(len(load.activated), layer.gate_up, layer.down)
    launch_gate_up(load.x, layer.gate_up, load.tiles, of_gate_up)
    launch_down(load.activated, layer.down, load.tiles, of_down)


def wide(layer: LayerWeights, load: ExpertLoad) -> None:
    """The first by the step's kernel for many picks, the second by torch."""
    from effuse.kernels.experts_triton import WIDE_TILE, launch_gate_up

    assert load.wide is not None, "it is taken on a GPU"
    launch_gate_up(load.x, layer.gate_up, load.wide, WIDE_TILE)
    torch._grouped_mm(load.activated, layer.down.transpose(1, 2), offs=load.ends)


EXPERT_WAYS: dict[str, Callable[[LayerWeights, ExpertLoad], None]] = {
    "grouped": grouped,
    "tiles": in_tiles,
    "wide": wide,
}


class ExpertFloor(Floor):
    """The products of layers with experts, of drawn routes."""

    def __init__(self, model: DrawnRoutes, most_rows: int) -> None:
        super().__init__(model, most_rows)
        self._drawn = model.drawn
        self._experts = [layer for layer in model.weights.layers if layer.router is not None]
        self._loads: dict[int, ExpertLoad] = {}

    def _rest(self, layer: LayerWeights, count: int) -> None:
        if layer.router is None:
            super()._rest(layer, count)
            return
        self._product(layer, "attn_out", count)
        router_logits(self._inputs["gate_up"][:count], layer.router)
        EXPERT_WAYS[self.chosen["experts", count]](layer, self._loads[count])

    def _choose(self, *counts: int) -> None:
        super()._choose(*counts)
        for rows in counts:
            if rows not in self._loads:
                self._loads[rows] = ExpertLoad.of(self._drawn[:rows], self._experts[0])
                self.chosen["experts", rows] = self._fastest_experts(rows)

    def _fastest_experts(self, rows: int) -> str:
        ways = self._ways("experts", rows)
        if len(ways) == 1:
            return ways[0]
        load = self._loads[rows]
        calls = {
            way: [partial(EXPERT_WAYS[way], layer, load) for layer in self._experts] for way in ways
        }
        return fastest(medians_us(calls))

    def _ways(self, product: str, rows: int) -> tuple[str, ...]:
        if product != "experts":
            return super()._ways(product, rows)
        can_group = self._is_cuda and self._model.dtype == torch.bfloat16
        return tuple(EXPERT_WAYS) if can_group else ("tiles",)


class ExpertBench(Bench):
    """Block diffusion of one model with experts."""

    models = EXPERT_MODELS
    window = 1

    def reached(self, rows: int) -> int:
        """Experts that this many rows reach in a layer, including the shared one."""
        assert isinstance(self.model, DrawnRoutes)
        return len(torch.unique(self.model.drawn[:rows]))

    def _model(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, place: RankPlace
    ) -> Transformer:
        drawn = random_model(config, device, dtype, place)
        return DrawnRoutes(config, drawn.weights, shard=drawn.shard, group=drawn.group)

    def _floor(self, most_rows: int) -> Floor:
        assert isinstance(self.model, DrawnRoutes)
        self.model.draw(most_rows + 256)  # a captured size may be that much larger
        return ExpertFloor(self.model, most_rows)

    def _settings(self, pace: int) -> DecodeSettings:
        return DecodeSettings(
            algorithm="block_diffusion", denoising_steps=self.model.config.block_size
        )

    def _usual(self, batch: int) -> tuple[range, range]:
        rows = batch * self.model.config.block_size
        # A block that is about to be stored is counted together with the next one, which is all
        # masks.
        return range(rows, 2 * rows + 1), range(batch, 2 * rows + 1)


def expert_line(bench: ExpertBench, result: Result) -> str:
    """The size of a step's experts, in words."""
    layers = bench.model.weights.layers
    reached = bench.reached(round(result.rows))
    experts = [layer for layer in layers if layer.router is not None]
    each = experts[0].gate_up[0].nbytes + experts[0].down[0].nbytes
    weigh = reached * each * len(experts)
    return (
        f"{result.model}, batch {result.batch}: {result.rows:.0f} rows reach {reached} of "
        f"{len(experts[0].gate_up)} experts a layer, {weigh / 1e9:.2f} GB of weights a step, "
        f"{weigh / 1e9 / result.turns.mean_step_ms:.2f} TB/s in all"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_moe")
    parser.add_argument("--model", choices=sorted(EXPERT_MODELS), default="llada2-mini")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--pace", type=int, default=4, help="tokens a request and step")
    parser.add_argument("--profile", action="store_true", help="also device time by kernel")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_moe.json"))
    parser.add_argument("--seconds", type=float, default=75, help="start nothing after this time")
    asked = parser.parse_args(argv)
    deadline = time.monotonic() + asked.seconds
    batches = [row for row in BATCHES if not asked.batch or row[0] in asked.batch]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = ExpertBench(asked.model, device, max(row[0] for row in batches), asked.context)
    results: list[Result] = []
    notes: list[str] = []
    for batch, steps, size in batches:
        if time.monotonic() > deadline:
            notes.append(f"batch {batch} was not started: {asked.seconds:g} s had passed")
            continue
        result = bench.measure(batch, asked.context, asked.pace, steps, size)
        results.append(result)
        notes.append(expert_line(bench, result))
        print(table([result]).splitlines()[1], flush=True)
        if asked.profile:
            path = asked.json.with_name(f"profile_{asked.model}_{batch}.txt")
            notes += bench.profile(batch, asked.context, asked.pace, path)
        write_record(asked.json, [asdict(each) for each in results], notes)
    notes.append(f"{asked.model}, floor: {bench.floor.choices() or 'one way for every product'}")
    write_record(asked.json, [asdict(each) for each in results], notes)
    print("\n".join([*notes, table(results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
