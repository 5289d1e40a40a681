"""How an engine shows that it moves. What the front makes of it is `watchdog.py`'s.

A beat goes out with the turns of the loop, from within a forward that takes long, and before a
phase that shows nothing for long: loading, capturing, compiling. All of it comes from the thread
that does the work; one of its own would beat for a loop that hangs.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from effuse.placement.records import Load
from effuse.worker.messages import Heartbeat, Phase

_BEAT_CHANGED_S = 0.05  # a changed load is told this soon
_BEAT_S = 0.5


class Pulse:
    """Counts the signs of life of one engine, and tells them by `tell`, which never waits.

    Without `tell` nobody watches the engine. Belongs to the thread that makes it. `now` is a
    monotonic clock in seconds.
    """

    def __init__(
        self,
        tell: Callable[[Heartbeat], None] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_watched = tell is not None
        self._tell = tell or (lambda _: None)
        self._now = now
        self._thread = threading.get_ident()
        self._phases: list[Phase] = []  # that lie within each other
        self._loops = 0
        self._marks = 0
        self._told = Load()
        self._told_at = float("-inf")

    def turn(self, load: Load, *, has_end: bool) -> Heartbeat | None:
        """Notes a turn of the loop; returns what is to be told of it, if that is due.

        With `has_end` an attempt has ended in this turn: a changed load is due before that is told.
        """
        self._loops += 1
        self._phases.clear()  # also those that an error has left open
        since_s = self._now() - self._told_at
        has_changed = load != self._told and (has_end or since_s >= _BEAT_CHANGED_S)
        if not has_changed and since_s < _BEAT_S:
            return None
        self._told = load
        return self._beat()

    def mark(self, _layer: int = 0) -> None:
        """A part of a long step is done, such as a layer of a forward. Costs next to nothing."""
        self._marks += 1
        if self._now() - self._told_at >= _BEAT_S:
            self._tell(self._beat())

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Tells that `phase` begins, and then that what was before it goes on."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: Phase) -> None:
        """Tells that `phase` begins within the present one. In vain from another thread: what that
        does keeps nobody waiting here."""
        if threading.get_ident() == self._thread:
            self._phases.append(phase)
            self._tell(self._beat())

    def end(self) -> None:
        """Tells that the phase that began last is over."""
        if threading.get_ident() == self._thread and self._phases:
            self._phases.pop()
            self._tell(self._beat())

    def _beat(self) -> Heartbeat:
        self._told_at = self._now()
        phase = self._phases[-1] if self._phases else "serving"
        return Heartbeat(loops=self._loops, marks=self._marks, phase=phase, load=self._told)
