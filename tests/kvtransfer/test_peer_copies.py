"""Parts of pages go to a mapped pool by copies of our own, with the promises of NIXL's writes.

Host memory stands in for that of GPUs: a mapped pool keeps its address. `operators.copies` checks
the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from kvtransfer.fixtures import boundary, next_event
from kvtransfer.groups import LAYOUT, Group

from effuse.kernels import cuda_ipc
from effuse.kvtransfer import nixl_transport
from effuse.kvtransfer.connector import (
    Arrived,
    Cancel,
    Cause,
    FinishPush,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
    Route,
)
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import Pages, Reservation, decode_to_receiver
from effuse.kvtransfer.nixl_agent import NIXL_ERRORS, NixlAgent, Transfer
from effuse.kvtransfer.peer_copies import Cuts, PeerCopy, order_of
from effuse.kvtransfer.transport import Chunk

SOURCES, TARGETS = (6, 1, 2, 5), (3, 4, 0, 7)
SETTLED_S = 0.3


@dataclass(eq=False)
class HostCopies:
    """Copies that end once they may."""

    memory: PageMemory
    may_end: threading.Event
    begun: list[Chunk]

    def begin(self, chunk: Chunk, cuts: Cuts, address: int, notify: Callable[[], None]) -> PeerCopy:
        self.begun.append(chunk)
        ours, theirs = cuts
        unit = self.memory.layout.group_bytes // ours.per_group
        targets = [page.page_id for page in chunk.targets]
        places = (cut.units(pages, chunk.groups) * unit for cut, pages in
                  ((ours, chunk.source_pages), (theirs, targets)))  # fmt: skip
        pairs = list(zip(*(place.tolist() for place in places), strict=True))
        own = self.memory.address
        done = _Done(self.may_end, [(own + a, address + b) for a, b in pairs], unit)
        return PeerCopy(done, order_of(chunk, address), notify)


@dataclass(eq=False)
class _Done:
    may_end: threading.Event
    pairs: list[tuple[int, int]]
    unit: int

    def query(self) -> bool:
        if not self.may_end.is_set():
            return False
        for source, target in self.pairs:
            ctypes.memmove(target, source, self.unit)
        return True

    def synchronize(self) -> None: ...


@dataclass
class Mapped:
    """A host on which pools are mapped, with the writes of NIXL and our copies."""

    may_end: threading.Event = field(default_factory=threading.Event)
    begun: list[Chunk] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # descriptors of each of NIXL's writes
    open: list[int] = field(default_factory=list)
    can_notify: bool = True


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    found = Mapped()
    found.may_end.set()
    write, notify = NixlAgent.write, NixlAgent.notify

    def handle_of(address: int) -> bytes:
        place = struct.pack("<3Q", address, 0, 1 << 40)
        return place[:8].ljust(cuda_ipc.HANDLE_BYTES - 16, b"\0") + place[8:]

    def open_handle(handle: bytes) -> int:
        found.open.append(int.from_bytes(handle[:8], "little"))
        return found.open[-1]

    def counted(agent: NixlAgent, source: object, ids: list[int], *rest: object) -> Transfer:
        found.written.append(len(ids))
        return write(agent, source, ids, *rest)  # type: ignore[arg-type]

    def notified(agent: NixlAgent, peer: str, message: bytes) -> None:
        is_to_receiver = agent.name.endswith("w")
        is_of_pages = is_to_receiver and isinstance(decode_to_receiver(message), Pages)
        if is_of_pages and not found.can_notify:
            raise NIXL_ERRORS[0]("gone")
        notify(agent, peer, message)

    monkeypatch.setattr(cuda_ipc, "handle_of", handle_of)
    monkeypatch.setattr(cuda_ipc, "open_handle", open_handle)
    monkeypatch.setattr(cuda_ipc, "close_handle", found.open.remove)
    monkeypatch.setattr(NixlAgent, "write", counted)
    monkeypatch.setattr(NixlAgent, "notify", notified)

    def copies_of(memory: PageMemory) -> HostCopies:
        return HostCopies(memory, found.may_end, found.begun)

    monkeypatch.setattr(nixl_transport, "copies_of", copies_of)
    return found


@contextlib.contextmanager
def workers(sending: int, receiving: int) -> Iterator[tuple[Group, Group]]:
    with (
        contextlib.closing(Group("nixl", "prefill-1", sending, has_pages=True)) as sender,
        contextlib.closing(Group("nixl", "decode-1", receiving)) as receiver,
    ):
        yield sender, receiver


def push(sender: Group, receiver: Group) -> Reservation:
    reserved = receiver.reserve(TARGETS)
    sender.all.send(PushPages(reserved, SOURCES, 0))
    sender.all.send(FinishPush(reserved, boundary))
    return reserved


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1), (4, 2), (1, 8)])
def test_between_ranks_of_other_degree_nixl_only_carries_messages(
    mapped: Mapped, sending: int, receiving: int
) -> None:
    with workers(sending, receiving) as (sender, receiver):
        for _ in range(2):
            reserved = push(sender, receiver)
            pushed = next_event(sender.all, reserved.transfer_id)
            assert isinstance(pushed, Pushed) and pushed.route == Route("cuda_ipc")
            assert isinstance(next_event(receiver.all, reserved.transfer_id), Arrived)
            receiver.check_holds(TARGETS, SOURCES)
            receiver.fill(0.0)
    assert mapped.begun and not mapped.written


def test_whole_pages_are_few_descriptors_and_stay_with_nixl(mapped: Mapped) -> None:
    with workers(2, 2) as (sender, receiver):
        reserved = push(sender, receiver)
        assert isinstance(next_event(receiver.all, reserved.transfer_id), Arrived)
        receiver.check_holds(TARGETS, SOURCES)
    assert not mapped.begun and mapped.written == [len(TARGETS)] * 2


def test_layers_that_leave_early_are_copied_between_equal_ranks(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effuse.kvtransfer.push.LEAST_BYTES", 1)
    final = [1]
    with workers(1, 1) as (sender, receiver):
        reserved = receiver.reserve(TARGETS)
        sender.all.send(PushPages(reserved, SOURCES, 0, lambda: final[0]))
        sender.all.send(FinishPush(reserved, boundary))
        deadline = time.monotonic() + 60.0
        while not mapped.begun and time.monotonic() < deadline:
            time.sleep(0.001)
        final[0] = LAYOUT.num_groups
        assert isinstance(next_event(receiver.all, reserved.transfer_id), Arrived)
        receiver.check_holds(TARGETS, SOURCES)
    assert [chunk.groups for chunk in mapped.begun] == [range(1), range(1, 2)]
    assert not mapped.written


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1)])
def test_a_push_is_not_over_before_its_copies(mapped: Mapped, sending: int, receiving: int) -> None:
    """A cancelled one reads its pages until then, and no receiver is notified of bytes that are
    not there."""
    mapped.may_end.clear()
    with workers(sending, receiving) as (sender, receiver):
        reserved = push(sender, receiver)
        deadline = time.monotonic() + 60.0
        while len(mapped.begun) < max(sending, receiving) and time.monotonic() < deadline:
            time.sleep(0.001)
        sender.all.send(Cancel(reserved.transfer_id))
        time.sleep(SETTLED_S)
        assert sender.all.poll() == [] and receiver.all.poll() == []
        assert receiver.num_spoilt(0.0) == [0] * receiving
        mapped.may_end.set()
        assert isinstance(next_event(sender.all, reserved.transfer_id), PushCancelled)
        receiver.check_holds(TARGETS, SOURCES)


def test_a_receiver_that_cannot_be_notified_fails_the_push(mapped: Mapped) -> None:
    mapped.can_notify = False
    with workers(1, 2) as (sender, receiver):
        reserved = push(sender, receiver)
        failed = next_event(sender.all, reserved.transfer_id)
        assert isinstance(failed, PushFailed) and failed.cause is Cause.PEER
        sender.all.send(Cancel(reserved.transfer_id))
        assert isinstance(next_event(sender.all, reserved.transfer_id), PushCancelled)
        mapped.can_notify = True
        reserved = push(sender, receiver)  # the peer was prepared again
        assert isinstance(next_event(sender.all, reserved.transfer_id), Pushed)
