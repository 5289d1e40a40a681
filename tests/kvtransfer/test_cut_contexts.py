"""Handoffs into ranks that hold different tokens: each page of a prompt arrives on its ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import pytest
from kvtransfer.fixtures import boundary, next_event, print_of
from kvtransfer.groups import LAYOUT, NUM_PAGES, Group, layouts_of
from kvtransfer.loopback import Hub

from effuse.kvtransfer.connector import (
    Arrived,
    Cause,
    FinishPush,
    HandoffRefused,
    Pushed,
    PushPages,
)
from effuse.kvtransfer.digest import HostDigester
from effuse.kvtransfer.handoff import Expected
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import (
    KVPart,
    MalformedMessage,
    PageRef,
    Reservation,
    Shard,
    check_reservation,
)
from effuse.kvtransfer.push import check_push

SOURCES = (6, 1, 2, 5, 0, 3, 7)
TARGETS = (3, 4, 0, 7, 1, 2, 6)
# Ranks of the sender and of the receiver, and how many of these cut the context.
DEGREES = [(1, 2, 2), (2, 4, 2), (4, 4, 4), (8, 4, 2), (1, 8, 2), (2, 16, 2)]


def num_bytes_of(reserved: Reservation) -> int:
    """Bytes of all reserved pages, from a sender of one rank."""
    pages = [reserved.pages_of(one.part, LAYOUT.part) for one in reserved.shards]
    return sum(len(n) * one.page_bytes for n, one in zip(pages, reserved.shards, strict=True))


def hand_over(
    sender: Group, receiver: Group, context: int, num_pages: int, settle: Callable[[], None]
) -> None:
    sources, targets = SOURCES[:num_pages], TARGETS[: -(-num_pages // context)]
    reserved = receiver.reserve(targets, num_written=num_pages)
    for first, end in ((0, 1), (1, 4), (4, num_pages)):  # most do not begin with a turn
        if some := sources[first:end]:
            sender.all.send(PushPages(reserved, some, first))
    sender.all.send(FinishPush(reserved, boundary))
    settle()
    arrived = next_event(receiver.all, reserved.transfer_id)
    pushed = next_event(sender.all, reserved.transfer_id)
    num_bytes = num_bytes_of(reserved)
    assert isinstance(arrived, Arrived) and arrived.num_bytes == num_bytes
    assert isinstance(pushed, Pushed)
    assert (pushed.pages, pushed.num_bytes) == (num_pages, num_bytes)
    receiver.check_holds(targets, sources)


@pytest.mark.parametrize("is_two_sided", [False, True], ids=["one_sided", "two_sided"])
@pytest.mark.parametrize(("sending", "receiving", "context"), DEGREES)
def test_every_page_arrives_on_the_ranks_of_its_turn(
    sending: int, receiving: int, context: int, is_two_sided: bool
) -> None:
    """Of prompts of all lengths; a short one leaves ranks without a page, and one that the receiver
    has leaves all of them without any."""
    for num_pages in range(len(SOURCES) + 1):
        hub = Hub(is_two_sided=is_two_sided)
        sender = Group("loopback", "prefill-1", sending, has_pages=True, hub=hub)
        receiver = Group("loopback", "decode-1", receiving, hub=hub, context=context)
        hand_over(sender, receiver, context, num_pages, hub.settle)


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_so_it_does_over_every_connector(kind: str) -> None:
    with (
        contextlib.closing(Group(kind, "prefill-1", 2, has_pages=True)) as sender,
        contextlib.closing(Group(kind, "decode-1", 4, context=4)) as receiver,
    ):
        for num_pages in (1, 5, 7):
            hand_over(sender, receiver, 4, num_pages, lambda: None)
            receiver.fill(0.0)


# Ranks of the sender, how many of these cut the context, and the same of the receiver.
CUT_DEGREES = [(2, 2, 1, 1), (4, 2, 2, 2), (3, 3, 2, 2), (2, 2, 4, 4), (4, 4, 2, 1), (16, 2, 1, 1)]


def hand_over_cut(
    sender: Group, receiver: Group, cuts: tuple[int, int], settle: Callable[[], None], held: int
) -> None:
    """Prompts of all lengths; the receiver has the first `held` pages of its tables. A page of the
    sender's tables is the same of each rank, so that a prompt's pages are those of `FULL`."""
    ours, theirs = cuts
    for num_pages in range(held * theirs, NUM_PAGES):
        count = num_pages - held * theirs
        targets = TARGETS[: -(-count // theirs)]
        reserved = receiver.reserve(targets, num_written=count, num_held=held)
        tables = range(held * theirs // ours, -(-num_pages // ours))
        for at in tables[:: 2 if count else 1]:
            some = tuple(tables[at - tables.start :][:2])
            if count:
                sender.all.send(PushPages(reserved, some, at * ours - held * theirs))
        sender.all.send(FinishPush(reserved, boundary))
        settle()
        arrived = next_event(receiver.all, reserved.transfer_id)
        pushed = next_event(sender.all, reserved.transfer_id)
        assert isinstance(arrived, Arrived) and isinstance(pushed, Pushed), (arrived, pushed)
        num_bytes = num_bytes_of(reserved)
        assert (arrived.num_bytes, pushed.num_bytes, pushed.pages) == (num_bytes, num_bytes, count)
        receiver.check_holds(targets, range(held * theirs, num_pages))
        receiver.fill(0.0)


@pytest.mark.parametrize("is_two_sided", [False, True], ids=["one_sided", "two_sided"])
@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize(("sending", "ours", "receiving", "theirs"), CUT_DEGREES)
def test_pages_of_ranks_that_cut_the_context_arrive(
    sending: int, ours: int, receiving: int, theirs: int, held: int, is_two_sided: bool
) -> None:
    hub = Hub(is_two_sided=is_two_sided)
    source = Group("loopback", "prefill-1", sending, has_pages=True, hub=hub, context=ours)
    target = Group("loopback", "decode-1", receiving, hub=hub, context=theirs)
    hand_over_cut(source, target, (ours, theirs), hub.settle, held)


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_so_they_do_over_every_connector(kind: str) -> None:
    with (
        contextlib.closing(Group(kind, "prefill-1", 2, has_pages=True, context=2)) as sender,
        contextlib.closing(Group(kind, "decode-1", 4, context=4)) as receiver,
    ):
        hand_over_cut(sender, receiver, (2, 4), lambda: None, 1)


def test_each_page_is_moved_by_one_rank() -> None:
    for ours, theirs, held, count in itertools.product((1, 2, 3, 4), (1, 2, 4), (0, 1, 3), (0, 9)):
        reserved = reserved_by(theirs, theirs, -(-count // theirs), count)
        reserved = msgspec.structs.replace(reserved, num_held=held)
        moved = [
            at for turn in range(ours) for one in reserved.shards
            for at in reserved.moved(one.part, KVPart(0, 4, 0, 2, turn, ours))
            if (held * theirs + at) % ours == turn and at % theirs == one.part.turn
        ]  # fmt: skip
        assert sorted(moved) == list(range(count))


@pytest.mark.parametrize(
    ("heads", "turn", "told"),
    [
        ((0, 4), (2, 2), "context part 2 of 2 was sent"),
        ((0, 4), (1, 3), "context part 1 of 3 was sent, expected one of 2"),
        ((2, 4), (0, 2), "heads 2..4 overlap 0..4"),
    ],
)
def test_turns_that_do_not_fit_are_refused(
    heads: tuple[int, int], turn: tuple[int, int], told: str
) -> None:
    group = Group("loopback", "decode-1", 1, hub=Hub())
    memory = group.memories[0]
    expected = Expected(group.reserve((1, 2)), None, memory.layout, 0.0)
    first = KVPart(0, 4, 0, 2, 0, 2)
    assert not expected.let_in(first, Mock(), HostDigester(memory))
    assert expected.parts[first].pages == expected.reservation.pages[:1]
    with pytest.raises(HandoffRefused, match=told):
        expected.let_in(KVPart(*heads, 0, 2, *turn), Mock(), HostDigester(memory))


def reserved_by(num_ranks: int, context: int, num_pages: int, num_written: int) -> Reservation:
    group = Group("loopback", "decode-1", num_ranks, hub=Hub(), context=context)
    return group.reserve(TARGETS[:num_pages], num_written=num_written)


@pytest.mark.parametrize("num_written", [2, 7])
def test_pages_that_do_not_fill_a_reservation_are_refused(num_written: int) -> None:
    with pytest.raises(MalformedMessage, match=f"{num_written} pages do not fill 3 pages of 2"):
        check_reservation(reserved_by(2, 2, 3, num_written))


def changed(reserved: Reservation, **changes: int) -> Reservation:
    first, *others = reserved.shards
    part = msgspec.structs.replace(others[0].part, **changes)
    other = msgspec.structs.replace(others[0], part=part)
    return msgspec.structs.replace(reserved, shards=(first, other, *others[1:]))


def test_ranks_that_disagree_on_the_cut_are_refused() -> None:
    reserved = reserved_by(2, 2, 1, 2)
    with pytest.raises(MalformedMessage, match="holds part 1 of 4 of the context, the first"):
        check_reservation(changed(reserved, turns=4))
    with pytest.raises(MalformedMessage, match="holds part 2 of 2"):
        check_reservation(changed(reserved, turn=2))


def test_a_part_of_the_context_that_no_rank_holds_is_refused() -> None:
    reserved = changed(reserved_by(2, 2, 1, 2), turn=0)
    identity = Identity("prefill-1", print_of(LAYOUT), LAYOUT)
    with pytest.raises(HandoffRefused, match=r"KV heads \[0, 1, 2, 3\] of part 1 of 2") as refused:
        check_push(reserved, identity, "loopback")
    assert refused.value.cause is Cause.COVERAGE


def test_the_fingerprint_does_not_name_the_cut() -> None:
    cut = layouts_of(LAYOUT, 2, 2)[1]
    assert print_of(cut) == print_of(LAYOUT)
    assert (cut.span, cut.context_rank, cut.heads) == (2 * LAYOUT.page_size, 1, range(4))


def test_each_rank_names_the_pages_that_it_gets() -> None:
    reserved = reserved_by(2, 2, 2, 3)
    pages = tuple(PageRef(page, reserved.pages[0].generation) for page in TARGETS[:2])
    found: list[Shard] = list(reserved.shards)
    assert [reserved.pages_of(one.part, LAYOUT.part) for one in found] == [pages, pages[:1]]
