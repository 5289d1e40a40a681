"""The terminal of `effuse up`: warnings of its processes, how far the start of a fleet is, and the
model, workers and addresses of a fleet that is ready (`greeting`).

The last line is drawn again while the fleet starts. On a pipe it is printed twice a minute.
"""

import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, Self, TextIO

from effuse.cli.commands import FleetConfig, http_url, value_of
from effuse.cli.fleet import WORKERS, Fleet
from effuse.cli.gpus import Assignment
from effuse.cli.status import defaults_by_source, link_lines
from effuse.client.client import Client
from effuse.protos.errors import EffuseError
from effuse.v1 import model_pb2

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
_ROLES: Final = {"prefill": "prefill", "decode": "decode", "worker": "prefill and decode"}


class StartProgress:
    """How far each of so many workers is, by the records in its log."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: dict[str, tuple[int, str]] = {}  # rank and text, by worker

    def take(self, process: str, text: str) -> None:
        if not process.startswith(WORKERS):
            return
        self._steps.setdefault(process, _BEGIN)
        for rank, (step, pattern) in enumerate(_STEPS):
            if found := pattern.fullmatch(text):
                done = found.groupdict().get("done")
                self._steps[process] = rank, f"{step}, {done}" if done else step

    def text(self) -> str:
        """The number of workers that are ready, and the step of the one that is furthest behind."""
        ready = sum(rank == _READY for rank, _ in self._steps.values())
        text = f"{ready} of {self._workers} workers ready"
        if not self._steps:
            return text
        last = min(self._steps, key=lambda name: self._steps[name][0])
        rank, step = self._steps[last]
        return f"{text}, {'links warm up' if rank == _READY else f'{last} {step}'}"


class Severe:
    """Chooses the lines of logs that people who watch see: warnings and worse with all their lines,
    and tracebacks. None of Redis's own."""

    def __init__(self) -> None:
        self._is_shown: dict[str, bool] = {}  # the record that a line without a head goes on

    def shows(self, process: str, line: str) -> bool:
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
    return shutil.get_terminal_size().columns


MOST_ROWS: Final = 8
_LABEL: Final = 9  # columns
_LEAST_WIDTH: Final = 40
_CUT: Final = " .."
_ASK_S: Final = 5.0  # the longest that the router may take to describe its models
_LINKS_S: Final = 2.0  # the longest that a fleet waits until its links are measured
_POLL_S: Final = 0.1

Entry = tuple[str, str]
"""A label, and the text behind it."""


def greeting(fleet: Fleet, page: str | None, *, width: int | None, verbose: bool) -> list[str]:
    """The lines about a fleet that is ready, for a terminal of `width` columns or, with None, a
    file. `page` is the address of the page about it."""
    config, (models, workers) = fleet.config, _ask(fleet)
    entries = [
        ("model", model_text(config, models)),
        ("workers", workers_text(config, fleet.gpus, workers)),
        ("gRPC", f"effuse is ready on {fleet.address} after {fleet.ready_s:.1f} s"),
        ("HTTP", http_url(config) or ""),
        ("page", page or ""),
        ("metrics", metrics_text(fleet.metrics(), None if verbose else width)),
    ]
    if verbose:
        entries += [(name, f"on {gpu}") for name, gpu in fleet.gpus.items()]
        entries += [("link", line) for line in link_lines(workers)]
        entries += [("redis", fleet.redis_url), ("logs", str(fleet.log_dir))]
    entries = [(label, text) for label, text in entries if text]
    return laid_out(entries, None if verbose else width)


def laid_out(entries: Sequence[Entry], width: int | None) -> list[str]:
    """A row for each entry or, within `MOST_ROWS`, as many as it needs: short ones first. An entry
    that needs more is cut."""
    if width is None:
        return [f"{label:<{_LABEL}}{text}" for label, text in entries]
    width = max(width, _LEAST_WIDTH)
    wrapped = {label: _wrapped(text, width - _LABEL) for label, text in entries}
    left = MOST_ROWS - len(entries)
    for label in sorted(wrapped, key=lambda one: len(wrapped[one])):
        rows = wrapped[label]
        wrapped[label] = _cut(rows, 1 + left, width - _LABEL)
        left -= len(wrapped[label]) - 1
    return [
        f"{'' if at else label:<{_LABEL}}{row}"
        for label, rows in wrapped.items()
        for at, row in enumerate(rows)
    ]


def _wrapped(text: str, width: int) -> list[str]:
    """An address is never broken."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _cut(rows: list[str], most: int, width: int) -> list[str]:
    if len(rows) <= most:
        return rows
    last = textwrap.shorten(rows[most - 1], width - len(_CUT), placeholder="")
    return [*rows[: most - 1], last + _CUT]


def model_text(config: FleetConfig, models: Sequence[model_pb2.Model]) -> str:
    """Each model with its settings and, in brackets, the source of each."""
    described = [f"{model.name}: {_settings(model)}".removesuffix(": ") for model in models]
    return "; ".join(described) or (config.model or Path("the bundled model")).name


def _settings(model: model_pb2.Model) -> str:
    by_source = defaults_by_source(model)
    # The algorithm comes first, because the end is cut if there is no room.
    sources = sorted(by_source, key=lambda one: not by_source[one][0].startswith("algorithm "))
    return ", ".join(f"{', '.join(by_source[one])} ({one})" for one in sources)


def workers_text(
    config: FleetConfig, gpus: Mapping[str, Assignment], workers: Sequence[model_pb2.Worker]
) -> str:
    """The GPUs of each role or, on the CPU, how many workers it has; and the speed of the links."""
    counts = {"prefill": config.prefill, "decode": config.decode, "worker": config.workers}
    if gpus:
        roles = [f"{role} {_places(gpus, role)}" for role, count in counts.items() if count]
    else:
        listed = [f"{count} {_ROLES[role]}" for role, count in counts.items() if count]
        roles = [f"{', '.join(listed)} on the CPU"]
    links = [link for worker in workers for link in worker.links]
    return "; ".join(filter(None, [*roles, _links_text(links)]))


def _places(gpus: Mapping[str, Assignment], role: str) -> str:
    return ", ".join(str(gpu) for name, gpu in gpus.items() if name.startswith(f"{role}-"))


def _links_text(links: Sequence[model_pb2.WorkerLink]) -> str:
    if not links:
        return ""
    rates = sorted(link.gigabytes_per_second for link in links)
    slowest, fastest = f"{rates[0]:.3g}", f"{rates[-1]:.3g}"
    rate = fastest if slowest == fastest else f"{slowest} to {fastest}"
    kinds = " or ".join(dict.fromkeys(link.transport for link in links))
    refused = sum(link.refused for link in links)
    text = f"{kinds}, {rate} GB/s" + (f", {refused} refused" if refused else "")
    return f"link {text}" if len(links) == 1 else f"{len(links)} links {text}"


def metrics_text(metrics: Mapping[str, str], width: int | None) -> str:
    """The address of each process's metrics; on a narrow terminal only that of the first one."""
    text = ", ".join(f"{name} {at}" for name, at in metrics.items())
    if width is None or len(text) <= width - _LABEL or len(metrics) < 2:
        return text
    name, at = next(iter(metrics.items()))
    return f"{name} {at}; `effuse status` has {len(metrics) - 1} more"


def _ask(fleet: Fleet) -> tuple[Sequence[model_pb2.Model], Sequence[model_pb2.Worker]]:
    """The models and workers that the router lists, once its links are measured or after
    `_LINKS_S`; none if it answers only clients that it knows."""
    if asks_who_calls(fleet.config):
        return (), ()
    pairs = set(product(fleet.names("prefill", "worker"), fleet.names("decode", "worker")))
    pairs -= {(name, name) for name in fleet.processes}
    deadline = time.monotonic() + _LINKS_S
    try:
        with Client(fleet.address, timeout_s=_ASK_S) as client:
            while True:
                workers = client.workers()
                linked = {(one.worker_id, link.peer) for one in workers for link in one.links}
                if pairs <= linked or time.monotonic() > deadline:
                    return client.models(), workers
                time.sleep(_POLL_S)
    except EffuseError:
        return (), ()


def asks_who_calls(config: FleetConfig) -> bool:
    """Whether a fleet's routers answer only clients that they know, or only by TLS."""
    return any(value_of(config.router_flags, flag) for flag in ("--tls-cert", "--keys"))
