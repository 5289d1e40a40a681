"""Handoffs between workers of different degree: each pair of ranks moves the heads that both hold,
and what holds of a transfer holds of each of its parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from kvtransfer.fixtures import DEADLINE_S, boundary, next_event, print_of
from kvtransfer.groups import LAYOUT, LEASE_S, NUM_PAGES, Group

from effuse.kvtransfer import pushes
from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cause,
    Connector,
    ConnectorEvent,
    Fenced,
    PushCancelled,
    Pushed,
    PushFailed,
)
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.loopback import Hub
from effuse.kvtransfer.messages import AttemptId, Pages
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver, ReceiverIdentity
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Chunk, Delivery, Heard, Peer

SOURCES, TARGETS = (6, 1, 2, 5), (3, 4, 0, 7)
KINDS = ("nixl", "zmq")
NEXT_OWNERS = 9.0
SETTLED_S = 0.3


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
    sender.all.push_pages(reserved, SOURCES[:1], 0)
    sender.all.push_pages(reserved, SOURCES[1:], 1)
    sender.all.finish(reserved, boundary)
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
    monkeypatch.setattr(pushes, "LEAST_BYTES", 1)
    hub, final = Hub(is_two_sided=is_two_sided), [0]
    sender = Group("loopback", "prefill-1", sending, has_pages=True, hub=hub)
    receiver = Group("loopback", "decode-1", receiving, hub=hub)
    reserved = receiver.reserve(TARGETS)
    sender.all.push_pages(reserved, SOURCES, 0, lambda: final[0])
    sender.all.finish(reserved, boundary)
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
        page_bytes = sum(shard.page_bytes for shard in receiver.all.describe())
        identity = ReceiverIdentity("decode-1", print_of(LAYOUT), page_bytes, LEASE_S)
        handoffs = HandoffReceiver(pool, receiver.all, identity)
        pages = pool.allocate(4)
        assert pages is not None
        attempt = AttemptId("request-1", 1, "lost")
        reserved = handoffs.reserve(attempt, pages, "prefill-1", clock[0])
        for rank in sender.ranks[1:]:
            rank.push_pages(reserved, SOURCES, 0)
            rank.finish(reserved, boundary)
            assert isinstance(next_event(rank, "lost"), Pushed)
        assert handoffs.poll(clock[0]) == []
        clock[0] += LEASE_S
        (failed,) = handoffs.poll(clock[0])
        assert isinstance(failed, HandoffFailed) and failed.cause is Cause.LEASE
        if kind == "nixl":
            time.sleep(SETTLED_S)
            assert handoffs.poll(clock[0]) == []
            assert pool.count(PageState.QUARANTINED) == 4
            assert handoffs.writer_gone("lost", has_drained=True) is None
        deadline = time.monotonic() + DEADLINE_S
        while pool.num_free < NUM_PAGES and time.monotonic() < deadline:
            assert handoffs.poll(clock[0]) == []
        pool.audit(())


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
        sender.all.push_pages(reserved, SOURCES, 0)
        sender.all.finish(reserved, boundary)
        refused, *fenced = events_until(receiver, ArrivalRefused)
        assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.DIGEST
        failed = next_event(sender.all, reserved.transfer_id)
        assert isinstance(failed, PushFailed) and failed.cause is Cause.DIGEST
        sender.all.cancel(reserved.transfer_id)
        assert isinstance(next_event(sender.all, reserved.transfer_id), PushCancelled)
        receiver.all.forget(reserved.transfer_id)
        receiver.all.fence(reserved.transfer_id, has_drained=True)
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


def num_spoilt_late(kind: str, sending: int, receiving: int, *, is_trusted: bool) -> list[int]:
    """Pages of each receiving rank that a late write spoils after all ranks said that nothing
    lands any more.

    Over NIXL the bytes wait in the sockets of the last receiving rank, whose thread is held up;
    over ZMQ the last sending rank is late. `is_trusted` plants the bug: the word of writers that
    they are done, although they are not.
    """
    with workers(kind, sending, receiving) as (sender, receiver):
        hand_over(sender, receiver)
        reserved = receiver.reserve(TARGETS)
        let_go, overwritten = threading.Event(), threading.Event()
        if kind == "nixl":
            hold_up_socket(receiver.ranks[-1], let_go, overwritten)
        else:
            hold_back(sender.ranks[-1], let_go)
        sender.all.push_pages(reserved, SOURCES, 0)
        sender.all.finish(reserved, boundary)
        time.sleep(SETTLED_S)
        receiver.all.forget(reserved.transfer_id)
        receiver.all.fence(reserved.transfer_id, has_drained=is_trusted)
        let_go.set()
        assert isinstance(next_event(receiver.all, reserved.transfer_id), Fenced)
        receiver.fill(NEXT_OWNERS)
        overwritten.set()
        time.sleep(3 * SETTLED_S)
        return receiver.num_spoilt(NEXT_OWNERS)


def hold_up_socket(rank: Connector, let_go: threading.Event, overwritten: threading.Event) -> None:
    """Has a receiving rank do nothing until the first event. Then it serves what was asked of it
    meanwhile, and looks at its sockets after the second event."""
    assert isinstance(rank, ThreadConnector)
    hear = rank._exchange.hear

    def hear_late() -> list[Heard]:
        if let_go.is_set():
            _await(overwritten)
        return hear()

    rank._exchange.hear = hear_late  # type: ignore[method-assign]
    rank._request(lambda: _await(let_go))


def hold_back(rank: Connector, let_go: threading.Event) -> None:
    """Has a sending rank deliver nothing until the event."""
    assert isinstance(rank, ThreadConnector)
    deliver = rank._transport.deliver

    def deliver_late(peer: Peer, header: Pages, chunk: Chunk) -> Delivery | None:
        _await(let_go)
        return deliver(peer, header, chunk)

    rank._transport.deliver = deliver_late  # type: ignore[method-assign]


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
    assert num_spoilt_late(kind, sending, receiving, is_trusted=False) == [0] * receiving


@pytest.mark.usefixtures("over_tcp")
def test_a_late_write_that_is_not_fenced_spoils_the_part_that_it_is_of() -> None:
    """On a busy machine nothing may have left in time, so it may take a few tries."""
    tries = (num_spoilt_late("nixl", 2, 2, is_trusted=True) for _ in range(8))
    assert next(filter(any, tries), None) == [0, len(TARGETS)]
