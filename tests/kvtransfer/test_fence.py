"""A writer dies while its bytes wait in our own sockets: nothing of it lands in free pages.

Over UCX's TCP only our polling takes bytes out of sockets, even those of a dead process. The
connector's thread is blocked meanwhile, as in any long call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtransfer.fixtures import (
    DEADLINE_S,
    address_of,
    next_event,
    reservation,
)
from kvtransfer.late_writes import (
    NEXT_OWNERS,
    NUM_PAGES,
    WRITTEN,
    Fate,
    Forcing,
    Over,
    Victim,
    carried_by,
)
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer import reception
from effuse.kvtransfer.connector import Arrived, Expect, Fence, Fenced, Forget, Promised
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.thread import Exchange

MOST_DEATHS = 8
LATE_WRITES = 16
A_SOCKETS_BYTES = 1 << 16  # about half of a socket's buffer


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
    """Checks that the fault above is real. Whether a dead writer's bytes outlive it depends on its
    own reads, so it may take a few deaths.
    """
    for _ in range(MOST_DEATHS):
        with contextlib.closing(Victim()) as victim:
            if num_spoilt_by_a_death(victim, is_trusted=True):
                return
    pytest.fail("nothing was ever spoilt")


def test_a_writer_that_begins_late_is_awaited(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine's writer begins after a quarter of its lease, and promises its pages first."""
    monkeypatch.setattr(reception, "PROMISES", 1e9)  # every writer begins late
    victim.meet()
    assert num_spoilt_by_a_death(victim, is_trusted=False) == 0


def num_spoilt_by_a_death(victim: Victim, *, is_trusted: bool) -> int:
    """Free pages that are overwritten after a writer's death; `is_trusted` plants the bug."""
    victim.meet()
    reserved, is_dead = victim.reserve(NUM_PAGES), threading.Event()

    def give_up(exchange: Exchange) -> None:
        exchange.execute(Forget(reserved.transfer_id), 0.0)
        exchange.execute(Fence(reserved.transfer_id, has_drained=is_trusted), 0.0)

    victim.hold_up(is_dead, give_up)
    victim.writer.push(reserved, range(NUM_PAGES), WRITTEN)
    await_unread()
    victim.kill_writer()
    is_dead.set()
    assert next_event(victim.connector, reserved.transfer_id) == Fenced(reserved.transfer_id)
    victim.memory.tensor.fill_(NEXT_OWNERS)
    time.sleep(1.0)
    return int((~victim.holds(NEXT_OWNERS)).sum())


def await_unread() -> None:
    """Waits until a writer's bytes fill one of our sockets."""
    deadline = time.monotonic() + DEADLINE_S
    while num_unread() < A_SOCKETS_BYTES:
        assert time.monotonic() < deadline, "the writer did not begin"
        time.sleep(0.01)


def num_unread() -> int:
    """Bytes in the TCP sockets of this process that were not read yet."""
    ours = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            ours.add(str(descriptor.readlink()))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    unread = [int(one[4].split(":")[1], 16) for one in sockets if f"socket:[{one[9]}]" in ours]
    return sum(unread)


@pytest.mark.parametrize("over", [Over.KERNEL, Over.SHARED_MEMORY, Over.ZMQ], ids=str)
def test_no_late_write_spoils_what_others_own(over: Over) -> None:
    """`make chaos` forces a thousand."""
    with carried_by(over):
        total = sum(Forcing(over, seed=1).run(LATE_WRITES).values(), Counter[str]())
    assert total["given_up"] >= LATE_WRITES and total["spoilt"] == 0, total


def test_where_a_frozen_writer_is_taken_for_a_finished_one_it_spoils_what_others_own() -> None:
    with carried_by(Over.KERNEL):
        spoilt, given_up = Forcing(Over.KERNEL, seed=1).num_spoilt_unguarded(Fate.GOES_ON)
    assert 0 < spoilt <= given_up


def test_others_go_on_and_are_reached_anew(victim: Victim) -> None:
    """One writer dies; the present and later pushes of another one arrive."""
    with RemoteReceiver("nixl", "large", NUM_PAGES, "prefill-2") as other:
        doomed = victim.reserve(4)
        spared = reservation(
            victim.memory, victim.connector.describe(), (PageRef(9, 1), PageRef(7, 1)), number=2
        )
        victim.connector.send(Expect(spared, "prefill-2"))
        victim.kill_writer()
        victim.connector.send(Forget(doomed.transfer_id))
        victim.connector.send(Fence(doomed.transfer_id, has_drained=False))
        other.push(spared, [3, 4], WRITTEN)
        events = next_events(victim, 2)
        # The address was shut off only after the other push to it had ended.
        assert isinstance(events[0], Arrived) and events[0].transfer_id == spared.transfer_id
        assert events[1] == Fenced(doomed.transfer_id)
        later = reservation(victim.memory, victim.connector.describe(), (PageRef(5, 1),), number=3)
        assert address_of(later) != address_of(spared)
        victim.connector.send(Expect(later, "prefill-2"))
        other.push(later, [6], WRITTEN)
        assert isinstance(next_event(victim.connector, later.transfer_id), Arrived)


def next_events(victim: Victim, count: int) -> list[object]:
    """The next events except promises, of any transfer; one call may return several."""
    events: list[object] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        events += [one for one in victim.connector.poll() if not isinstance(one, Promised)]
        if len(events) >= count:
            return events
        time.sleep(0.001)
    raise AssertionError(f"only {events} came")
