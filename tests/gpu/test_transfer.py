"""Pages in GPU memory: digests, marks of layers, copies, and handoffs between processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kvtransfer.fixtures import (
    LARGE,
    SEED,
    boundary,
    digest_of,
    digests_of,
    filled,
    next_event,
)
from kvtransfer.receiver_process import DEVICE, make
from kvtransfer.remote import RemoteReceiver

from effuse.kernels.pages import LayerMarks
from effuse.kvtransfer.connector import Cause, FinishPush, Pushed, PushFailed, PushPages
from effuse.kvtransfer.digest import DeviceDigester, HostDigester, pages_digest
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.staging import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GROUPS = range(LARGE.num_groups)
NUM_PAGES = 96


def eventually(found: object, expected: object, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    assert callable(found)
    while found() != expected:
        assert time.monotonic() < deadline, (found(), expected)


def spin(milliseconds: float) -> None:
    """Has the device do nothing for a while."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]


def test_digests_are_those_of_the_host_and_wait_for_nothing() -> None:
    memory = filled(LARGE, 8, device="cuda")
    digester = DeviceDigester(memory, memory.stream)
    warm = digester.begin([0], GROUPS, SEED)  # compiles, which takes its time
    eventually(lambda: warm() is not None, True, within_s=60.0)
    torch.cuda.synchronize()
    spin(200)
    begin = time.monotonic()
    job = digester.begin([5, 0, 3], GROUPS, SEED)
    while (found := job()) is None:
        pass
    assert time.monotonic() - begin < 0.15, "it waited for the default stream"
    assert pages_digest(found) == digest_of(memory, [5, 0, 3])
    half = digester.begin([5, 0], range(2, 5), SEED, range(1, 2))
    eventually(lambda: half() is not None, True)
    host = PageMemory(LARGE, 8)
    host.tensor.copy_(memory.tensor)
    expected = HostDigester(host).begin([5, 0], range(2, 5), SEED, range(1, 2))()
    assert np.asarray(half()).tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize("in_graph", [False, True])
def test_marks_say_how_far_a_forward_is(in_graph: bool) -> None:
    marks = LayerMarks(8, 4, torch.device("cuda"))

    def forward() -> None:
        for layer in range(8):
            spin(8)
            marks.stored(layer)

    run = forward
    marks.begin()
    forward()
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            forward()
        run = graph.replay
    first = marks.begin()
    run()
    second = marks.begin()
    run()
    seen: list[tuple[int, int]] = []
    while second() < 4:
        now = first(), second()
        if not seen or seen[-1] != now:
            seen.append(now)
    torch.cuda.synchronize()
    assert (first(), second()) == (4, 4)
    assert seen == sorted(seen) and len(seen) >= 6, seen
    assert all(one == 4 or other == 0 for one, other in seen)


def test_pages_go_to_the_host_and_back_through_pinned_buffers() -> None:
    source, target = filled(LARGE, 8, device="cuda"), PageMemory(LARGE, 8, "cuda")
    torch.cuda.synchronize()
    down, up = Staging(source, 1 << 20), Staging(target, 1 << 20)
    for groups in (GROUPS, range(2, 5)):
        for _ in range(20):  # more than there are buffers
            fetched = down.fetch([6, 1, 3], groups, LARGE.heads)
            assert fetched is not None
            eventually(fetched.is_over, True)
            up.store([0, 7, 2], groups, [fetched.view], LARGE.heads)
            fetched.release()
    torch.cuda.synchronize()
    assert torch.equal(target.tensor[[0, 7, 2]], source.tensor[[6, 1, 3]])
    assert not target.tensor[[1, 3, 4, 5, 6]].any()
    fetched = down.fetch([5, 2], range(2, 5), range(1, 2))
    assert fetched is not None and fetched.num_bytes == 2 * 3 * LARGE.head_bytes
    eventually(fetched.is_over, True)
    up.store([1, 3], range(2, 5), [fetched.view], range(1, 2))
    torch.cuda.synchronize()
    assert torch.equal(target.tensor[[1, 3], 2:5, 1:2], source.tensor[[5, 2], 2:5, 1:2])
    assert not target.tensor[[1, 3], :, :1].any() and not target.tensor[[1, 3], :2].any()


def test_no_more_is_fetched_than_there_are_buffers() -> None:
    staging = Staging(filled(LARGE, 8, device="cuda"), 1 << 16)
    taken = []
    while (fetched := staging.fetch([1], GROUPS, LARGE.heads)) is not None:
        taken.append(fetched)
    assert len(taken) == 8
    taken[0].release()
    assert staging.fetch([2], GROUPS, LARGE.heads) is not None


@contextlib.contextmanager
def receiving(kind: str) -> Iterator[RemoteReceiver]:
    environment = {DEVICE: "cuda"}
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = "1"
    with RemoteReceiver(kind, "large", NUM_PAGES, **environment) as remote:
        yield remote


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_pages_go_from_gpu_to_gpu_while_both_compute(kind: str) -> None:
    source = filled(LARGE, NUM_PAGES, device="cuda")
    sender = make(kind, source, "prefill-1")
    sender.start()
    order = [*range(0, NUM_PAGES, 2), *range(NUM_PAGES - 1, 0, -2)]
    try:
        with receiving(kind) as remote:
            for _ in range(4):
                reserved = remote.reserve(range(NUM_PAGES))
                spin(50)
                sender.send(PushPages(reserved, tuple(order), 0))
                sender.send(FinishPush(reserved, boundary))
                pushed = next_event(sender, reserved.transfer_id)
                assert isinstance(pushed, Pushed), pushed
                heard = remote.hear(reserved.transfer_id)
                assert heard["event"] == "received"
                assert heard["digests"] == [d.hex() for d in digests_of(source, order)]
    finally:
        sender.close()


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_layers_leave_as_a_forward_marks_them(kind: str) -> None:
    source = filled(LARGE, NUM_PAGES, device="cuda")
    expected = source.tensor.clone()
    marks = LayerMarks(LARGE.num_layers, LARGE.num_groups, source.device)
    sender = make(kind, source, "prefill-1")
    sender.start()
    source.tensor.zero_()
    torch.cuda.synchronize()
    try:
        with receiving(kind) as remote:
            reserved = remote.reserve(range(NUM_PAGES))
            sender.send(PushPages(reserved, tuple(range(NUM_PAGES)), 0, marks.begin()))
            for layer in range(LARGE.num_layers):
                spin(10)
                source.tensor[:, layer].copy_(expected[:, layer])  # a group holds one layer
                marks.stored(layer)
            sender.send(FinishPush(reserved, boundary))
            assert isinstance(next_event(sender, reserved.transfer_id), Pushed)
            heard = remote.hear(reserved.transfer_id)
            found = [d.hex() for d in digests_of(source, range(NUM_PAGES))]
            assert torch.equal(source.tensor, expected)
            assert heard["digests"] == found
    finally:
        sender.close()


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_a_byte_changed_in_gpu_memory_is_refused(kind: str) -> None:
    source = filled(LARGE, NUM_PAGES, device="cuda")
    sender = make(kind, source, "prefill-1")
    sender.start()
    try:
        with receiving(kind) as remote:
            remote.ask(do="spoil", page=7)
            assert remote.hear() == {"spoilt": True}
            reserved = remote.reserve(range(NUM_PAGES))
            sender.send(PushPages(reserved, tuple(range(NUM_PAGES)), 0))
            sender.send(FinishPush(reserved, boundary))
            failed = next_event(sender, reserved.transfer_id)
            assert isinstance(failed, PushFailed) and failed.cause is Cause.DIGEST
            assert "digest" in failed.message
    finally:
        sender.close()


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_truncated_and_late_pages_are_refused_in_gpu_memory(kind: str) -> None:
    source = filled(LARGE, NUM_PAGES, device="cuda")
    sender = make(kind, source, "prefill-1")
    sender.start()
    try:
        with receiving(kind) as remote:
            reserved = remote.reserve(range(4))
            sender.send(PushPages(reserved, tuple(range(3)), 0))
            sender.send(FinishPush(reserved, boundary))
            failed = next_event(sender, reserved.transfer_id)
            assert isinstance(failed, PushFailed) and failed.cause is Cause.COVERAGE
            late = remote.reserve(range(8, 12))
            remote.forget(late.transfer_id)
            sender.send(PushPages(late, tuple(range(4)), 0))
            sender.send(FinishPush(late, boundary))
            failed = next_event(sender, late.transfer_id)
            assert isinstance(failed, PushFailed) and failed.cause is Cause.UNKNOWN_TRANSFER
    finally:
        sender.close()
