"""Handoffs between workers of different degree: each pair of ranks moves the heads that both hold,
and what holds of a transfer holds of each of its parts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from auditing import audit_pool
from kvtransfer.fixtures import DEADLINE_S, boundary, next_event, print_of, run_on_thread
from kvtransfer.groups import LAYOUT, LEASE_S, NUM_PAGES, Group
from kvtransfer.loopback import Hub

from effuse.kvtransfer import push
from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    Cause,
    Connector,
    ConnectorEvent,
    Fence,
    Fenced,
    FinishPush,
    Forget,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.thread import Exchange, ThreadConnector
from effuse.kvtransfer.transport import Received

SOURCES, TARGETS = (6, 1, 2, 5), (3, 4, 0, 7)
KINDS = ("nixl", "zmq")
NEXT_OWNERS = 9.0
SETTLED_S = 0.3
TRIES = 8


@contextlib.contextmanager
def workers(kind: str, sending: int, receiving: int) -> Iterator[tuple[Group, Group]]:
    """A prefill worker that has pages, and a decode worker that has none."""
    with (
        contextlib.closing(Group(kind, "prefill-1", sending, has_pages=True)) as sender,
        contextlib.closing(Group(kind, "decode-1", receiving)) as receiver,
    ):
        yield sender, receiver


def hand_over(sender: Group, receiver: Group) -> None:
    reserved = receiver.reserve(TARGETS)
    sender.all.send(PushPages(reserved, tuple(SOURCES[:1]), 0))
    sender.all.send(PushPages(reserved, tuple(SOURCES[1:]), 1))
    sender.all.send(FinishPush(reserved, boundary))
    arrived = next_event(receiver.all, reserved.transfer_id)
    pushed = next_event(sender.all, reserved.transfer_id)
    num_bytes = sum(len(TARGETS) * shard.page_bytes for shard in reserved.shards)
    assert isinstance(arrived, Arrived) and arrived.num_bytes == num_bytes
    assert arrived.manifest.boundary == boundary()
    assert isinstance(pushed, Pushed) and (pushed.pages, pushed.num_bytes) == (4, num_bytes)
    receiver.check_holds(TARGETS, SOURCES)


@pytest.mark.parametrize("receiving", [1, 2, 4])
@pytest.mark.parametrize("sending", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_arrives_where_it_belongs(kind: str, sending: int, receiving: int) -> None:
    with workers(kind, sending, receiving) as (sender, receiver):
        for _ in range(2):
            hand_over(sender, receiver)
            receiver.fill(0.0)


@pytest.mark.parametrize(("sending", "receiving"), [(1, 8), (8, 1), (8, 8), (8, 2), (2, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_heads_of_which_ranks_hold_copies(kind: str, sending: int, receiving: int) -> None:
    """Four heads on eight ranks: exactly one rank sends each head to each receiving rank."""
    with workers(kind, sending, receiving) as (sender, receiver):
        hand_over(sender, receiver)


@pytest.mark.parametrize("is_two_sided", [False, True], ids=["one_sided", "two_sided"])
@pytest.mark.parametrize(("sending", "receiving"), [(1, 4), (4, 2), (2, 2)])
def test_layers_leave_as_they_become_final(
    is_two_sided: bool, sending: int, receiving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "LEAST_BYTES", 1)
    hub, final = Hub(is_two_sided=is_two_sided), [0]
    sender = Group("loopback", "prefill-1", sending, has_pages=True, hub=hub)
    receiver = Group("loopback", "decode-1", receiving, hub=hub)
    reserved = receiver.reserve(TARGETS)
    sender.all.send(PushPages(reserved, tuple(SOURCES), 0, lambda: final[0]))
    sender.all.send(FinishPush(reserved, boundary))
    for number in range(LAYOUT.num_groups):
        assert receiver.all.poll() == []
        assert [memory.tensor[:, number].any() for memory in receiver.memories] == [
            False
        ] * receiving
        final[0] = number + 1
        hub.settle()
        assert all(memory.tensor[list(TARGETS), number].all() for memory in receiver.memories)
    assert isinstance(next_event(receiver.all, reserved.transfer_id), Arrived)
    receiver.check_holds(TARGETS, SOURCES)


@pytest.mark.parametrize(("sending", "receiving"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_a_lost_part_are_nobodys_until_its_writers_are_done(
    kind: str, sending: int, receiving: int
) -> None:
    """All parts but one are verified; the prompt has not arrived."""
    pool, clock = PagePool(NUM_PAGES), [0.0]
    with workers(kind, sending, receiving) as (sender, receiver):
        identity = Identity("decode-1", print_of(LAYOUT), LAYOUT)
        handoffs = HandoffReceiver(pool, receiver.all, identity, LEASE_S)
        pages = pool.allocate(4)
        assert pages is not None
        attempt = AttemptId("request-1", 1, "lost")
        reserved = handoffs.reserve(attempt, pages, "prefill-1", clock[0])
        for rank in sender.ranks[1:]:
            rank.send(PushPages(reserved, tuple(SOURCES), 0))
            rank.send(FinishPush(reserved, boundary))
            assert isinstance(next_event(rank, "lost"), Pushed)
        assert handoffs.poll(clock[0]) == []
        clock[0] += LEASE_S
        (failed,) = handoffs.poll(clock[0])
        assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.LEASE
        if kind == "nixl":
            time.sleep(SETTLED_S)
            assert handoffs.poll(clock[0]) == []
            assert pool.count(PageState.QUARANTINED) == 4
            assert handoffs.writer_gone("lost", has_drained=True) is None
        deadline = time.monotonic() + DEADLINE_S
        while pool.num_free < NUM_PAGES and time.monotonic() < deadline:
            assert handoffs.poll(clock[0]) == []
        audit_pool(pool, ())


@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_one_part_is_found(
    kind: str, sending: int, receiving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(kind, sending, receiving) as (sender, receiver):
        victim, memory = receiver.ranks[-1], receiver.memories[-1]
        assert isinstance(victim, ThreadConnector)
        digester = victim._exchange._receptions._digester
        begin = digester.begin

        def begin_later(
            page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
        ) -> DigestJob:
            assert heads is not None
            place = memory.layout.place_of(heads).start * memory.layout.head_bytes
            memory.byte_rows()[page_ids[0], place + 17] ^= 1
            return begin(page_ids, groups, seed, heads)

        monkeypatch.setattr(digester, "begin", begin_later)
        reserved = receiver.reserve(TARGETS)
        sender.all.send(PushPages(reserved, tuple(SOURCES), 0))
        sender.all.send(FinishPush(reserved, boundary))
        refused, *fenced = events_until(receiver, ArrivalRefused)
        assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.DIGEST
        failed = next_event(sender.all, reserved.transfer_id)
        # A sending rank that begins after the refusal learns only that nobody expects its part.
        late = {Cause.UNKNOWN_TRANSFER} if sending > receiving else set()
        assert isinstance(failed, PushFailed) and failed.cause in {Cause.DIGEST} | late
        sender.all.send(Cancel(reserved.transfer_id))
        assert isinstance(next_event(sender.all, reserved.transfer_id), PushCancelled)
        receiver.all.send(Forget(reserved.transfer_id))
        receiver.all.send(Fence(reserved.transfer_id, has_drained=True))
        # Over ZMQ a rank that refuses needs no fence, and says so at once.
        assert (fenced or events_until(receiver, Fenced))[0] == Fenced(reserved.transfer_id)
        monkeypatch.undo()
        receiver.fill(0.0)
        hand_over(sender, receiver)


def events_until(group: Group, kind: type[ConnectorEvent]) -> list[ConnectorEvent]:
    """Events of all ranks together up to one of this kind, with those that came beside it."""
    deadline = time.monotonic() + DEADLINE_S
    events: list[ConnectorEvent] = []
    while not any(isinstance(event, kind) for event in events):
        assert time.monotonic() < deadline, events
        events += group.all.poll()
        time.sleep(0.001)
    return events


@dataclass
class LateWrites:
    """Writes that were under way to given-up pages, and pages that they spoilt afterwards."""

    forced: int = 0
    spoilt: int = 0

    def add(self, other: LateWrites) -> None:
        """Counts those of another run too."""
        self.forced += other.forced
        self.spoilt += other.spoilt


def force_late_writes(
    kind: str, sending: int, receiving: int, rounds: int, *, is_trusted: bool = False
) -> LateWrites:
    """Gives handoffs up while their bytes are under way, and overwrites the pages as soon as all
    ranks report that nothing lands in them any more.

    Over NIXL the bytes wait in the sockets of the receiving ranks, whose threads are held up. Over
    ZMQ the sending ranks are late. `is_trusted` plants the bug: a false report of the writers that
    they are done.
    """
    found = LateWrites()
    with workers(kind, sending, receiving) as (sender, receiver):
        for _ in range(rounds):
            hand_over(sender, receiver)
            reserved, let_go = receiver.reserve(TARGETS), threading.Event()
            for rank in (receiver if kind == "nixl" else sender).ranks:
                hold_up(rank, let_go)
            for place, page in enumerate(SOURCES):  # a write of its own for each page
                sender.all.send(PushPages(reserved, (page,), place))
            sender.all.send(FinishPush(reserved, boundary))
            time.sleep(SETTLED_S)
            found.forced += sum(num_under_way(rank) for rank in sender.ranks)
            receiver.all.send(Forget(reserved.transfer_id))
            receiver.all.send(Fence(reserved.transfer_id, has_drained=is_trusted))
            overwritten = threading.Event()
            for rank in receiver.ranks if kind == "nixl" else ():
                receive_after(rank, overwritten)
            let_go.set()
            assert isinstance(next_event(receiver.all, reserved.transfer_id), Fenced)
            receiver.fill(NEXT_OWNERS)
            overwritten.set()
            time.sleep(SETTLED_S)
            found.spoilt += sum(receiver.num_spoilt(NEXT_OWNERS))
            sender.all.send(Cancel(reserved.transfer_id))
            next_event(sender.all, reserved.transfer_id, PushCancelled)
            receiver.fill(0.0)
    return found


def exchange_of(rank: Connector) -> Exchange:
    assert isinstance(rank, ThreadConnector)
    return rank._exchange


def hold_up(rank: Connector, let_go: threading.Event) -> None:
    """Has a rank's thread do nothing from now on, until the event."""
    assert isinstance(rank, ThreadConnector)
    run_on_thread(rank, lambda: _await(let_go))


def receive_after(rank: Connector, overwritten: threading.Event) -> None:
    """Has a rank look at its sockets, the next time, after the event."""
    exchange = exchange_of(rank)
    receive = type(exchange).receive

    def receive_late() -> list[Received]:
        _await(overwritten)
        return receive(exchange)

    exchange.receive = receive_late  # type: ignore[method-assign]


def num_under_way(rank: Connector) -> int:
    """Writes that are posted and not over, or that wait for a thread that is held up."""
    pushes = exchange_of(rank)._pushes._transfers.values()
    found = sum(len(push.deliveries) + len(push.queue) for one in pushes for push in one)
    assert isinstance(rank, ThreadConnector)
    return found or max(0, len(rank._requests) - 1)  # of these one is the end of the push


def _await(let_go: threading.Event) -> None:
    assert let_go.wait(DEADLINE_S)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize(("sending", "receiving"), [(1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_late_write_of_a_part_spoils_what_others_own(
    kind: str, sending: int, receiving: int
) -> None:
    found = LateWrites()
    for _ in range(TRIES):  # on a busy machine nothing may have left in time
        found.add(force_late_writes(kind, sending, receiving, rounds=2))
        if found.forced:
            break
    assert found.forced and not found.spoilt


@pytest.mark.usefixtures("over_tcp")
def test_late_writes_that_are_not_fenced_spoil_pages() -> None:
    """That the fault above is real."""
    assert any(force_late_writes("nixl", 2, 2, 1, is_trusted=True).spoilt for _ in range(TRIES))


def main() -> None:
    """Forces at least a thousand, degree 2 to 2, over each connector."""
    os.environ["UCX_TLS"] = "tcp,self"
    for kind in KINDS:
        total = LateWrites()
        while total.forced < 1000:
            total.add(force_late_writes(kind, 2, 2, rounds=20))
        print(kind, total, flush=True)


if __name__ == "__main__":
    main()
