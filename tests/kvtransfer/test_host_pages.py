"""Copies between a pool's pages and slots of host memory."""

from __future__ import annotations

import pytest
import torch

from effuse.kvtransfer.digest import pages_digest
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def memory_of(device: str) -> PageMemory:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    memory = PageMemory(KVLayout("unified", 4, 2, 64, 16, "float32"), 12, device)
    memory.tensor.copy_(torch.randn(memory.tensor.shape))
    return memory


def wait(job: object) -> bytes:
    while (found := job.poll()) is None:  # type: ignore[attr-defined]
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
