"""The terminal of `effuse up`: warnings of its processes, and how far the start of a fleet is.

The last line is drawn again while the fleet starts. On a pipe it is printed twice a minute.
"""

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

EVERY_S: Final = 30.0
"""Seconds between two lines about the start on a pipe."""

_RECORD: Final = re.compile(r"\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]+) +\w+ [\w.]+: (?P<text>.*)")
_SEVERE: Final = ("WARNING", "ERROR", "CRITICAL")
_PYTHON: Final = ("Traceback (most recent call last)", "Exception in thread ")
_CLEAR: Final = "\r\x1b[K"

# Steps of a worker in their order, each with the pattern of the record that begins it.
_STEPS: Final = (
    ("loads", re.compile(r"engine \S+ is now loading")),
    ("loads weights", re.compile(r"weights: (?P<done>\S+ of .+) after \d+ s")),
    ("compiles kernels", re.compile(r"engine \S+ is now compiling")),
    ("captures graphs", re.compile(r"engine \S+ is now capturing")),
    ("captures graphs", re.compile(r"graphs of \w+: (?P<done>\S+ of \S+) after \d+ s")),
    ("is ready", re.compile(r"engine \S+ is ready")),
)
_READY: Final = len(_STEPS) - 1
_BEGIN: Final = (-1, "starts")


class StartProgress:
    """How far each of so many workers is, by the records in its log."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: dict[str, tuple[int, str]] = {}  # rank and text, by worker

    def take(self, process: str, text: str) -> None:
        """Takes in the message of one record."""
        if not process.startswith(("prefill", "decode")):
            return
        self._steps.setdefault(process, _BEGIN)
        for rank, (step, pattern) in enumerate(_STEPS):
            if found := pattern.fullmatch(text):
                done = found.groupdict().get("done")
                self._steps[process] = rank, f"{step}, {done}" if done else step

    def text(self) -> str:
        """The number of workers that are ready, and the step of the one that is furthest behind."""
        ready = sum(rank == _READY for rank, _ in self._steps.values())
        told = f"{ready} of {self._workers} workers ready"
        if not self._steps:
            return told
        last = min(self._steps, key=lambda name: self._steps[name][0])
        rank, step = self._steps[last]
        return f"{told}, {'links warm up' if rank == _READY else f'{last} {step}'}"


class Severe:
    """Chooses the lines of logs that people who watch see: warnings and worse with all their lines,
    and tracebacks. None of Redis's own."""

    def __init__(self) -> None:
        self._is_shown: dict[str, bool] = {}  # the record that a line without a head goes on

    def shows(self, process: str, line: str) -> bool:
        """Whether this line, the next one of its process, is shown."""
        if found := _RECORD.match(line):
            self._is_shown[process] = found["level"] in _SEVERE
        elif line.startswith(_PYTHON):
            self._is_shown[process] = True
        return process != "redis" and self._is_shown.get(process, False)


class Screen:
    """Shows what a `LogFollower` passes on, with a line about the start until the context ends.

    is_terminal: whether `out` can draw a line again. width: columns of it at this moment.
    """

    def __init__(
        self,
        out: TextIO,
        workers: int,
        *,
        is_terminal: bool,
        width: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._is_terminal, self._width, self._now = is_terminal, width, now
        self._severe, self._progress = Severe(), StartProgress(workers)
        self._began = self._printed_at = now()
        self._drawn = ""
        self._is_over = False
        self._lock = threading.Lock()

    @classmethod
    def of_errors(cls, workers: int) -> Self:
        """On standard error of this process."""
        is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        return cls(sys.stderr, workers, is_terminal=is_terminal, width=columns)

    def shows(self, process: str, line: str) -> bool:
        """Takes a line of a process's log in; whether it is shown."""
        if found := _RECORD.match(line):
            self._progress.take(process, found["text"])
        return self._severe.shows(process, line)

    def write(self, text: str) -> None:
        """Writes whole lines, above the one about the start."""
        with self._lock:
            self._clear()
            self._out.write(text)

    def flush(self) -> None:
        """Draws the line about the start again if it has changed."""
        with self._lock:
            if not self._is_over:
                self._draw()
            self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """The fleet is ready, or has failed: the line about its start goes."""
        with self._lock:
            self._is_over = True
            self._clear()
            self._out.flush()

    def _draw(self) -> None:
        now = self._now()
        text = f"{now - self._began:.0f} s: {self._progress.text()}"
        if not self._is_terminal:
            if now - self._printed_at >= EVERY_S:
                self._printed_at = now
                self._out.write(f"effuse up: {text}\n")
            return
        text = text[: max(0, self._width() - 1)]
        if text != self._drawn:
            self._out.write(f"{_CLEAR}{text}")
            self._drawn = text

    def _clear(self) -> None:
        if self._drawn:
            self._out.write(_CLEAR)
            self._drawn = ""


def columns() -> int:
    """The width of the terminal."""
    return shutil.get_terminal_size().columns
