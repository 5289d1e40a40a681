"""A tensor-parallel group whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from effuse.models.group import Group, RankPlace

T = TypeVar("T")
_PATIENCE_S = 60.0


class ThreadGroup(Group):
    """One rank's end of a group of threads; adds in the order of ranks."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._slots = slots
        self._barrier = barrier
        self.num_sums = 0
        self.num_dealt = 0

    def sum(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=1)

    def collect(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x))

    def deal(self, x: Tensor) -> Tensor:
        self.num_dealt += 1
        return torch.stack([of_rank[self._rank] for of_rank in self._exchange(x)])

    def share(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def least(self, number: int) -> int:
        return min(int(part) for part in self._exchange(torch.tensor(number)))

    def close(self) -> None:
        pass

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self._rank] = x
        self._barrier.wait(_PATIENCE_S)
        parts = [part.clone() for part in self._slots if part is not None]
        self._barrier.wait(_PATIENCE_S)
        return parts


def run_ranks(
    size: int,
    work: Callable[[RankPlace], T],
    *,
    expert_parallel: bool = False,
    data_parallel: bool = False,
) -> list[T]:
    """Runs `work` once for each rank, all at once; results by rank. Raises what a rank raises."""
    slots: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def one(rank: int) -> T:
        try:
            group = ThreadGroup(rank, slots, barrier)
            return work(RankPlace(rank, size, expert_parallel, group, data_parallel))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
