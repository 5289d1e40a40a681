"""The virtual clock: the next event, in an order that only depends on a seed.

Nothing here sleeps or reads a real clock, so a seed gives the same run on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Action = Callable[[], None]


class Violation(BaseException):
    """A forbidden event has happened. Not an Exception, because engines survive those of a
    forward.
    """


class Clock:
    """Actions in the order of their times; those of one time in the order of their asking."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self.trace: list[tuple[float, str]] = []
        self._queue: list[tuple[float, int, Action]] = []
        self._num_asked = 0
        self._between: dict[int, Action] = {}  # by the number of an event

    def __call__(self) -> float:
        """Virtual seconds since the start."""
        return self.now

    def after(self, seconds: float, action: Action) -> None:
        """Runs an action so many seconds from now."""
        self._num_asked += 1
        heapq.heappush(self._queue, (self.now + seconds, self._num_asked, action))

    def between(self, num_events: int, action: Action) -> None:
        """Runs an action at the moment of the event with this number, before it."""
        self._between[num_events] = action

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append((self.now, text))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Runs until a time, or until a condition holds that is looked at every second."""
        look_at = self.now + 1.0
        while self._queue and self.now < until:
            self.now, _, action = heapq.heappop(self._queue)
            self.num_events += 1
            if self.num_events in self._between:
                self._between[self.num_events]()
            action()
            if self.now >= look_at:
                if is_over():
                    return
                look_at = self.now + 1.0

    def told(self) -> str:
        """The trace, a line an event."""
        return "\n".join(f"{at:9.4f}  {text}" for at, text in self.trace)
