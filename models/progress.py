"""Progress of a long step at the start, as log lines: a few of them, and a last one."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

LOG: Final = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""Least seconds between two lines, except before the last one."""


class ProgressLog:
    """Logs lines such as `weights: 3.2 of 15.6 GB after 4 s` while work is added, and the total
    time at the end, unless the step breaks off. Times are seconds of `now`.

    total: sum of all additions, in pieces of which `per_unit` make a `unit`.
    """

    def __init__(
        self,
        what: str,
        total: float,
        *,
        unit: str = "",
        per_unit: float = 1.0,
        now: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = LOG.info,
    ) -> None:
        self._what = what
        self._total = total / per_unit
        self._unit = f" {unit}" if unit else ""
        self._per_unit = per_unit
        self._now = now
        self._say = say
        self._done = 0.0
        self._began = self._said_at = now()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            told = f"{self._what}: all {self._total:.4g}{self._unit}"
            self._say(f"{told} after {self._now() - self._began:.1f} s")

    def add(self, done: float = 1.0) -> None:
        """Adds finished work."""
        self._done += done / self._per_unit
        now = self._now()
        if now - self._said_at >= EVERY_S:
            self._said_at = now
            told = f"{self._what}: {self._done:.3g} of {self._total:.3g}{self._unit}"
            self._say(f"{told} after {now - self._began:.0f} s")
