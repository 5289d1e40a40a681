"""A connector's thread: requests in, events out, signals that never stay up, an honest death."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest
from kvtransfer.fixtures import DEADLINE_S

from effuse.kvtransfer.connector import Cancelled, ConnectorDied
from effuse.kvtransfer.thread import ConnectorThread


class Counting(ConnectorThread):
    """Counts its turns and sleeps long in between."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.turns = 0
        self.has_slept = threading.Event()
        self.is_shut = False

    def open(self) -> None:
        pass

    def shut(self) -> None:
        self.is_shut = True

    def turn(self) -> float:
        self.turns += 1
        return DEADLINE_S

    def wait(self, seconds: float) -> None:
        if not select.select([self.request_signal], [], [], 0)[0]:
            self.has_slept.set()
        select.select([self.request_signal], [], [], seconds)


@pytest.fixture
def thread() -> Iterator[Counting]:
    made = Counting()
    made.start()
    yield made
    made.close()
    assert made.is_shut


def is_readable(descriptor: int, within_s: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def test_requests_run_on_the_thread_and_events_wake_the_engine(thread: Counting) -> None:
    thread.request(lambda: thread.emit(Cancelled(threading.current_thread().name)))
    assert is_readable(thread.fileno(), DEADLINE_S)
    assert thread.poll() == [Cancelled("counting")]
    assert not is_readable(thread.fileno())
    assert thread.poll() == []


def test_a_request_signal_that_is_raised_late_does_not_make_the_thread_spin(
    thread: Counting,
) -> None:
    """As when a request is served between being queued and being signalled."""
    assert thread.has_slept.wait(DEADLINE_S)
    thread.has_slept.clear()
    os.eventfd_write(thread.request_signal, 1)
    assert thread.has_slept.wait(DEADLINE_S), "the signal stays up for ever"


def test_an_event_signal_that_is_raised_late_does_not_make_the_engine_spin(
    thread: Counting,
) -> None:
    os.eventfd_write(thread.fileno(), 1)
    assert thread.poll() == []
    assert not is_readable(thread.fileno())


def test_a_close_between_a_look_and_a_sleep_still_wakes_the_thread() -> None:
    """The thread is held right before it serves requests, as a close() comes in."""

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
    assert is_readable(held.request_signal, DEADLINE_S)
    held.may_go_on.set()
    closing.join(DEADLINE_S)
    assert held.is_shut
    assert not held.has_slept.is_set()


def test_a_thread_that_dies_is_noticed(thread: Counting, caplog: pytest.LogCaptureFixture) -> None:
    def die() -> None:
        thread.is_shut = True
        raise ZeroDivisionError("planted")

    thread.request(die)
    assert is_readable(thread.fileno(), DEADLINE_S)
    with pytest.raises(ConnectorDied, match="counting has ended") as caught:
        thread.poll()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "planted" in caplog.text


def test_a_thread_that_cannot_open_says_so_at_the_start() -> None:
    class Broken(Counting):
        def open(self) -> None:
            raise OSError("address in use")

    broken = Broken()
    with pytest.raises(ValueError, match="counting cannot open: address in use"):
        broken.start()
    broken.close()
