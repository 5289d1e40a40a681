"""The prefill side of a handoff: calls to the connector, and when pages are released."""

from __future__ import annotations

import msgspec
import pytest
from kvtransfer.fixtures import SMALL, WHOLE, boundary, reservation

from effuse.kvtransfer.connector import (
    Arrived,
    Cancel,
    Cause,
    Command,
    ConnectorEvent,
    FinishPush,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.ends import OVERTIME_S, Ended, HandoffSender
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import (
    AttemptId,
    Manifest,
    PageRef,
    ReceiverAddress,
    Shard,
)
from effuse.kvtransfer.push import shard_of

ATTEMPT = AttemptId("request-1", 1, "transfer-1")
BOUNDARY = boundary()
RESERVED = reservation(
    PageMemory(SMALL, 8),
    ReceiverAddress(connector="scripted"),
    tuple(PageRef(page, 1) for page in range(3)),
)


class Scripted:
    """A connector that records calls and returns given events."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.events: list[ConnectorEvent] = []

    def start(self) -> None: ...

    def close(self) -> None: ...

    def describe(self) -> tuple[Shard, ...]:
        return (shard_of(SMALL, ReceiverAddress(connector=self.name)),)

    def send(self, command: Command) -> None:
        match command:
            case PushPages(_, source_pages, first, num_final):
                self.asked.append(("push", source_pages, first, num_final))
            case FinishPush(_, boundary):
                self.asked.append(("finish", boundary()))
            case Cancel(transfer_id):
                self.asked.append(("cancel", transfer_id))
            case _:
                pass

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return -1


class Desk:
    """A sender on a scripted connector and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.time = 10.0
        self.connector = Scripted()
        self.sender = HandoffSender(self.connector, reservation_s=4.0, now=lambda: self.time)
        self.sender.begin(ATTEMPT)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def half() -> int:
    """How many groups of layers a forward that runs has stored."""
    return 1


def test_pages_go_out_once_each_as_they_become_final(desk: Desk) -> None:
    desk.sender.pages_ready("transfer-1", [5], half)
    assert desk.connector.asked == []
    desk.sender.address(RESERVED)
    desk.sender.pages_ready("transfer-1", [2, 7])
    desk.sender.computed("transfer-1", lambda: BOUNDARY)
    assert desk.connector.asked == [
        ("push", (), 0, None),  # reaches the peer early
        ("push", (5,), 0, half),
        ("push", (2, 7), 1, None),
        ("finish", BOUNDARY),
    ]
    desk.connector.events = [Pushed("transfer-1", 3, 3072, 0.5)]
    assert desk.sender.poll() == [
        Pushed("transfer-1", 3, 3072, 0.5),
        Ended("transfer-1"),
    ]
    assert not desk.sender._handoffs


def test_a_failed_push_is_reported_at_once_and_ends_when_it_has_drained(desk: Desk) -> None:
    desk.sender.address(RESERVED)
    desk.connector.events = [
        PushFailed("transfer-1", Cause.PEER, "gone"),
        PushFailed("transfer-1", Cause.PEER, "gone again"),
    ]
    assert desk.sender.poll() == [PushFailed("transfer-1", Cause.PEER, "gone")]
    assert desk.connector.asked[-1] == ("cancel", "transfer-1")
    assert desk.sender.poll() == []
    desk.connector.events = [PushCancelled("transfer-1")]
    assert desk.sender.poll() == [Ended("transfer-1")]


def test_an_abort_before_the_reservation_ends_at_once(desk: Desk) -> None:
    desk.sender.abort("transfer-1")
    desk.sender.abort("transfer-1")
    assert desk.connector.asked == []
    assert desk.sender.poll() == [Ended("transfer-1")]


def test_an_abort_waits_for_the_drain_even_if_the_push_succeeds(desk: Desk) -> None:
    desk.sender.address(RESERVED)
    desk.sender.computed("transfer-1", lambda: BOUNDARY)
    desk.sender.abort("transfer-1")
    desk.connector.events = [Pushed("transfer-1", 3, 3072, 0.5)]
    assert desk.sender.poll() == []
    desk.connector.events = [PushCancelled("transfer-1")]
    assert desk.sender.poll() == [Ended("transfer-1")]


def test_computing_may_take_its_time_but_the_reservation_may_not(desk: Desk) -> None:
    desk.time += 1000.0
    assert desk.sender.poll() == []
    desk.sender.computed("transfer-1", lambda: BOUNDARY)
    desk.time += 3.9
    assert desk.sender.poll() == []
    desk.time += 0.1
    missed, ended = desk.sender.poll()
    assert isinstance(missed, PushFailed) and missed.cause is Cause.UNRESERVED
    assert "no reservation arrived within 4 s" in missed.message
    assert ended == Ended("transfer-1")


def test_a_connector_that_is_stuck_is_overtaken_by_the_clock(desk: Desk) -> None:
    desk.sender.address(RESERVED)
    desk.sender.pages_ready("transfer-1", [5, 2, 7])
    desk.sender.computed("transfer-1", lambda: BOUNDARY)
    desk.time += RESERVED.lease_s + OVERTIME_S - 0.1
    assert desk.sender.poll() == []
    desk.time += 0.1
    (missed,) = desk.sender.poll()
    assert isinstance(missed, PushFailed) and missed.cause is Cause.LEASE


def test_events_of_others_are_left_alone(desk: Desk) -> None:
    manifest = Manifest(
        attempt=AttemptId("request-2", 1, "transfer-2"),
        source="prefill-1",
        destination="decode-1",
        part=WHOLE,
        fingerprint=(),
        digest=bytes(16),
        num_bytes=0,
        boundary=BOUNDARY,
    )
    desk.connector.events = [Arrived("transfer-2", manifest, 0.0, 0), PushCancelled("transfer-3")]
    assert desk.sender.poll() == []


def test_held_pages_of_ranks_that_cut_the_context_are_not_sent() -> None:
    """A page there has room for two of the prompt's."""
    desk = Desk()
    (shard,) = RESERVED.shards
    shards = tuple(
        msgspec.structs.replace(shard, part=msgspec.structs.replace(shard.part, turn=turn, turns=2))
        for turn in range(2)
    )
    reserved = msgspec.structs.replace(RESERVED, shards=shards, num_held=1, num_written=5)
    desk.sender.pages_ready("transfer-1", (4, 5, 6))
    desk.sender.address(reserved)
    desk.sender.pages_ready("transfer-1", (7, 8, 9, 10))
    assert [one for one in desk.connector.asked if one[1]] == [
        ("push", (6,), 0, None),
        ("push", (7, 8, 9, 10), 1, None),
    ]
