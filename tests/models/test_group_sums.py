"""How a group of processes chooses between its collectives and the memory of peers, and ends."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from effuse.models import group as group_module
from effuse.models.group import ProcessGroup


class FewRows:
    """PeerSums for up to two rows, whose results are ones."""

    def takes(self, x: Tensor) -> bool:
        return len(x) <= 2

    def sum_norm(self, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x), torch.ones_like(x)


class Doubling:
    """Collectives of two ranks that have the same rows."""

    def allreduce(self, x: Tensor) -> Any:
        x *= 2
        return self

    def wait(self) -> None:
        pass


def of_two(monkeypatch: pytest.MonkeyPatch, found: object) -> ProcessGroup:
    def map_peers(*_: object) -> object:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(group_module, "map_peers", map_peers)
    group = ProcessGroup(1, 2, torch.device("cuda", 1), Doubling())
    group.map_peers(4, torch.float32)
    return group


def sums(group: ProcessGroup, rows: int) -> Tensor:
    x, residual = torch.full((rows, 4), 3.0), torch.full((rows, 4), 5.0)
    return group.sum_norm(x, residual, torch.ones(4), 1e-6)[1]


def test_peers_sum_the_rows_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    group = of_two(monkeypatch, FewRows())
    assert torch.equal(sums(group, 2), torch.ones(2, 4))
    assert torch.equal(sums(group, 3), torch.full((3, 4), 11.0))


def test_without_peers_the_collectives_sum_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = of_two(monkeypatch, OSError("a GPU cannot map the memory of another one"))
    assert torch.equal(sums(group, 2), torch.full((2, 4), 11.0))
    assert caplog.messages == [
        "rank 1: NCCL sums small steps too, because a GPU cannot map the memory of another one"
    ]


class Resettable:
    """A graph that notes whether its group still had collectives when it was reset."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.had_collectives: list[bool] = []

    def reset(self) -> None:
        self.had_collectives.append(self.group._collectives is not None)


def test_graphs_end_before_the_collectives_in_them() -> None:
    """NCCL waits for them, so a group with a graph would never end."""
    group = ProcessGroup(0, 2, torch.device("cuda", 0), Doubling())
    graph = Resettable(group)
    group.hold(cast("torch.cuda.CUDAGraph", graph))
    for _ in range(2):
        group.close()
    assert graph.had_collectives == [True]
