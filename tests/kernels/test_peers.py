"""Mapping the buffers of peers: all ranks have them, or none keeps any."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from thread_group import ThreadGroup, run_ranks
from torch import Tensor

from effuse.kernels import cuda_ipc, peers
from effuse.kernels.peers import MOST_BYTES, PeerSums, map_peers
from effuse.models.group import RankPlace

CPU, SIZE, WIDTH = torch.device("cpu"), 3, 64


@dataclass(slots=True)
class Driver:
    """Stands in for a driver whose addresses are numbers, and handles their bytes."""

    no_memory: set[int] = field(default_factory=set)  # the how-manieth allocations fail
    unreachable: set[bytes] = field(default_factory=set)
    allocated: list[int] = field(default_factory=list)
    mapped: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_ipc, "allocate", self.allocate)
        monkeypatch.setattr(cuda_ipc, "free", self.allocated.remove)
        monkeypatch.setattr(cuda_ipc, "handle_of", lambda address: bytes([address]))
        monkeypatch.setattr(cuda_ipc, "open_handle", self.open)
        monkeypatch.setattr(cuda_ipc, "close_handle", self.mapped.remove)
        monkeypatch.setattr(peers, "bytes_at", self.bytes_at)

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes == 2 * SIZE * MOST_BYTES
        if len(self.allocated) + 1 in self.no_memory:
            self.no_memory.clear()
            return 0
        self.allocated.append(len(self.allocated) + 1)
        return self.allocated[-1]

    def open(self, handle: bytes) -> int:
        assert len(handle) == cuda_ipc.HANDLE_BYTES
        if handle[:1] in self.unreachable:
            return 0
        self.mapped.append(100 + handle[0])
        return self.mapped[-1]

    def bytes_at(self, address: int, num_bytes: int, device: torch.device) -> Tensor:
        self.filled.append(address)
        return torch.zeros(1, dtype=torch.int8)


def mapped(place: RankPlace) -> PeerSums | str:
    assert isinstance(place.group, ThreadGroup)
    try:
        return map_peers(place.rank, SIZE, WIDTH, torch.float16, CPU, place.group.collect)
    except OSError as error:
        return str(error)


def test_every_rank_has_the_buffers_of_all_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.install(monkeypatch)
    found = run_ranks(SIZE, mapped)
    own = {}
    for rank, one in enumerate(found):
        assert isinstance(one, PeerSums)
        addresses = one._buffers.tolist()
        own[rank] = addresses[rank]
        assert len(set(addresses)) == SIZE
    assert sorted(own.values()) == driver.allocated == sorted(driver.filled)
    for rank, one in enumerate(found):
        assert isinstance(one, PeerSums)
        theirs = {at: 100 + address for at, address in own.items()} | {rank: own[rank]}
        assert one._buffers.tolist() == [theirs[at] for at in range(SIZE)]
        one.close()
    assert not driver.allocated and not driver.mapped


@pytest.mark.parametrize("fault", ["no_memory", "unreachable"])
def test_if_one_rank_has_no_way_none_keeps_any(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    if fault == "no_memory":
        driver.no_memory = {2}
    else:
        driver.unreachable = {bytes([2])}
    driver.install(monkeypatch)
    assert run_ranks(SIZE, mapped) == ["a GPU cannot map the memory of another one"] * SIZE
    assert not driver.allocated and not driver.mapped
