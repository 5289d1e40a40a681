"""How far a long step of the start is, as lines of the log: few of them, and a last one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

LOG: Final = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""A line at most so often, but for the last one."""


class ProgressLog:
    """Says `weights: 3.2 of 15.6 GB after 4 s` while it is told of what is done, and in the end how
    long all took; of what was broken off it says no end. Times are seconds of `now`.

    total: of all that will be added, in pieces of which `per_unit` are a `unit`.
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
        """So much more is done."""
        self._done += done / self._per_unit
        now = self._now()
        if now - self._said_at >= EVERY_S:
            self._said_at = now
            told = f"{self._what}: {self._done:.3g} of {self._total:.3g}{self._unit}"
            self._say(f"{told} after {now - self._began:.0f} s")
