"""Progress of a long step at the start, as log lines: a few of them, and a last one."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LOG: Final = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""Least seconds between two lines, except before the last one."""


@contextmanager
def progress_log(
    what: str,
    total: float,
    *,
    unit: str = "",
    per_unit: float = 1.0,
    now: Callable[[], float] = time.monotonic,
    log: Callable[[str], None] = LOG.info,
) -> Iterator[Callable[[float], None]]:
    """Logs lines such as `weights: 3.2 of 15.6 GB after 4 s` while the given function adds finished
    work, and the total time at the end, unless the step breaks off. Times are seconds of `now`.

    total: sum of all additions, in pieces of which `per_unit` make a `unit`.
    """
    began = logged_at = now()
    all_units, unit, done = total / per_unit, unit and f" {unit}", 0.0

    def add(more: float) -> None:
        nonlocal done, logged_at
        done += more / per_unit
        at = now()
        if at - logged_at >= EVERY_S:
            logged_at = at
            log(f"{what}: {done:.3g} of {all_units:.3g}{unit} after {at - began:.0f} s")

    yield add
    log(f"{what}: all {all_units:.4g}{unit} after {now() - began:.1f} s")
