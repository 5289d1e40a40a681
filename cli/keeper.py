"""Keeps a fleet complete: restarts processes that end, and replaces all processes on request.

Logs its actions. `fleet.py` starts and ends processes.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final, NoReturn

from effuse.cli.fleet import WORKERS, Fleet
from effuse.cli.process import Process

LOG: Final = logging.getLogger("effuse.up")
_POLL_S = 0.2
_WELL_S = 60.0  # a process that ran this long did not fail at its start
_MOST_PAUSE_S = 60.0
_OVER = object()


class Restarts:
    """When to restart a process that has ended: immediately, and if it ends again within a minute
    of being ready, after 1, 2, 4 .. 60 s. Each process is counted separately. Times are seconds of
    one clock."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._back_at: dict[str, float] = {}

    def ended(self, name: str, now: float) -> float | None:
        """Records an end. Returns the seconds until the restart; None if already planned."""
        if name in self._due:
            return None
        # Only counts if it was back since its last end.
        if now - self._back_at.pop(name, now) > _WELL_S:
            self._in_a_row[name] = 0
        before = self._in_a_row.get(name, 0)
        pause_s = min(_MOST_PAUSE_S, 2.0 ** (before - 1)) if before else 0.0
        self._in_a_row[name] = before + 1
        self._due[name] = now + pause_s
        return pause_s

    def due(self, now: float) -> list[str]:
        """Names of the processes to start now; each is returned once."""
        names = [name for name, at in self._due.items() if at <= now]
        for name in names:
            del self._due[name]
        return names

    def back(self, name: str, now: float) -> None:
        self._back_at[name] = now


class Rolling:
    """On request, replaces the processes of a fleet one after another, workers first."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._is_asked = False
        self._steps: Iterator[None] | None = None

    def ask(self) -> None:
        """Requests a replacement of all, once more if one is running. Safe in a signal handler."""
        self._is_asked = True

    @property
    def is_over(self) -> bool:
        return self._steps is None and not self._is_asked

    def advance(self) -> None:
        if self._steps is None and self._is_asked:
            self._is_asked = False
            self._steps = self._replace_all()
        if self._steps is not None and next(self._steps, _OVER) is _OVER:
            self._steps = None

    def _replace_all(self) -> Iterator[None]:
        fleet = self._fleet
        for name in fleet.names(*WORKERS, "router"):
            while name not in fleet.processes or fleet.processes[name].returncode is not None:
                yield  # it ended by itself and is restarting
            yield from fleet.roll(name)
            LOG.info("%s was replaced", name)
        LOG.info("all workers were replaced")


def watch_over(fleet: Fleet, rolling: Rolling, *, shows_logs: bool = False) -> NoReturn:
    """Log each process that ends, with the end of its log unless `shows` already prints it, and
    restart it, in parallel, until interrupted."""
    restarts = Restarts()
    starting: set[str] = set()
    while True:
        now = time.monotonic()
        for process in fleet.dead():
            starting.discard(process.name)
            pause_s = restarts.ended(process.name, now)
            if pause_s is not None:
                process.clear()  # now, because after the pause its id may be another process's
                is_shown = shows_logs and process.name != "redis"
                _report(process, pause_s, "" if is_shown else process.tail())
        for name in restarts.due(now):
            try:
                fleet.begin_restart(name)
            except OSError as error:  # no memory for it, or no room for its log
                pause_s = restarts.ended(name, now)
                LOG.warning("%s cannot be started: %s; next try in %.0f s", name, error, pause_s)
            else:
                starting.add(name)
        for name in sorted(name for name in starting if fleet.is_back(name)):
            starting.discard(name)
            restarts.back(name, now)
            LOG.info("%s is back", name)
        rolling.advance()
        time.sleep(_POLL_S)


def _report(process: Process, pause_s: float, tail: str) -> None:
    again = f"it starts again in {pause_s:.0f} s" if pause_s else "it starts again"
    end = f"; its log ends:\n{tail}" if tail else ""
    LOG.warning("%s; %s%s", process.ending(), again, end)
