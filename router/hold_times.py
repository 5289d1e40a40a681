"""How long answers hold a slot, and so how late a request would be that waits for one.

Pure: values in, values out. Not here: the queue (`admission.py`).
"""

from __future__ import annotations

from typing import Final

LEAST_HOLDS: Final = 8
"""Ended requests without which nothing is predicted."""


GAIN: Final = 1 / 16
"""Weight of the latest hold: the last thirty or so count, through which a fleet's pace changes."""

MARGIN: Final = 2.0
"""Mean deviations that a request is given beyond the mean hold, as half of them take longer: few
are refused for it, and nearly all that are let in are answered."""


class HoldTimes:
    """How long answers hold a slot, in seconds: mean and mean deviation, weighted like round-trip
    times (RFC 6298), and their mean size, which is the most tokens of an answer.

    An answer that comes too late is wasted work, and an overloaded fleet gives more of them the
    more requests come. So a request that cannot meet its deadline behind those that wait is refused
    at once (load shedding)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._size = 0.0

    def add(self, held_s: float, size: int, *, is_answered: bool) -> None:
        """Counts an answer that has left its slot. One that was broken off would have held it for
        longer, and counts only if it held it longer than the mean."""
        if not is_answered and held_s <= self._mean_s:
            return
        self._count += 1
        gain = max(GAIN, 1 / self._count)  # the first ones have equal weights
        off_s = held_s - self._mean_s
        if self._count > 1:
            self._deviation_s += gain * (abs(off_s) - self._deviation_s)
        self._mean_s += gain * off_s
        self._size += gain * (size - self._size)

    @property
    def is_known(self) -> bool:
        """Whether enough requests have ended."""
        return self._count >= LEAST_HOLDS

    def hold_s(self, size: int, margin: float = 0.0) -> float:
        """How long an answer of this size may hold its slot, `margin` deviations beyond the mean.
        A smaller one takes less time; a larger one need not take more, as answers may end early."""
        if not self.is_known:
            return 0.0
        return min(1.0, size / max(1.0, self._size)) * (self._mean_s + margin * self._deviation_s)

    def wait_s(self, num: int, slots: int) -> float:
        """How long it takes until so many busy slots have become free."""
        return max(0, num) * self._mean_s / max(1, slots) if self.is_known else 0.0

    def late_s(self, left_s: float, size: int, num: int, slots: int) -> float:
        """By how much a request with `left_s` seconds would be late, if its last answer begins once
        `num` busy slots have become free; 0 or less if it is in time."""
        return self.wait_s(num, slots) + self.hold_s(size, MARGIN) - left_s
