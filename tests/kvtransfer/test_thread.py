"""A connector's thread: requests in, events out, signals that never stay up, an honest death."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from eventually import eventually, is_readable
from kvtransfer.fixtures import (
    DEADLINE_S,
    SMALL,
    WHOLE,
    boundary,
    filled,
    print_of,
    reservation,
    run_on_thread,
)
from kvtransfer.scene import FakeTransport

from effuse.kvtransfer import digest
from effuse.kvtransfer.connector import (
    ConnectorDied,
    Expect,
    Fence,
    FinishPush,
    Forget,
    PushCancelled,
    PushPages,
)
from effuse.kvtransfer.digest import DigestJob, HostDigester
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import (
    Accepted,
    Begin,
    Finish,
    PageRef,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.thread import STUCK_S, Exchange, ThreadConnector
from effuse.kvtransfer.transport import FromReceiver, FromWriter, Pace, Received


class Sleepy(FakeTransport):
    """Counts its turns and sleeps long in between."""

    def __init__(self, memory: PageMemory) -> None:
        super().__init__(memory, name="sleepy")
        self.has_slept = threading.Event()
        self.is_shut = False

    def close(self) -> None:
        self.is_shut = True

    def wait(self, pace: Pace, requests: int) -> None:
        if not is_readable(requests):
            self.has_slept.set()
        is_readable(requests, DEADLINE_S)


class Counting(ThreadConnector):
    """A connector over such a transport."""

    def __init__(
        self, transport: type[Sleepy] = Sleepy, now: Callable[[], float] = time.monotonic
    ) -> None:
        memory = PageMemory(SMALL, 2)
        self.transport = transport(memory)
        super().__init__(self.transport, memory, "life-1", print_of(SMALL), now)


@pytest.fixture
def thread() -> Iterator[Counting]:
    made = Counting()
    made.start()
    yield made
    made.close()
    assert made.transport.is_shut


def test_requests_run_on_the_thread_and_events_wake_the_engine(thread: Counting) -> None:
    run_on_thread(thread, lambda: thread._emit(PushCancelled(threading.current_thread().name)))
    assert is_readable(thread.fileno(), DEADLINE_S)
    assert thread.poll() == [PushCancelled("sleepy connector of life-1")]
    assert not is_readable(thread.fileno())
    assert thread.poll() == []


def test_a_request_signal_that_is_raised_late_does_not_make_the_thread_spin(
    thread: Counting,
) -> None:
    """As when a request is served between being queued and being signalled."""
    assert thread.transport.has_slept.wait(DEADLINE_S)
    thread.transport.has_slept.clear()
    os.eventfd_write(thread._request_signal, 1)
    assert thread.transport.has_slept.wait(DEADLINE_S), "the signal stays up for ever"


def test_an_event_signal_that_is_raised_late_does_not_make_the_engine_spin(
    thread: Counting,
) -> None:
    os.eventfd_write(thread.fileno(), 1)
    assert thread.poll() == []
    assert not is_readable(thread.fileno())


def test_a_thread_that_never_returns_from_a_call_is_told_as_dead() -> None:
    """Nothing that it was asked to end would ever end, but its engine still beats."""

    class Stuck(Sleepy):
        def receive(self) -> list[Received]:
            is_stuck.set()
            assert may_go_on.wait(DEADLINE_S)
            return super().receive()

    is_stuck, may_go_on, seconds = threading.Event(), threading.Event(), 1000.0
    thread = Counting(Stuck, lambda: seconds)
    thread.start()
    assert is_stuck.wait(DEADLINE_S)
    for _ in range(STUCK_S - 1):
        seconds += 1.0
        assert thread.poll() == []
    seconds += 1000.0  # in which our own process stood still
    for _ in range(STUCK_S):
        assert thread.poll() == []
        seconds += 1.0
    with pytest.raises(ConnectorDied, match="has been in one call for 180 s"):
        thread.poll()
    may_go_on.set()
    thread.close()


def test_a_close_between_a_look_and_a_sleep_still_wakes_the_thread() -> None:
    """The thread is stopped right before it serves requests, as a close() comes in."""

    class Held(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.is_held, self.may_go_on = threading.Event(), threading.Event()

        def _serve_requests(self) -> bool:
            self.is_held.set()
            assert self.may_go_on.wait(DEADLINE_S)
            return super()._serve_requests()

    held = Held()
    held.start()
    assert held.is_held.wait(DEADLINE_S)
    closing = threading.Thread(target=held.close)
    closing.start()
    assert is_readable(held._request_signal, DEADLINE_S)
    held.may_go_on.set()
    closing.join(DEADLINE_S)
    assert held.transport.is_shut
    assert not held.transport.has_slept.is_set()


def test_a_reservation_is_known_before_what_a_writer_says_of_it() -> None:
    """The writer answers before the thread's turn: while the thread listens, it must handle the
    reservation first.
    """

    class Prompt(Sleepy):
        """Whose writer's message arrives the moment that it got a reservation."""

        def receive(self) -> list[Received]:
            if self.learnt or told.is_set():
                return []
            pages = (PageRef(0, 1),)
            reserved = reservation(self.memory, self.address(), pages, incarnation="life-1")
            made.send(Expect(reserved, "prefill-1"))
            told.set()
            begin = Begin(reserved.attempt, "prefill-1", "life-1", WHOLE, print_of(SMALL))
            return [FromWriter(begin, (), "a reply")]

    told = threading.Event()
    made = Counting(Prompt)
    made.start()
    assert told.wait(DEADLINE_S)
    assert made.transport.has_slept.wait(DEADLINE_S)
    made.close()
    assert made.transport.learnt == ["prefill-1"]
    assert made.transport.answers == []


def test_what_is_reserved_while_an_address_is_renewed_keeps_the_old_one_open() -> None:
    """To make another agent takes long, and until it is there the engine gives the old one out."""

    class Renewing(Sleepy):
        """At which the engine reserves pages for another writer while it is being replaced."""

        def __init__(self, memory: PageMemory) -> None:
            super().__init__(memory)
            self.is_two_sided = False

        def renew(self, address: ReceiverAddress) -> None:
            super().renew(address)
            made.send(Expect(reserved(2), "prefill-2"))

    def reserved(number: int) -> Reservation:
        pages = (PageRef(number - 1, 1),)
        address = made.transport.address()
        return reservation(
            made.transport.memory, address, pages, incarnation="life-1", number=number
        )

    made = Counting(Renewing)
    made.send(Expect(reserved(1), "prefill-1"))
    made.send(Forget("transfer-1"))
    made.send(Fence("transfer-1", has_drained=False))
    made.start()
    assert made.transport.has_slept.wait(DEADLINE_S)
    assert made.transport.renewed
    assert not made.transport.shut
    made.transport.has_slept.clear()
    made.send(Forget("transfer-2"))
    assert made.transport.has_slept.wait(DEADLINE_S)
    made.close()
    assert made.transport.shut == [made.transport.address()]


class Paced(FakeTransport):
    """Notes how long it may sleep."""

    def __init__(self, memory: PageMemory) -> None:
        super().__init__(memory)
        self.pace: Pace | None = None

    def wait(self, pace: Pace, requests: int) -> None:
        self.pace = pace


def test_a_thread_looks_as_often_as_something_may_happen() -> None:
    """Rarely while a forward computes the pages: the engine that launches it needs the
    interpreter.
    """
    memory, time, final = filled(SMALL, 4), [10.0], [0]
    transport = Paced(memory)
    exchange = Exchange(
        transport,
        HostDigester(memory),
        Identity("life-1", print_of(SMALL), SMALL),
        lambda event: None,
        lambda: time[0],
    )
    address = ReceiverAddress(connector=transport.name, endpoint="decode")
    reserved = reservation(memory, address, [PageRef(1, 1)])

    def pace(later_s: float = 0.01, heard: Sequence[Received] = ()) -> Pace | None:
        exchange.turn(heard)
        while exchange.turn([]):
            pass
        time[0] += later_s
        exchange.wait(-1)
        return transport.pace

    assert pace() is Pace.IDLE
    exchange.execute(PushPages(reserved, (2,), 0, lambda: final[0]), time[0])
    exchange.execute(FinishPush(reserved, boundary), time[0])
    assert pace() is Pace.COMPUTING
    final[0] = SMALL.num_groups
    assert pace(0.0) is Pace.HOT
    assert pace() is Pace.MOVING
    transport.deliveries[0].has_ended = True
    assert pace() is Pace.MOVING  # until the receiver's last word
    peer = transport.reach(reserved, reserved.shards[0])
    assert pace(0.01, [FromReceiver(peer, Accepted("transfer-1"))]) is Pace.EXPECTING
    assert pace(5.0) is Pace.IDLE


def test_the_engine_looks_at_its_address_after_a_fence(thread: Counting) -> None:
    """A rank tells its leader the new one."""
    assert not is_readable(thread.fileno())
    thread.send(Fence("transfer-1", has_drained=False))
    assert is_readable(thread.fileno(), DEADLINE_S)
    assert thread.poll() == []


def test_a_thread_that_dies_is_noticed(thread: Counting, caplog: pytest.LogCaptureFixture) -> None:
    def die() -> None:
        thread.transport.is_shut = True
        raise ZeroDivisionError("planted")

    run_on_thread(thread, die)
    assert is_readable(thread.fileno(), DEADLINE_S)
    with pytest.raises(ConnectorDied, match="sleepy connector of life-1 has ended") as caught:
        thread.poll()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "planted" in caplog.text


def test_a_thread_that_cannot_open_says_so_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("address in use")

    broken = Counting()
    monkeypatch.setattr(broken.transport, "open", refuse)
    with pytest.raises(
        ValueError, match="sleepy connector of life-1 could not open: address in use"
    ):
        broken.start()
    broken.close()


@pytest.mark.parametrize("copies", [True, False])
def test_sent_pages_are_digested_beside_copies_of_the_connectors_own(
    monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """A transport that copies elsewhere leaves the connector's thread free for digests."""
    memory, begin, found = filled(SMALL, 4), HostDigester.begin, list[threading.Thread]()

    def noting(*args: Any, **kwargs: Any) -> DigestJob:
        found.append(threading.current_thread())
        return begin(*args, **kwargs)

    monkeypatch.setattr(HostDigester, "begin", noting)
    monkeypatch.setattr(digest, "BESIDE_BYTES", 1)
    transport = FakeTransport(memory)
    transport.copies_in_deliver = copies
    own = Identity("life-1", print_of(SMALL), SMALL)
    exchange = Exchange(transport, HostDigester(memory), own, lambda event: None)
    address = ReceiverAddress(connector=transport.name, endpoint="decode")
    reserved = reservation(memory, address, [PageRef(1, 1), PageRef(2, 1)])
    exchange.execute(PushPages(reserved, (2, 3), 0), time.monotonic())
    exchange.execute(FinishPush(reserved, boundary), time.monotonic())

    def is_finished() -> bool:
        exchange.turn([])
        for delivery in transport.deliveries:
            delivery.has_ended = True
        return any(isinstance(one, Finish) for one in transport.said)

    asyncio.run(eventually(is_finished))
    (thread,) = found
    assert (thread is threading.main_thread()) == (not copies)
    exchange._receptions._digester.begin([1], range(1), 1)
    assert found[-1] is threading.main_thread()
    exchange.close()
    asyncio.run(eventually(lambda: not copies or not thread.is_alive()))
