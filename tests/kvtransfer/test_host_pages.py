"""Copies between a pool's pages and slots of host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kvtransfer.groups import layouts_of

from effuse.kvtransfer.digest import DigestJob, PieceDigests, pages_digest
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.worker.group_parts import GroupHost
from effuse.worker.rank_messages import MovePages
from effuse.worker.ranks import Ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def memory_of(device: str) -> PageMemory:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    memory = PageMemory(KVLayout("unified", 4, 2, 64, 16, "float32"), 12, device)
    memory.tensor.copy_(torch.randn(memory.tensor.shape))
    return memory


def wait(job: DigestJob) -> bytes:
    while (found := job()) is None:
        pass
    return pages_digest(found)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_come_back_as_they_were(device: str) -> None:
    memory = memory_of(device)
    host = HostPages(memory, 8)
    before = memory.tensor.clone()
    saved = wait(host.save([3, 4, 5, 9], [0, 1, 6, 2]))
    memory.tensor.zero_()
    assert wait(host.load([0, 1, 6, 2], [7, 8, 1, 2])) == saved
    assert torch.equal(memory.tensor[[7, 8, 1, 2]], before[[3, 4, 5, 9]])
    assert not memory.tensor[[0, 3, 4, 5, 6, 9, 10, 11]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_flipped_bit_changes_the_digest(device: str) -> None:
    memory = memory_of(device)
    host = HostPages(memory, 2)
    saved = wait(host.save([0, 1], [0, 1]))
    for slot, at in ((0, 0), (1, memory.page_bytes - 1), (1, 4000)):
        host.views([slot])[0][at] ^= 4
        assert wait(host.load([0, 1], [0, 1])) != saved
        host.views([slot])[0][at] ^= 4
    assert wait(host.load([0, 1], [0, 1])) == saved


@pytest.mark.gpu
def test_copies_wait_for_work_that_was_launched_before() -> None:
    """A forward may still write the pages, or read what they held."""
    memory = memory_of("cuda")
    host = HostPages(memory, 12)
    pages = list(range(12))
    for turn in range(20):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        memory.tensor.fill_(float(turn))
        job = host.save(pages, pages)
        wait(job)
        assert bytes(host.views([5])[0][:4]) == torch.tensor(float(turn)).numpy().tobytes()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        read = memory.tensor.clone()
        host.views([0])[0][:4] = torch.tensor(-1.0).numpy().tobytes()
        wait(host.load(pages, pages))
        assert float(read.flatten()[0]) == turn and float(memory.tensor.flatten()[0]) == -1


def test_memory_that_the_machine_does_not_have_is_refused() -> None:
    memory = memory_of("cpu")
    with pytest.raises(OSError, match="memory"):
        HostPages(memory, (1 << 50) // memory.page_bytes)


class Group:
    """Ranks of this process whose host memory is one, behind their leader's `GroupHost`. They stand
    for `Ranks`, too."""

    def __init__(self, degree: int, whole: torch.Tensor, kind: str = "unified") -> None:
        """whole: pages of all heads, [pages, groups, heads, ...]."""
        descriptor, self.size = os.memfd_create("test"), degree
        self.memories, self.hosts = [], []
        for rank in range(degree):
            memory = PageMemory(layout_of(kind, rank, degree), len(whole))
            heads = memory.layout.heads
            memory.tensor.copy_(whole[:, :, heads.start : heads.stop])
            self.memories.append(memory)
            self.hosts.append(HostPages(memory, 6, is_shared=True, descriptor=descriptor))
        os.close(descriptor)
        self.found: dict[int, list[bytes]] = {}
        self.host = GroupHost(self.hosts[0], cast("Ranks", self)) if degree > 1 else self.hosts[0]

    def send(self, command: MovePages) -> None:
        jobs = [
            one.load(command.slots, command.page_ids)
            if command.loads
            else one.save(command.page_ids, command.slots)
            for one in self.hosts[1:]
        ]
        self.found[command.number] = [cast("PieceDigests", job()).tobytes() for job in jobs]

    def moved(self, number: int) -> list[bytes] | None:
        return self.found.pop(number, None)

    def read(self, slots: Sequence[int]) -> bytes:
        return b"".join(self.host.views(slots))

    def write(self, slots: Sequence[int], data: bytes) -> None:
        at = 0
        for view in self.host.views(slots):
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        assert at == len(data)


def layout_of(kind: str = "unified", rank: int = 0, degree: int = 1) -> KVLayout:
    return layouts_of(KVLayout(kind, 4, 4, 16, 8, "float32"), degree)[rank]


def pages(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((5, *layout_of().page_shape), generator=draw)


@pytest.mark.parametrize("kind", ["unified", "distinct"])
@pytest.mark.parametrize("writer", [1, 2, 4, 8])
def test_ranks_of_any_degree_read_what_others_wrote(writer: int, kind: str) -> None:
    """Eight ranks hold each of the four heads twice. Units have the same bytes and digests."""
    whole = pages(1)
    one = Group(writer, whole, kind)
    saved = wait(one.host.save([3, 0, 1], [5, 2, 3]))
    data = one.read([5, 2, 3])
    assert data == whole[[3, 0, 1]].numpy().tobytes()
    assert one.host.page_bytes == layout_of().page_bytes == len(data) // 3
    for degree in (1, 2, 4, 8):
        other = Group(degree, pages(2), kind)
        other.write([1, 2, 0], data)
        assert wait(other.host.load([1, 2, 0], [4, 2, 3])) == saved
        for memory in other.memories:
            heads = memory.layout.heads
            own = whole[:, :, heads.start : heads.stop]
            assert torch.equal(memory.tensor[[4, 2, 3]], own[[3, 0, 1]])
            assert torch.equal(memory.tensor[0], pages(2)[0, :, heads.start : heads.stop])


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_flipped_bit_of_any_rank_changes_the_digest(degree: int) -> None:
    one = Group(degree, pages(1))
    saved = wait(one.host.save([0, 1], [0, 1]))
    data = one.read([0, 1])
    for at in range(7, len(data), len(data) // 37):
        one.write([0, 1], data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        assert wait(one.host.load([0, 1], [0, 1])) != saved
    one.write([0, 1], data)
    assert wait(one.host.load([0, 1], [2, 3])) == saved


def test_ranks_that_should_hold_the_same_and_do_not_make_a_wrong_digest() -> None:
    """Whichever of the two it is; only the first one's bytes are written."""
    first = Group(8, pages(1))
    right, data = wait(first.host.save([0], [0])), first.read([0])
    for rank in range(8):
        one = Group(8, pages(1))
        one.memories[rank].tensor[0, 1, 0, 0, 1, 3] += 1
        assert wait(one.host.save([0], [0])) != right
        assert (one.read([0]) == data) == (rank % 2 == 1)


def test_memory_of_each_rank_is_digested_with_all_of_its_parts() -> None:
    """Ranks that cut the context hold the same heads of other tokens, in memory of their own."""
    found = np.arange(8 * 2 * 3, dtype=np.int64).reshape(8, 2, 3)
    layout = layouts_of(KVLayout("unified", 3, 2, 16, 8, "float32"), 8, context=2)[0]
    assert layout.copies == 2
    found[[2, 3, 6, 7]] = found[[0, 1, 4, 5]]  # the second copies
    others = [row.tobytes() for row in found[1:]]
    ranks: Any = SimpleNamespace(size=8, send=lambda _: None, moved=lambda _: others)
    own: Any = SimpleNamespace(
        num_slots=1,
        page_bytes=1,
        is_shared=False,
        layout=layout,
        save=lambda *_: lambda: found[0],
    )
    group = GroupHost(own, ranks)
    assert group.page_bytes == 8
    before = wait(group.save([0, 1], [0, 1]))
    found[1, 1, 2] += 1  # of the second part of the context
    others[0] = found[1].tobytes()
    assert wait(group.save([0, 1], [0, 1])) != before
