"""The limit of a step on a GPU: the model's own matrix products and nothing else, in one graph.

Inputs are fixed random tensors; there is no attention, norm, sampling or state.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from effuse.models.transformer import Transformer


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
