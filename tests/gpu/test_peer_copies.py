"""Parts of pages between GPUs: the kernel against plain slices, and handoffs between processes of
other degree."""

from __future__ import annotations

import contextlib

import pytest
import torch
from kvtransfer.fixtures import boundary, digests_of, next_event
from kvtransfer.groups import FULL, NUM_PAGES, Group
from kvtransfer.receiver_process import DEVICE
from kvtransfer.remote import RemoteReceiver
from operators import copies

from effuse.kvtransfer.connector import Arrived, FinishPush, Pushed, PushPages, Route
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.nixl_agent import NixlAgent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SOURCES, TARGETS = (6, 1, 2, 5), (3, 4, 0, 7)
CHECKS = dict(copies.checks(torch.device("cuda")))


@pytest.mark.parametrize("name", CHECKS)
def test_copies_are_plain_slices(name: str) -> None:
    CHECKS[name]()


def test_pages_of_dream_are_copied() -> None:
    """Parts of 64 KiB, more than programs at a time."""
    layout = KVLayout("unified", 28, 4, 128, 16, "bfloat16")
    copies.check(layout, 1, 2, range(layout.num_groups), torch.device("cuda"))
    copies.check(layout, 2, 1, range(2, 5), torch.device("cuda"))


def remote(incarnation: str) -> RemoteReceiver:
    environment = {DEVICE: "cuda"}
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = "1"
    return RemoteReceiver("nixl", "shared", NUM_PAGES, incarnation, **environment)


def refused(*_: object) -> None:
    raise AssertionError("NIXL has a write for parts of pages")


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_write_their_heads_into_one_pool(
    degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NixlAgent, "write", refused)
    sender = Group("nixl", "prefill-1", degree, has_pages=True, device="cuda")
    with contextlib.closing(sender), remote("decode-1") as receiver:
        for _ in range(3):
            reserved = receiver.reserve(TARGETS)
            sender.all.send(PushPages(reserved, SOURCES, 0))
            sender.all.send(FinishPush(reserved, boundary))
            pushed = next_event(sender.all, reserved.transfer_id)
            assert isinstance(pushed, Pushed) and pushed.route == Route("cuda_ipc")
            heard = receiver.hear(reserved.transfer_id)
            assert heard["event"] == "received"
            assert heard["digests"] == [one.hex() for one in digests_of(FULL, SOURCES)]


@pytest.mark.parametrize("degree", [2, 4])
def test_one_pool_is_written_into_those_of_ranks(degree: int) -> None:
    receiver = Group("nixl", "decode-1", degree, device="cuda")
    with contextlib.closing(receiver), remote("prefill-1") as sender:
        sender.ask(do="draw")
        assert sender.hear() == {"drawn": True}
        for _ in range(3):
            reserved = receiver.reserve(TARGETS)
            sender.push(reserved, SOURCES, None)
            assert isinstance(next_event(receiver.all, reserved.transfer_id), Arrived)
            receiver.check_holds(TARGETS, SOURCES)
            receiver.fill(0.0)
            torch.cuda.synchronize()
