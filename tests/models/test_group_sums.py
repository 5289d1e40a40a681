"""How a group of processes chooses between its collectives and the memory of peers, and ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from effuse.kernels.values import WeightedParts
from effuse.models import group as group_module
from effuse.models.group import ProcessGroup, join_group


class Ones:
    """PeerSums whose results are ones."""

    def sum_norm(
        self, _: object, residual: Tensor, *__: object, is_alike: bool
    ) -> tuple[Tensor, Tensor]:
        return torch.ones_like(residual), torch.ones_like(residual)


class Doubling:
    """Collectives of two ranks that have the same rows."""

    def allreduce(self, x: Tensor) -> Any:
        x *= 2
        return self

    def wait(self) -> None:
        pass


def of_two(
    monkeypatch: pytest.MonkeyPatch, found: object, *, in_order: bool = False
) -> ProcessGroup:
    def map_peers(*_: object) -> object:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(group_module, "map_peers", map_peers)
    group = ProcessGroup(1, 2, torch.device("cuda", 1), Doubling(), in_order=in_order)
    group.map_peers(4, torch.float32)
    return group


def sums(group: ProcessGroup, rows: int, *, in_parts: bool = False) -> Tensor:
    x, residual = torch.full((rows, 4), 3.0), torch.full((rows, 4), 5.0)
    parts = WeightedParts(torch.cat([x, x]), None, torch.full((rows, 2), 0.5))
    return group.sum_norm(parts if in_parts else x, residual, torch.ones(4), 1e-6)[1]


def test_peers_sum_rows_and_those_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    group = of_two(monkeypatch, Ones())
    assert torch.equal(sums(group, 2), torch.ones(2, 4))
    assert torch.equal(sums(group, 2, in_parts=True), torch.ones(2, 4))


def test_without_peers_the_collectives_sum_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = of_two(monkeypatch, OSError("a GPU cannot map the memory of another one"))
    assert torch.equal(sums(group, 2), torch.full((2, 4), 11.0))
    assert torch.equal(sums(group, 2, in_parts=True), torch.full((2, 4), 11.0))
    assert caplog.messages == [
        "rank 1: NCCL sums all rows, because a GPU cannot map the memory of another one"
    ]


def test_a_group_that_sums_in_order_needs_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(sums(of_two(monkeypatch, Ones(), in_order=True), 2), torch.ones(2, 4))
    told = "--batch-invariant: expected GPUs that map each other's memory, but a GPU cannot"
    with pytest.raises(ValueError, match=told):
        of_two(monkeypatch, OSError("a GPU cannot map the memory of another one"), in_order=True)


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


def test_a_group_meets_at_an_interface_and_leaves_the_environment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that this one starts may be of groups at other interfaces."""
    before = dict(os.environ)
    join_group(0, 1, torch.device("cpu"), tmp_path / "meeting", 10.0).close()
    assert dict(os.environ) == before
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-such-interface")
    with pytest.raises(
        ConnectionError, match=r"rank 0 of 1 cannot reach its group: .*no-such-interface"
    ):
        join_group(0, 1, torch.device("cpu"), tmp_path / "other", 10.0)


class Sends:
    """Sends that have arrived once a test lets them."""

    def __init__(self) -> None:
        self.has_arrived = False

    def send(self, _tensors: list[Tensor], _to: int, _tag: int) -> Sends:
        return self

    def is_completed(self) -> bool:
        return self.has_arrived


def test_rows_that_have_arrived_are_not_held() -> None:
    """Otherwise a stage would keep 32 forwards' rows that no bound of the pool counts."""
    sends = Sends()
    group = ProcessGroup(0, 2, torch.device("cpu"), sends)
    rows = [torch.zeros(2, 4) for _ in range(3)]
    for one in rows[:2]:
        group.pass_on(one)
    assert len(group._passing) == 2
    sends.has_arrived = True
    group.pass_on(rows[2])
    assert [held for _, held in group._passing] == rows[2:]
