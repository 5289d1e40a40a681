"""A writer dies while its bytes wait in our own sockets: nothing of it lands in free pages.

Over UCX's TCP it is our polling that takes bytes out of sockets, whoever still lives. The
connector's thread is held up meanwhile, as any long call would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvtransfer.fixtures import DEADLINE_S, LARGE, next_event, reservation
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import Arrived, Fenced
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import PageRef, Reservation
from effuse.kvtransfer.thread import Exchange, ThreadConnector

NUM_PAGES = 768
MOST_DEATHS = 8
WRITTEN, NEXT_OWNERS = 7.0, 9.0


class Victim:
    """A pool that is written to over TCP, and a writer that can be killed."""

    def __init__(self) -> None:
        self.memory = PageMemory(LARGE, NUM_PAGES)
        connector = make("nixl", self.memory, "decode-1")
        assert isinstance(connector, ThreadConnector)
        self.connector = connector
        self.connector.start()
        self.writer = RemoteReceiver("nixl", "large", NUM_PAGES, "prefill-1")

    def reserve(self, count: int, number: int) -> Reservation:
        pages = tuple(PageRef(page, number) for page in range(count))
        reserved = reservation(self.memory, self.connector.describe(), pages, number=number)
        self.connector.expect(reserved, "prefill-1")
        return reserved

    def hold_up(self, until: threading.Event, then: Callable[[Exchange], None]) -> None:
        """Holds up the connector's thread, which does something and is held up again for a while:
        whatever is in its sockets stays there meanwhile."""

        def stall() -> None:
            assert until.wait(DEADLINE_S)
            then(self.connector._exchange)
            time.sleep(0.5)

        self.connector._request(stall)

    def kill_writer(self) -> None:
        os.kill(self.writer.process.pid, signal.SIGKILL)
        self.writer.process.wait(DEADLINE_S)

    def num_spoilt(self) -> int:
        """Pages that are not what their next owner wrote."""
        return int((self.memory.tensor.flatten(1) != NEXT_OWNERS).any(1).sum())

    def close(self) -> None:
        self.writer.close()
        self.connector.close()


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def victim() -> Iterator[Victim]:
    with contextlib.closing(Victim()) as made:
        yield made


def test_what_a_dead_writer_sent_never_lands_in_free_pages(victim: Victim) -> None:
    address = victim.connector.describe()
    assert num_spoilt_by_a_death(victim, is_trusted=False) == 0
    assert victim.connector.describe() != address


def test_pages_are_spoilt_where_an_end_is_taken_for_the_end_of_what_was_sent() -> None:
    """That the fault above is real. Whether a dead writer's bytes outlive it depends on what it had
    not read itself, so it may take a few deaths."""
    for _ in range(MOST_DEATHS):
        with contextlib.closing(Victim()) as victim:
            if num_spoilt_by_a_death(victim, is_trusted=True):
                return
    pytest.fail("nothing was ever spoilt")


def num_spoilt_by_a_death(victim: Victim, *, is_trusted: bool) -> int:
    """Free pages that are overwritten after a writer's death; `is_trusted` plants the bug."""
    met = victim.reserve(1, number=1)
    victim.writer.push(met, [0], WRITTEN)
    assert isinstance(next_event(victim.connector, met.transfer_id), Arrived)
    reserved, is_dead = victim.reserve(NUM_PAGES, number=2), threading.Event()

    def give_up(exchange: Exchange) -> None:
        exchange.forget(reserved.transfer_id)
        exchange.fence(reserved.transfer_id, has_drained=is_trusted)

    victim.hold_up(is_dead, give_up)
    victim.writer.push(reserved, range(NUM_PAGES), WRITTEN)
    time.sleep(1.0)
    victim.kill_writer()
    is_dead.set()
    assert next_event(victim.connector, reserved.transfer_id) == Fenced(reserved.transfer_id)
    victim.memory.tensor.fill_(NEXT_OWNERS)
    time.sleep(1.0)
    return victim.num_spoilt()


def test_others_go_on_and_are_reached_anew(victim: Victim) -> None:
    """One writer dies; what another one pushes meanwhile, and later, arrives."""
    with RemoteReceiver("nixl", "large", NUM_PAGES, "prefill-2") as other:
        doomed = victim.reserve(4, number=1)
        spared = reservation(
            victim.memory, victim.connector.describe(), (PageRef(9, 1), PageRef(7, 1)), number=2
        )
        victim.connector.expect(spared, "prefill-2")
        victim.kill_writer()
        victim.connector.forget(doomed.transfer_id)
        victim.connector.fence(doomed.transfer_id, has_drained=False)
        other.push(spared, [3, 4], WRITTEN)
        events = next_events(victim, 2)
        # The address was shut off only after the other push to it had ended.
        assert isinstance(events[0], Arrived) and events[0].transfer_id == spared.transfer_id
        assert events[1] == Fenced(doomed.transfer_id)
        later = reservation(victim.memory, victim.connector.describe(), (PageRef(5, 1),), number=3)
        assert later.address != spared.address
        victim.connector.expect(later, "prefill-2")
        other.push(later, [6], WRITTEN)
        assert isinstance(next_event(victim.connector, later.transfer_id), Arrived)


def next_events(victim: Victim, count: int) -> list[object]:
    """The next events, whatever they are about; one call may bring several."""
    events: list[object] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        events += victim.connector.poll()
        if len(events) >= count:
            return events
        time.sleep(0.001)
    raise AssertionError(f"only {events} came")
