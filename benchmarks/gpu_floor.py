"""The limit of a step on a GPU: the model's own matrix products and nothing else, in one graph.

Inputs are fixed random tensors; there is no attention, norm, sampling or state. Each product uses
the fastest of the known ways for its weights in place, found by timing them for exactly that number
of rows. Long products are limited by power, so steps and their products take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from effuse.benchmarks.gpu_timing import Call, Stamp, medians_us
from effuse.models.transformer import LayerWeights, Transformer

# Rows up to which halves are tried, twice as many as those for which the step uses them: above,
# writing the fp32 halves costs more than filling the device gains.
MOST_ROWS_HALVED = 512
# Products whose halves the next norm can add up.
_ADDED_UP = ("attn_out", "down")


def halves(x: Tensor, weight: Tensor) -> Tensor:
    """Both fp32 halves [2, rows, out] of the sum in x [rows, in] times weight [out, in]."""
    half = x.shape[1] // 2
    return torch.bmm(
        x.view(len(x), 2, half).transpose(0, 1),
        weight.view(len(weight), 2, half).permute(1, 2, 0),
        out_dtype=torch.float32,
    )


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "halves": halves,
}


def known_ways(product: str, num_rows: int, *, can_halve: bool) -> tuple[str, ...]:
    """Names of the ways to compute a product of `num_rows` rows; `can_halve` describes the
    device.
    """
    is_halved = can_halve and product in _ADDED_UP and num_rows <= MOST_ROWS_HALVED
    return ("linear", "halves") if is_halved else ("linear",)


def fastest(times: Mapping[str, float]) -> str:
    """The name with the least time, the first of equals."""
    return min(times, key=lambda name: times[name])


class Floor:
    """A model's products for any number of rows; each number is captured and chosen once."""

    def __init__(self, model: Transformer, most_rows: int) -> None:
        config = model.config
        self._model = model
        self._is_cuda = model.device.type == "cuda"
        x, mixed, activated = (
            torch.randn(most_rows, width, device=model.device, dtype=model.dtype)
            for width in (
                config.hidden_size,
                model.q_dim,
                config.intermediate_size // model.shard.size,
            )
        )
        self._inputs = {"qkv": x, "attn_out": mixed, "gate_up": x, "down": activated, "head": x}
        self._replays: dict[tuple[int, int], Call] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self.chosen: dict[tuple[str, int], str] = {}  # way by product and rows

    def replay(self, num_rows: int, num_head_rows: int) -> Call:
        """A step's products: `num_rows` rows, `num_head_rows` of them after the last attention.

        One graph, captured at its first use; on a CPU the calls themselves.
        """
        key = num_rows, num_head_rows
        if key not in self._replays:
            run = partial(self._run, *key)
            self._choose(num_rows, num_head_rows)
            self._replays[key] = graph_of(run, self._pool) if self._is_cuda else run
        return self._replays[key]

    def choices(self) -> str:
        """The choices among several ways, in words."""
        return ", ".join(
            f"{product} of {rows} rows by {way}"
            for (product, rows), way in sorted(self.chosen.items())
            if len(self._ways(product, rows)) > 1
        )

    @torch.inference_mode()
    def _run(self, num_rows: int, num_head_rows: int) -> None:
        layers, inputs = self._model.weights.layers, self._inputs
        for layer in layers:
            functional.linear(inputs["qkv"][:num_rows], layer.qkv, layer.qkv_bias)
            self._rest(layer, num_head_rows if layer is layers[-1] else num_rows)
        functional.linear(inputs["head"][:num_head_rows], self._model.weights.head)

    def _rest(self, layer: LayerWeights, count: int) -> None:
        """A layer's products after its attention, for `count` rows."""
        for product in ("attn_out", "gate_up", "down"):
            self._product(layer, product, count)

    def _product(self, layer: LayerWeights, product: str, count: int) -> None:
        way = WAYS[self.chosen[product, count]]
        way(self._inputs[product][:count], _weight(layer, product))

    def _choose(self, *counts: int) -> None:
        for rows in counts:
            for product in ("attn_out", "gate_up", "down"):
                if (product, rows) not in self.chosen:
                    self.chosen[product, rows] = self._fastest_way(product, rows)

    def _fastest_way(self, product: str, rows: int) -> str:
        """By the product's time in all layers, whose weights fit in no cache."""
        ways = self._ways(product, rows)
        if len(ways) == 1:
            return ways[0]
        x = self._inputs[product][:rows]
        weights = [_weight(layer, product) for layer in self._model.weights.layers]
        weights = [weight for weight in weights if weight.dim() == 2]  # without experts
        return fastest(
            medians_us({way: [partial(WAYS[way], x, each) for each in weights] for way in ways})
        )

    def _ways(self, product: str, rows: int) -> tuple[str, ...]:
        can_halve = self._is_cuda and self._model.dtype != torch.float32
        return known_ways(product, rows, can_halve=can_halve)


def _weight(layer: LayerWeights, product: str) -> Tensor:
    weight = getattr(layer, product)
    assert isinstance(weight, Tensor)
    return weight


@dataclass(frozen=True, slots=True)
class Turns:
    """Steps and the bare products of the same rows, in turns: ms of each turn, steps in all."""

    step_ms: Sequence[float]
    bare_ms: Sequence[float]
    num_steps: int

    @property
    def mean_step_ms(self) -> float:
        return sum(self.step_ms) / self.num_steps

    @property
    def mean_bare_ms(self) -> float:
        return sum(self.bare_ms) / self.num_steps

    @property
    def ratio(self) -> float:
        """Steps over bare products, all turns together."""
        return sum(self.step_ms) / sum(self.bare_ms)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the turns' own ratios."""
        ratios = [step / bare for step, bare in zip(self.step_ms, self.bare_ms, strict=True)]
        return float(np.percentile(ratios, 10)), float(np.percentile(ratios, 90))


def in_turns(device: torch.device, step: Call, bare: Sequence[Call], size: int) -> Turns:
    """A step for each of `bare`: `size` steps, then the products of exactly those, and so on.

    It does not wait in between, so that the device always has the next turn before it.
    """
    stamps = [Stamp(device)]
    for at in range(0, len(bare), size):
        turn = bare[at : at + size]
        for _ in turn:
            step()
        stamps.append(Stamp(device))
        for run in turn:
            run()
        stamps.append(Stamp(device))
    times = [begin.ms_until(end) for begin, end in pairwise(stamps)]
    return Turns(times[::2], times[1::2], len(bare))


def graph_of(run: Call, pool: Any = None) -> Callable[[], None]:
    """`run` as a CUDA graph, warmed up; graphs of one pool share their memory."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def mean_ms(run: Call, repeats: int, warm_s: float) -> float:
    """Mean time of `repeats` queued calls, back to back, by device events.

    Long products are limited by power: `warm_s` of them come before, so that the clock is that of
    long work.
    """
    device = torch.device("cuda")
    deadline = time.perf_counter() + warm_s
    while time.perf_counter() < deadline:
        run()
        torch.cuda.synchronize()
    begin = Stamp(device)
    for _ in range(repeats):
        run()
    return begin.ms_until(Stamp(device)) / repeats
