"""The limit of a step on a group of GPUs: one graph of a rank's products and two sums a layer.

The sums are not fused with anything. Each number of rows takes the fastest of NCCL's sum and those
of torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from effuse.benchmarks.gpu_floor import Floor, fastest, graph_of
from effuse.benchmarks.gpu_timing import Stamp
from effuse.models.group import Group
from effuse.models.transformer import LayerWeights, Transformer

Sum = Callable[[Tensor], object]


class Silent(Group):
    """A group of `size` whose exchanges have the right shapes and cost next to nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        every = x.repeat(1, self._size)
        return functional.pad(every, (0, max(0, sum(sizes) - every.shape[1])))[:, : sum(sizes)]

    def collect(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        every = x.expand(self._size, *x.shape)  # numbers and not zeros, which take less power
        return every.clone() if into is None else into.view_as(every).copy_(every)


class SummedFloor(Floor):
    """A rank's products, with a sum over all ranks behind two products of each layer."""

    def __init__(self, model: Transformer, most_rows: int) -> None:
        super().__init__(model, most_rows)
        self._group = model.group
        self._sums = known_sums(model, most_rows)
        self._sum = self._sums["nccl"]
        self._fastest: dict[int, str] = {}  # by the number's length in bits
        self.times: list[str] = []

    def replay(self, num_rows: int, num_head_rows: int) -> Callable[[], object]:
        length = num_rows.bit_length()
        if length not in self._fastest:
            self._fastest[length] = self._fastest_sum(num_rows, num_head_rows)
        self._sum = self._sums[self._fastest[length]]
        return super().replay(num_rows, num_head_rows)

    def _fastest_sum(self, num_rows: int, num_head_rows: int) -> str:
        """All ranks choose the same, by the sums of their times."""
        run = partial(self._run, num_rows, num_head_rows)
        self._choose(num_rows, num_head_rows)
        found = []
        for add in self._sums.values():
            self._sum = add
            replay = graph_of(run) if self._is_cuda else run
            found.append(_mean_ms(replay, self._model.device, 8))
            del replay
        mine = torch.tensor([found], device=self._model.device)
        means = (self._group.sum(mine)[0] / self._model.shard.size).tolist()
        times = dict(zip(self._sums, means, strict=True))
        self.times.append(f"{num_rows} rows: {times}")
        return fastest(times)

    def _product(self, layer: LayerWeights, product: str, count: int) -> None:
        weight = getattr(layer, product)
        out = functional.linear(self._inputs[product][:count], weight)
        if product != "gate_up":
            self._sum(out)

    def _ways(self, product: str, rows: int) -> tuple[str, ...]:
        return ("linear",)


def known_sums(model: Transformer, most_rows: int) -> dict[str, Sum]:
    """Ways to sum rows over all ranks, the first of which works everywhere."""
    ways: dict[str, Sum] = {"nccl": model.group.sum}
    if model.device.type != "cuda" or not dist.is_initialized():
        return ways
    import torch.distributed._symmetric_memory as symmetric

    everyone = dist.group.WORLD
    assert everyone is not None, "it was initialised"
    name = everyone.group_name
    try:
        shape = most_rows, model.config.hidden_size
        rows = symmetric.empty(*shape, dtype=model.dtype, device=model.device)
        symmetric.rendezvous(rows, name)
    except RuntimeError as error:
        print(f"no symmetric memory: {error}", flush=True)
        return ways
    operators = torch.ops.symm_mem

    def copied(x: Tensor) -> Tensor:
        return rows[: len(x)].copy_(x)

    ways["one shot"] = lambda x: operators.one_shot_all_reduce(copied(x), "sum", name)
    ways["two shots"] = lambda x: operators.two_shot_all_reduce_(copied(x), "sum", name)
    return ways


def _mean_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    run()
    begin = Stamp(device)
    for _ in range(repeats):
        run()
    return begin.ms_until(Stamp(device)) / repeats
