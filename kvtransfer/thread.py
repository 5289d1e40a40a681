"""A connector's own thread: requests in, events out, and a descriptor that says when there are any.

Knows nothing of pages; zmq_connector.py and nixl_connector.py say what a turn of the thread does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from effuse.kvtransfer.connector import ConnectorDied, ConnectorEvent

LOG = logging.getLogger(__name__)

OPEN_S = 60.0  # registering a large pool takes its time
JOIN_S = 10.0


class ConnectorThread(ABC):
    """Runs `turn` again and again on one thread, the engine's requests in between."""

    def __init__(self, name: str) -> None:
        self._requests: deque[Callable[[], None]] = deque()
        self._events: deque[ConnectorEvent] = deque()
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._request_signal = _signal()
        self._event_signal = _signal()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until it is open. Raises ValueError where it cannot be."""
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            raise ValueError(f"the {self._thread.name} did not open within {OPEN_S} s")
        if self._ended.is_set():
            raise ValueError(f"the {self._thread.name} cannot open: {self._error}") from self._error

    def close(self) -> None:
        """Ends the thread; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        _raise(self._request_signal)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._request_signal)
            os.close(self._event_signal)

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the thread has ended by itself."""
        self._check_alive()
        _lower(self._event_signal)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        """Readable while poll() has something."""
        return self._event_signal

    @abstractmethod
    def open(self) -> None:
        """Makes what belongs to the thread; runs on it, first."""

    @abstractmethod
    def shut(self) -> None:
        """Gives it back; runs on it, last."""

    @abstractmethod
    def turn(self) -> float:
        """Does what there is to do, then says how many seconds may pass until the next turn."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Sleeps for that long, or until `request_signal` or something of its own is ready."""

    @property
    def request_signal(self) -> int:
        """A descriptor that is readable while requests wait."""
        return self._request_signal

    def request(self, action: Callable[[], None]) -> None:
        """Has the thread run this soon; from any thread."""
        self._requests.append(action)
        _raise(self._request_signal)

    def emit(self, event: ConnectorEvent) -> None:
        """Tells the engine; from the connector's thread."""
        self._events.append(event)
        _raise(self._event_signal)

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:
            LOG.exception("the %s has ended", self._thread.name)
            self._error = error
        self._ended.set()
        self._opened.set()
        _raise(self._event_signal)

    def _live(self) -> None:
        self.open()
        self._opened.set()
        # The signal is lowered before closing is looked at: the other way round, a close() in
        # between would wake nobody.
        while self._serve_requests() and threading.main_thread().is_alive():
            self.wait(self.turn())
        self.shut()

    def _serve_requests(self) -> bool:
        """False once the thread is to end."""
        _lower(self._request_signal)
        if self._closing.is_set():
            return False
        for _ in range(len(self._requests)):
            self._requests.popleft()()
        return True

    def _check_alive(self) -> None:
        if self._ended.is_set():
            raise ConnectorDied(f"the {self._thread.name} has ended") from self._error


def _signal() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _raise(signal: int) -> None:
    os.eventfd_write(signal, 1)


def _lower(signal: int) -> None:
    """Always before the queue is read: a signal that is raised late would else stay up for ever,
    and whoever waits for it would spin."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(signal)
