"""The limit of a step on a GPU: the model's own matrix products and nothing else, in one graph.

Inputs are fixed random tensors; there is no attention, norm, sampling or state.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from effuse.decode_worker.device_buckets import Integers
from effuse.models.transformer import Transformer

WARM_S = 1.5  # of bare products of many rows, before they are timed
MOST_GROUPS = 4  # of steps, whose bare products are timed


def mean_bare_ms(model: Transformer, used: Integers, repeats: int) -> float:
    """Mean over steps of the bare products of each one's rows and candidates; `used` [steps, 2]."""
    total, warm_s = 0.0, WARM_S if used[:, 0].min() > 256 else 0.1
    for steps in _alike(used):
        rows, candidates = steps.mean(0).round().astype(int).tolist()
        run = graph_of(bare_products(model, rows, candidates))
        total += len(steps) * mean_ms(run, max(3, repeats * len(steps) // len(used)), warm_s)
        warm_s = 0.1
    return total / len(used)


def _alike(used: Integers) -> list[Integers]:
    """Steps by their rows; where these are of many numbers, in four groups of neighbours."""
    ordered = used[used[:, 0].argsort(kind="stable")]
    numbers, begins = np.unique(ordered[:, 0], return_index=True)
    if len(numbers) <= MOST_GROUPS:
        return np.split(ordered, begins[1:])
    return np.array_split(ordered, MOST_GROUPS)


def bare_products(model: Transformer, num_rows: int, num_head_rows: int) -> Callable[[], None]:
    """A step's linears: `num_rows` rows, and `num_head_rows` of them after the last attention."""
    config = model.config

    def rows(count: int, width: int) -> Tensor:
        return torch.randn(count, width, device=model.device, dtype=model.dtype)

    x = rows(num_rows, config.hidden_size)
    mixed = rows(num_rows, config.num_heads * config.head_dim)
    activated = rows(num_rows, config.intermediate_size)

    @torch.inference_mode()
    def run() -> None:
        for layer in model.weights.layers:
            functional.linear(x, layer.qkv, layer.qkv_bias)
            count = num_head_rows if layer is model.weights.layers[-1] else num_rows
            functional.linear(mixed[:count], layer.attn_out)
            functional.linear(x[:count], layer.gate_up)
            functional.linear(activated[:count], layer.down)
        functional.linear(x[:num_head_rows], model.weights.head)

    return run


def graph_of(run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a CUDA graph, warmed up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def mean_ms(run: Callable[[], None], repeats: int, warm_s: float) -> float:
    """Mean time of `repeats` queued calls, back to back, by device events.

    Long products are limited by power: `warm_s` of them go before, so that the clock is that of
    the steps which they are held against.
    """
    deadline = time.perf_counter() + warm_s
    while time.perf_counter() < deadline:
        run()
        torch.cuda.synchronize()
    begin, end = _event(), _event()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
