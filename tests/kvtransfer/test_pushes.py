"""The messages of each push, their pieces and times, and how a push ends, from a script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from kvtransfer.fixtures import LARGE, SMALL, boundary, digest_of, filled, print_of, reservation
from kvtransfer.scene import FakeTransport

from effuse.kvtransfer import push as push_module
from effuse.kvtransfer.connector import (
    Cause,
    ConnectorEvent,
    HandoffRefused,
    PushCancelled,
    Pushed,
    PushFailed,
    Route,
)
from effuse.kvtransfer.digest import HostDigester
from effuse.kvtransfer.layout import Identity, KVLayout
from effuse.kvtransfer.messages import (
    Accepted,
    Begin,
    BoundaryState,
    Finish,
    PageRef,
    Placed,
    ReceiverAddress,
    Rejected,
)
from effuse.kvtransfer.pushes import Pushes

PEER, OTHER = sys.intern("tcp://decode:1"), sys.intern("tcp://decode:2")
NAME = "transfer-1"


@dataclass
class Desk:
    """Pushes over a transport that a test plays, and a reservation of four pages."""

    layout: KVLayout = SMALL
    time: float = 50.0
    events: list[ConnectorEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = filled(self.layout, 8)
        self.transport = FakeTransport(self.memory)
        fingerprint = print_of(self.layout)
        self.pushes = Pushes(
            self.transport,
            HostDigester(self.memory),
            Identity("prefill-1", fingerprint, self.layout),
            self.events.append,
            lambda: self.time,
        )
        address = ReceiverAddress(connector="zmq", endpoint=PEER)
        pages = [PageRef(page, 1) for page in (4, 0, 2, 1)]
        self.reserved = reservation(self.memory, address, pages, lease_s=9.0)
        self.boundary: BoundaryState | None = boundary()

    def push(self, *pages: int, first: int = 0, num_final: Callable[[], int] | None = None) -> None:
        self.pushes.push_pages(self.reserved, pages, first, num_final, self.time)

    def finish(self) -> None:
        self.pushes.finish(self.reserved, lambda: self.boundary, self.time)

    def turn(self) -> None:
        while self.pushes.turn():
            pass

    def land(self) -> None:
        """All that can be sent is, and arrives."""
        self.turn()
        for delivery in self.transport.deliveries:
            delivery.has_ended = True
        self.turn()

    def sent(self) -> list[tuple[int, int, int, int]]:
        """First page, pages and groups of the sent chunks so far."""
        return [
            (d.chunk.first, len(d.chunk.targets), d.chunk.groups.start, d.chunk.groups.stop)
            for d in self.transport.deliveries
        ]

    def finished(self) -> bool:
        return any(isinstance(message, Finish) for message in self.transport.said)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_push_introduces_itself_sends_pages_and_then_says_what_they_are(desk: Desk) -> None:
    desk.push()
    assert isinstance(desk.transport.said[0], Begin)
    desk.push(3, 5)
    desk.push(6, 7, first=2)
    desk.turn()
    desk.finish()
    desk.turn()
    assert desk.sent() == [(0, 2, 0, 2), (2, 2, 0, 2)] and not desk.finished()
    assert [d.header.pages for d in desk.transport.deliveries] == [
        desk.reserved.pages[:2],
        desk.reserved.pages[2:],
    ]
    desk.time += 2.0
    desk.land()
    (finish,) = [message for message in desk.transport.said if isinstance(message, Finish)]
    assert finish.manifest.digest == digest_of(desk.memory, [3, 5, 6, 7])
    desk.time += 0.5
    desk.pushes.take(PEER, Accepted(NAME))
    desk.turn()
    # Everything was known at the beginning: the whole of 2.5 s was the handoff's.
    assert desk.events == [Pushed(NAME, 4, 4 * SMALL.page_bytes, 2.5, Route("test"), 2.5)]
    assert desk.transport.left == [PEER] and len(desk.pushes) == 0


def test_time_is_counted_from_the_later_of_pages_and_reservation(desk: Desk) -> None:
    made, desk.boundary = desk.boundary, None
    desk.push(3, 5, 6, 7)
    desk.finish()
    desk.turn()
    desk.time += 4.0  # the forward takes its time
    desk.turn()
    desk.boundary = made
    desk.time += 0.125  # no thread polls, and only noticed progress counts
    desk.turn()
    desk.time += 0.25
    desk.land()
    desk.pushes.take(PEER, Accepted(NAME))
    desk.turn()
    (pushed,) = desk.events
    assert isinstance(pushed, Pushed) and pushed.seconds == 0.375


def test_time_counts_from_when_a_push_was_asked_for_not_from_when_its_turn_came(desk: Desk) -> None:
    asked, desk.time = desk.time, desk.time + 3.0  # connecting takes its time
    desk.pushes.push_pages(desk.reserved, (3, 5, 6, 7), 0, None, asked)
    desk.pushes.finish(desk.reserved, lambda: desk.boundary, asked + 1.0)
    desk.turn()
    desk.land()
    desk.pushes.take(PEER, Accepted(NAME))
    desk.turn()
    (pushed,) = desk.events
    assert isinstance(pushed, Pushed) and pushed.seconds == 2.0


def test_layers_leave_before_later_ones_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "LEAST_BYTES", 1)
    desk, final = Desk(LARGE), 0
    desk.pushes.push_pages(desk.reserved, (3, 5, 6, 7), 0, lambda: final, desk.time)
    desk.turn()
    assert desk.sent() == []
    final = 2
    desk.turn()
    final = 3
    desk.turn()
    assert desk.sent() == [(0, 4, 0, 2), (0, 4, 2, 3)]
    final = LARGE.num_groups
    desk.turn()
    assert desk.sent()[2:] == [(0, 4, 3, 8)]
    desk.finish()
    desk.land()
    (finish,) = [message for message in desk.transport.said if isinstance(message, Finish)]
    assert finish.manifest.digest == digest_of(desk.memory, [3, 5, 6, 7])


def test_few_bytes_wait_for_each_other() -> None:
    desk, final = Desk(LARGE), 7
    desk.pushes.push_pages(desk.reserved, (3, 5, 6, 7), 0, lambda: final, desk.time)
    desk.turn()
    assert desk.sent() == []
    final = 8
    desk.turn()
    assert desk.sent() == [(0, 4, 0, 8)]


def test_what_is_under_way_is_bounded(desk: Desk) -> None:
    desk.transport.chunk_bytes = SMALL.page_bytes
    desk.transport.window_bytes = 2 * SMALL.page_bytes
    desk.push(3, 5, 6, 7)
    desk.turn()
    assert len(desk.sent()) == 2
    desk.transport.deliveries[0].has_ended = True
    desk.turn()
    assert len(desk.sent()) == 3
    desk.transport.has_room = False
    desk.land()
    assert len(desk.sent()) == 3
    desk.transport.has_room = True
    desk.turn()
    assert desk.sent() == [(n, 1, 0, 2) for n in range(4)]


def test_a_page_larger_than_a_piece_goes_alone(desk: Desk) -> None:
    desk.transport.chunk_bytes = 1
    desk.push(3, 5)
    desk.turn()
    assert desk.sent() == [(0, 1, 0, 2), (1, 1, 0, 2)]


def test_a_prompt_without_a_page_sends_its_boundary(desk: Desk) -> None:
    desk.reserved = reservation(desk.memory, desk.reserved.shards, [])
    desk.finish()
    desk.turn()
    assert desk.sent() == [] and desk.finished()


def test_the_lease_ends_a_push_once(desk: Desk) -> None:
    desk.push(3, 5)
    desk.turn()
    desk.time += 9.5
    desk.turn()
    desk.push(6, 7, first=2)
    desk.turn()
    (failed,) = desk.events
    assert isinstance(failed, PushFailed) and failed.cause is Cause.LEASE
    assert "lease of 9 s" in failed.message
    assert len(desk.sent()) == 1


def test_a_cancelled_push_waits_for_what_was_sent(desk: Desk) -> None:
    desk.transport.window_bytes = 1
    desk.transport.chunk_bytes = SMALL.page_bytes
    desk.push(3, 5)
    desk.turn()
    desk.pushes.cancel(NAME)
    desk.turn()
    assert desk.events == [] and len(desk.sent()) == 1
    desk.land()
    assert desk.events == [PushCancelled(NAME)] and len(desk.sent()) == 1
    assert desk.transport.dropped == []


def test_a_receiver_that_never_answers_is_dropped(desk: Desk) -> None:
    desk.push(3)
    desk.turn()
    desk.pushes.cancel(NAME)
    desk.time += 2.0
    desk.turn()
    assert desk.transport.dropped == []
    desk.time += 0.1
    desk.turn()
    assert desk.transport.dropped == [PEER] and desk.events == [PushCancelled(NAME)]


def test_a_receiver_that_answers_slowly_is_dropped_only_after_the_lease(desk: Desk) -> None:
    desk.push(3)
    desk.turn()
    desk.pushes.cancel(NAME)
    for _ in range(10):  # one second before the lease ends, one behind it
        desk.time += 1.0
        desk.pushes.take(PEER, Placed("transfer-2", 0, 0))
        desk.turn()
    assert desk.transport.dropped == [] and desk.events == []
    desk.time += 1.1
    desk.pushes.take(PEER, Placed("transfer-2", 0, 0))
    desk.turn()
    assert desk.transport.dropped == [PEER] and desk.events == [PushCancelled(NAME)]


def test_a_dropped_receiver_fails_what_else_waits_for_its_word(desk: Desk) -> None:
    desk.push(3, 5, 6, 7)
    desk.finish()
    desk.land()
    address = ReceiverAddress(connector="zmq", endpoint=PEER)
    silent = reservation(desk.memory, address, [PageRef(3, 1)], number=2)
    desk.pushes.push_pages(silent, (6,), 0, None, desk.time)
    desk.turn()
    desk.pushes.cancel("transfer-2")
    desk.time += 2.1
    desk.turn()
    assert desk.transport.dropped == [PEER]
    assert [(type(event), event.transfer_id) for event in desk.events] == [
        (PushFailed, NAME),
        (PushCancelled, "transfer-2"),
    ]


def test_a_delivery_that_fails_fails_the_push_and_is_over(desk: Desk) -> None:
    desk.push(3)
    desk.turn()
    desk.transport.deliveries[0].failure = HandoffRefused(Cause.PEER, "the write failed")
    desk.turn()
    assert desk.events == [PushFailed(NAME, Cause.PEER, "the write failed")]
    desk.pushes.cancel(NAME)
    desk.turn()
    assert desk.events[1:] == [PushCancelled(NAME)]


def test_only_its_receiver_may_answer(desk: Desk) -> None:
    desk.push(3, 5, 6, 7)
    desk.finish()
    desk.pushes.take(PEER, Accepted(NAME))  # for a manifest that was not sent yet
    desk.land()
    assert desk.finished() and desk.events == []
    desk.pushes.take(OTHER, Rejected(NAME, "digest", "page 3"))
    desk.pushes.take(OTHER, Accepted(NAME))
    desk.turn()
    assert desk.events == []
    desk.pushes.take(PEER, Rejected(NAME, "digest", "page 3"))
    assert desk.events == [PushFailed(NAME, Cause.DIGEST, "page 3")]


def test_a_lost_receiver_fails_what_goes_there_and_nothing_else(desk: Desk) -> None:
    desk.push(3)
    address = ReceiverAddress(connector="zmq", endpoint="tcp://decode:2")
    other = reservation(desk.memory, address, [PageRef(3, 1)], number=2)
    desk.pushes.push_pages(other, (6,), 0, None, desk.time)
    desk.pushes.lose(PEER, HandoffRefused(Cause.PEER, "gone"))
    assert desk.events == [PushFailed(NAME, Cause.PEER, "gone")]


def test_a_receiver_that_is_lost_once_it_has_accepted_has_the_pages(desk: Desk) -> None:
    """Its last message and the end of its connection may arrive together."""
    desk.push(3, 5, 6, 7)
    desk.finish()
    desk.land()
    desk.pushes.take(PEER, Accepted(NAME))
    desk.pushes.lose(PEER, HandoffRefused(Cause.PEER, "gone"))
    desk.turn()
    assert [type(event) for event in desk.events] == [Pushed]


def test_a_receiver_that_cannot_be_told_fails_the_push(desk: Desk) -> None:
    desk.transport.refusal = HandoffRefused(Cause.PEER, "no route")
    desk.push(3)
    assert desk.events == [PushFailed(NAME, Cause.PEER, "no route")]
    desk.pushes.cancel(NAME)
    desk.turn()
    assert desk.events[1:] == [PushCancelled(NAME)] and desk.transport.left == [PEER]


def test_cancelling_what_is_unknown_is_answered(desk: Desk) -> None:
    desk.pushes.cancel("nobody's")
    assert desk.events == [PushCancelled("nobody's")]


def test_a_push_moves_until_its_receivers_last_word(desk: Desk) -> None:
    desk.push()
    desk.turn()
    assert not desk.pushes.is_moving  # nothing to do until there are pages
    final = [0]
    desk.push(3, 5, 6, 7, num_final=lambda: final[0])
    desk.finish()
    desk.turn()
    assert desk.pushes.awaits_forward and not desk.pushes.is_moving
    final[0] = desk.memory.layout.num_groups
    desk.turn()
    assert desk.pushes.is_moving
    desk.land()
    assert desk.finished() and desk.pushes.is_moving and not desk.pushes.awaits_forward
    desk.pushes.take(PEER, Accepted(NAME))
    desk.turn()
    assert not desk.pushes.is_moving


@pytest.mark.parametrize(
    ("copies", "order"), [(True, ["digest", "deliver"]), (False, ["deliver", "digest"])]
)
def test_a_copy_of_the_connectors_own_finds_the_bytes_in_a_cache(
    monkeypatch: pytest.MonkeyPatch, copies: bool, order: list[str]
) -> None:
    """A digest leaves them there; a copy does not on each processor."""
    desk, found = Desk(), list[str]()
    desk.transport.copies_in_deliver = copies
    begin, deliver = HostDigester.begin, desk.transport.deliver

    def noted(name: str, act: Callable[..., object]) -> Callable[..., object]:
        def noting(*args: object, **kwargs: object) -> object:
            found.append(name)
            return act(*args, **kwargs)

        return noting

    monkeypatch.setattr(HostDigester, "begin", noted("digest", begin))
    monkeypatch.setattr(desk.transport, "deliver", noted("deliver", deliver))
    desk.push(3, 1, 0, 2)
    desk.turn()
    assert found == order
