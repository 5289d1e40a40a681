"""`python -m effuse.benchmarks.page_order`: attention over pages in two orders, in turns.

"new" is the order of `KVLayout`: a head's part of a group of layers is contiguous. "old" has K and
V of a layer behind each other with all heads: [layers, 2, kv_heads, page_size, head_dim]. A replay
computes one step's attention: every layer once, each over pages in random order. A pool has as
many groups of layers as the limit of its bytes allows, and both orders have equally many.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.gpu_timing import Call, medians_us
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.kvtransfer.layout import DTYPES, KVLayout, PageMemory

Views = list[tuple[Tensor, Tensor]]

MOST_RATIO = 1.02
PAGE_SIZE, BLOCK_SIZE, IN_FLIGHT = 32, 32, 128
POOL_BYTES = 24 << 30
BATCHES, CONTEXTS = (1, 16, 64), (2048, 8192)


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model's attention."""

    name: str
    q_heads: int
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Result:
    """Microseconds of one layer's attention."""

    model: str
    batch: int
    context: int
    layers: int  # of the pool
    old_us: float
    new_us: float

    @property
    def ratio(self) -> float:
        return self.new_us / self.old_us


MODELS = (
    Model("dream-7b", 28, KVLayout("unified", 28, 4, 128, PAGE_SIZE, "bfloat16")),
    Model("sdar-8b", 32, KVLayout("unified", 36, 8, 128, PAGE_SIZE, "bfloat16")),
)


class Attention:
    """One point's rows, and the call of one layer."""

    def __init__(self, model: Model, batch: int, context: int, device: torch.device) -> None:
        """Rows are random. Every sequence has `IN_FLIGHT` rows behind `context` cached tokens."""
        layout = model.layout
        self.num_pages = batch * (context // PAGE_SIZE)
        pages = torch.randperm(self.num_pages).view(batch, -1).tolist()
        sizes = [IN_FLIGHT] * batch, [context] * batch, pages, [context] * batch
        self._batch: AttentionBatch = make_attention_batch(
            *sizes, block_size=BLOCK_SIZE, page_size=PAGE_SIZE, device=device
        )
        heads = [model.q_heads, layout.num_kv_heads, layout.num_kv_heads]
        shape = batch * IN_FLIGHT, sum(heads), layout.head_dim
        fused = torch.randn(shape, dtype=DTYPES[layout.dtype], device=device)
        self._q, self._k, self._v = torch.split(fused, heads, dim=1)
        self._scale = layout.head_dim**-0.5

    def __call__(self, cache: tuple[Tensor, Tensor]) -> Tensor:
        """The output of these rows over a layer's pages."""
        rows = self._q, self._k, self._v
        return block_attention(*rows, *cache, self._batch, scale=self._scale)


def old_views(layout: KVLayout, memory: Tensor) -> Views:
    """The layers of a pool's memory, of any shape, if its pages had the old order."""
    sizes = layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim
    layers = memory.view(-1, *sizes).unbind(1)
    return [(layer[:, 0].transpose(1, 2), layer[:, 1].transpose(1, 2)) for layer in layers]


def fitting(layout: KVLayout, num_pages: int, most_bytes: int) -> KVLayout:
    """The layout with as many of its groups of layers as fit, at least one."""
    groups = min(layout.num_groups, max(1, most_bytes // (num_pages * layout.group_bytes)))
    layers = layout.num_layers // layout.num_groups
    return replace(layout, num_layers=groups * layers, most_groups=groups)


def measure(model: Model, batch: int, context: int) -> Result:
    """Both orders over the same memory, because a pool of each may not fit beside the other."""
    device = torch.device("cuda")
    attention = Attention(model, batch, context, device)
    layout = fitting(model.layout, attention.num_pages, POOL_BYTES)
    memory = PageMemory(layout, attention.num_pages, device)
    memory.tensor.normal_()
    orders = {"old": old_views(layout, memory.tensor), "new": memory.layer_views()}
    calls: dict[str, list[Call]] = {
        name: [partial(attention, cache) for cache in views] for name, views in orders.items()
    }
    times = medians_us(calls, repeats=15)
    del calls, orders, memory
    torch.cuda.empty_cache()
    return Result(model.name, batch, context, layout.num_layers, times["old"], times["new"])


def check(model: Model, batch: int, context: int, device: torch.device) -> None:
    """That both orders give the same bits. Raises AssertionError."""
    attention = Attention(model, batch, context, device)
    layout = fitting(model.layout, attention.num_pages, 0)
    new, old = (PageMemory(layout, attention.num_pages, device) for _ in range(2))
    new.tensor.normal_()
    new_order, old_order = new.layer_views(), old_views(layout, old.tensor)
    for caches in zip(new_order, old_order, strict=True):
        for one, other in zip(*caches, strict=True):
            other.copy_(one)
    for layer, caches in enumerate(zip(new_order, old_order, strict=True)):
        one, other = map(attention, caches)
        assert torch.equal(one, other), f"{model.name}, layer {layer}: other bits"


def table(results: Sequence[Result]) -> str:
    """One line a case."""
    lines = ["model     batch context layers     old us     new us  ratio"]
    for r in results:
        sizes = f"{r.model:9} {r.batch:5} {r.context:7} {r.layers:6}"
        lines.append(f"{sizes} {r.old_us:10.2f} {r.new_us:10.2f} {r.ratio:6.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case; the exit status says whether each ratio is within the aim."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.page_order")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/page_order.json"))
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    for model in MODELS:
        check(model, 4, 2048, torch.device("cuda"))
    cases = [
        (model, batch, context) for model in MODELS for context in CONTEXTS for batch in BATCHES
    ]
    results = [measure(*case) for case in cases]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(table(results))
    write_record(asked.json, [asdict(r) | {"ratio": r.ratio} for r in results], [])
    worst = max(r.ratio for r in results)
    print(f"worst ratio {worst:.3f}, at most {MOST_RATIO} is the aim")
    return int(worst > MOST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
