"""A tensor-parallel group whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from effuse.kernels.attention_batch import ContextCut
from effuse.models.group import ContextGroup, Group, RankPlace

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

    def collect(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        parts = torch.stack(self._exchange(x))
        return parts if into is None else into.copy_(parts.flatten(0, 1)).view_as(parts)

    def deal(self, x: Tensor) -> Tensor:
        self.num_dealt += 1
        return torch.stack([of_rank[self._rank] for of_rank in self._exchange(x)])

    def share(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def least(self, number: int) -> int:
        return min(int(part) for part in self._exchange(torch.tensor(number)))

    def close(self) -> None:
        pass

    def abort(self) -> None:
        """Lets no rank wait for another one."""
        self._barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self._rank] = x
        self._barrier.wait(_PATIENCE_S)
        parts = [part.clone() for part in self._slots if part is not None]
        self._barrier.wait(_PATIENCE_S)
        return parts


def _groups(size: int, count: int) -> list[ThreadGroup]:
    """The ends of so many groups of so many ranks, group by group."""
    ends = []
    for _ in range(count):
        slots: list[Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        ends += [ThreadGroup(rank, slots, barrier) for rank in range(size)]
    return ends


def run_ranks(
    size: int,
    work: Callable[[RankPlace], T],
    *,
    expert_parallel: bool = False,
    data_parallel: bool = False,
    context_degree: int = 1,
    page_size: int = 4,
    cuts_rows: bool = False,
) -> list[T]:
    """Runs `work` once for each rank, all at once; results by rank. Raises what a rank raises.
    cuts_rows: ranks of a context compute different rows."""
    groups = _groups(size, 1)
    parts = _groups(context_degree, size // context_degree)
    weights = _groups(size // context_degree, context_degree)

    def one(rank: int) -> T:
        group, part = groups[rank], parts[rank]
        context = None
        if context_degree > 1:
            cut = ContextCut(rank % context_degree, context_degree, page_size)
            count = size // context_degree
            of_rows = weights[rank % context_degree * count + rank // context_degree]
            context = ContextGroup(cut, part, of_rows if cuts_rows else None)
        try:
            return work(RankPlace(rank, size, expert_parallel, group, data_parallel, context))
        except BaseException:
            for each in (*groups, *parts, *weights):
                each.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
