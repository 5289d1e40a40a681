"""Attention of one layer at one point of the grid, by our kernels and by every rival."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from effuse.benchmarks.gpu_timing import median_us
from effuse.kernels import attention_flex, attention_hopper, attention_triton
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.kernels.pages import distinct_views
from effuse.kvtransfer.layout import KVLayout, PageMemory

HEAD_DIM = 128
BLOCK_SIZE = 32
SCALE = HEAD_DIM**-0.5
HEADS = {"dream": (28, 4), "llada": (32, 32)}
CUDA = torch.device("cuda")
Set = TypeVar("Set")
# Inputs of all sets together; the L2 cache of an H200 holds 60 MB.
ROTATED_BYTES = 400 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of a decode step's attention."""

    model: str
    batch: int
    in_flight: int
    context: int
    page_size: int

    @property
    def visible_pairs(self) -> int:
        """(row, key) pairs of a head that are visible under the mask."""
        ends = ((row // BLOCK_SIZE + 1) * BLOCK_SIZE for row in range(self.in_flight))
        return self.batch * sum(self.context + min(end, self.in_flight) for end in ends)

    @property
    def flop(self) -> float:
        return 4.0 * HEAD_DIM * HEADS[self.model][0] * self.visible_pairs

    @property
    def dense_flop(self) -> float:
        """Without a mask, as SDPA computes it here."""
        pairs = self.batch * self.in_flight * (self.context + self.in_flight)
        return 4.0 * HEAD_DIM * HEADS[self.model][0] * pairs

    @property
    def kv_bytes(self) -> int:
        tokens = self.batch * (self.context + self.in_flight)
        return tokens * HEADS[self.model][1] * HEAD_DIM * 2 * 2


class Inputs:
    """Random rows, and pages in random and in ascending order, for one call."""

    def __init__(self, point: Point) -> None:
        q_heads, kv_heads = HEADS[point.model]
        pages = point.context // point.page_size
        layout = KVLayout("unified", 1, kv_heads, HEAD_DIM, point.page_size, "bfloat16")
        memory = PageMemory(layout, point.batch * pages, CUDA)
        memory.tensor.normal_()
        (self.unified,) = memory.layer_views()
        self.distinct = distinct_views(*memory.layers()[0])
        rows = point.batch * point.in_flight
        fused = torch.randn(
            rows, q_heads + 2 * kv_heads, HEAD_DIM, dtype=torch.bfloat16, device=CUDA
        )
        self.q, self.k, self.v = torch.split(fused, [q_heads, kv_heads, kv_heads], dim=1)
        self.out = torch.empty(rows, q_heads, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
        shuffled = torch.randperm(point.batch * pages).view(point.batch, pages)
        self.shuffled = _batch(point, shuffled.tolist())
        ascending = torch.arange(point.batch * pages).view(point.batch, pages)
        self.ascending = _batch(point, ascending.tolist())

    def ours(self, batch: AttentionBatch, cache: tuple[Tensor, Tensor]) -> Tensor:
        return block_attention(self.q, self.k, self.v, *cache, batch, scale=SCALE, out=self.out)


def _batch(point: Point, pages: list[list[int]]) -> AttentionBatch:
    each = [point.context] * point.batch
    return make_attention_batch(
        [point.in_flight] * point.batch,
        each,
        pages,
        each,
        block_size=BLOCK_SIZE,
        page_size=point.page_size,
        device=CUDA,
    )


class Dense:
    """The same call for kernels that want contiguous keys and packed heads."""

    def __init__(self, inputs: Inputs, groups: int) -> None:
        self._inputs, self._groups = inputs, groups
        self.plan = attention_flex.make_plan(inputs.shuffled, len(inputs.q), groups)
        self.queries = attention_flex.padded_queries(inputs.q, self.plan, groups)
        self.keys, self.values = self._gathered()

    def sdpa(self, *, gathers: bool) -> Tensor:
        """cuDNN, without a mask; every page is whole, so there are no extra keys."""
        keys, values = self._gathered() if gathers else (self.keys, self.values)
        count = self._inputs.shuffled.max_context + self._inputs.shuffled.max_seqlen
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(
                self.queries,
                keys[:, :count].transpose(1, 2),
                values[:, :count].transpose(1, 2),
                scale=SCALE,
                enable_gqa=self._groups == 1,
            )

    def flex(self) -> Tensor:
        """Gather, then FlexAttention under the block mask."""
        return attention_flex.attend(self.queries, *self._gathered(), self.plan.mask, scale=SCALE)

    def _gathered(self) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = self._inputs.unified
        return (
            attention_flex.gather_keys(self._inputs.k, k_cache, self.plan),
            attention_flex.gather_keys(self._inputs.v, v_cache, self.plan),
        )


class ContiguousDense(Dense):
    """Keys by head and then by token, the best order for cuDNN."""

    def _gathered(self) -> tuple[Tensor, Tensor]:
        keys, values = super()._gathered()
        return (
            keys.transpose(1, 2).contiguous().transpose(1, 2),
            values.transpose(1, 2).contiguous().transpose(1, 2),
        )


def measure(point: Point, *, rivals: bool = True) -> dict[str, float]:
    """Microseconds of each way to compute the point."""
    sets = max(2, min(6, -(-ROTATED_BYTES // point.kv_bytes)))
    inputs = [Inputs(point) for _ in range(sets)]
    q_heads, kv_heads = HEADS[point.model]
    found = {
        "ours": _time(inputs, lambda i: i.ours(i.shuffled, i.unified)),
        "contiguous": _time(inputs, lambda i: i.ours(i.ascending, i.unified)),
        "distinct": _time(inputs, lambda i: i.ours(i.shuffled, i.distinct)),
        "portable": _time(inputs, _portable),
    }
    if rivals:
        found |= _rivals(inputs, q_heads // kv_heads)
    torch.cuda.empty_cache()
    return found


def measure_split(point: Point) -> dict[str, float]:
    """Microseconds with the cache split over programs, and without."""
    inputs = [Inputs(point) for _ in range(6)]
    return {
        "split": _time(inputs, lambda i: i.ours(i.shuffled, i.unified)),
        "one program": _time(inputs, _unsplit),
    }


def check(point: Point) -> None:
    """Checks that all ways give the same numbers; raises AssertionError with the name of a wrong
    one.
    """
    one = Inputs(point)
    groups = HEADS[point.model][0] // HEADS[point.model][1]
    dense = Dense(one, groups)
    expected = attention_flex.packed_rows(dense.flex(), dense.plan, groups).float()
    unpacked = Dense(one, 1)
    for name, result in {
        "ours": one.ours(one.shuffled, one.unified).clone(),
        "portable": _portable(one).clone(),
        "unpacked flex": attention_flex.packed_rows(unpacked.flex(), unpacked.plan, 1),
    }.items():
        error = float((result.float() - expected).norm() / expected.norm())
        assert error < 1e-2, f"{name} is off by {error:.1e}"


def _rivals(inputs: Sequence[Inputs], groups: int) -> dict[str, float]:
    contiguous = [ContiguousDense(one, groups) for one in inputs]
    found = {"cudnn": _time(contiguous, lambda d: d.sdpa(gathers=False))}
    contiguous.clear()
    packed = [Dense(one, groups) for one in inputs]
    found["gather cudnn"] = _time(packed, lambda d: d.sdpa(gathers=True))
    found["gather flex"] = _time(packed, Dense.flex)
    if groups > 1:
        packed.clear()
        unpacked = [Dense(one, 1) for one in inputs[:2]]
        found["gather flex unpacked"] = _time(unpacked, Dense.flex)
    return found


def _time(inputs: Sequence[Set], run: Callable[[Set], object]) -> float:
    return median_us([partial(run, one) for one in inputs] * (2 if len(inputs) < 4 else 1))


def _portable(one: Inputs) -> Tensor:
    """The Triton kernel for every device, even if Hopper has a special one."""
    with patch.object(attention_hopper, "is_supported", lambda *_: False):
        attention_triton.launch(
            one.q, one.k, one.v, *one.unified, one.shuffled, scale=SCALE, out=one.out
        )
    return one.out


def _unsplit(one: Inputs) -> None:
    attention_triton.launch(
        one.q,
        one.k,
        one.v,
        *one.unified,
        one.shuffled,
        scale=SCALE,
        out=one.out,
        splits=1,
    )
