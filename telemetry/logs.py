"""Log lines of a process on standard error, and outputs that never make it wait.

Lines are text for people, or JSON for programs. A record may have figures in addition to its
message (`extra=figures(..)`): text shows `name=value`, JSON has members of the same object.
Uncaught exceptions and warnings, which Python itself would print, become records too.

A write to a full pipe or to a paused terminal waits for its reader, so requests and the end of the
process would wait too. `never_wait` opens the pipe or terminal again, only for this process, so
that other processes keep theirs unchanged. A write without room then fails immediately. Python's
text waits in a queue of 1 MiB, and beyond it whole lines are dropped and counted. C code writes to
the same descriptors; the lines that it loses are not counted.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import json
import logging
import os
import re
import select
import stat
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOG: Final = logging.getLogger(__name__)
_FIGURES: Final = "figures"
_SPLITS: Final = re.compile(r'[ "=\n]')

Figures = Mapping[str, str | int | float]
_MOST_BYTES: Final = 1 << 20
"""Of text that waits; beyond it lines are dropped."""
_LAST_S: Final = 1.0
"""How long the end of a process waits for a reader."""
_LOOK_S: Final = 0.05
_RELAY_BYTES: Final = 1 << 16


def set_up(process: str, level: str, form: str = "text") -> None:
    """Logs to standard error from now on, which never makes the process wait; each line has the
    name `process`. `level` and `form`: `log_level` and `log_format` of its config.
    """
    log_by(JsonLines(process) if form == "json" else TextLines(process), level)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value, args.exc_traceback
        )


def log_by(formatter: logging.Formatter, level: str = "info") -> None:
    """Logs to standard error with this formatter, including notices of dropped lines."""

    def notice(lines: int) -> str:
        text = "dropped %d lines, because this output was not read"
        return formatter.format(
            LOG.makeRecord(LOG.name, logging.WARNING, "", 0, text, (lines,), None)
        )

    never_wait(notice)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def figures(values: Figures) -> dict[str, Figures]:
    """The argument `extra` for a logger."""
    return {_FIGURES: values}


class TextLines(logging.Formatter):
    """Time, level, process, logger, message, figures."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        figures = [f"{name}={_plain(value)}" for name, value in _figures_of(record).items()]
        return " ".join([super().formatMessage(record), *figures])


class JsonLines(logging.Formatter):
    """One JSON object for each record, with its traceback; times are UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The object; its own members take precedence over figures of the same name."""
        line: dict[str, object] = {
            **_figures_of(record),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


def _figures_of(record: logging.LogRecord) -> Figures:
    found: Figures = getattr(record, _FIGURES, {})
    return found


def _plain(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text or _SPLITS.search(text) else text


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        LOG.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


class Output:
    """Writes text to one descriptor that does not block: in order, and only whole lines."""

    def __init__(self, number: int, notice: Callable[[int], str]) -> None:
        """notice: makes the line, without its end, about this many dropped ones."""
        self.dropped = 0  # lines, so far
        self.notice = notice
        self._number = number
        self._lock = threading.RLock()  # a signal's handler may write within a write
        self._waiting: deque[bytes] = deque()
        self._unreported = 0  # lines that were dropped since the last notice
        self._writer: threading.Thread | None = None
        self._over = threading.Event()

    def write(self, data: bytes) -> None:
        """Writes `data` now or once there is room, or drops it. Raises nothing."""
        if not self._lock.acquire(timeout=_LAST_S):  # its owner ended with the interpreter
            return
        try:
            rest = self._try(data) if self._write_waiting() else data
            size = sum(map(len, self._waiting)) + len(rest or b"")
            if rest is None or self._unreported or size > _MOST_BYTES:
                self._drop(data)
            elif rest:
                self._waiting.append(rest)
            if self._waiting or self._unreported:
                self._start_writer()
        finally:
            self._lock.release()

    def finish(self, wait_s: float = _LAST_S) -> None:
        """Ends the thread once nothing waits, or after `wait_s`; later text may be dropped."""
        deadline = time.monotonic() + wait_s
        while self._waiting and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 10)
        self._over.set()
        if (writer := self._writer) is not None:
            writer.join(wait_s)

    def _try(self, data: bytes) -> bytes | None:
        """The part of `data` for which there is no room yet; None if none of it can be written."""
        while data:
            try:
                data = data[os.write(self._number, data) :]
            except BlockingIOError:
                return data
            except OSError:  # there is no reader any more, or a disk is full
                return None
        return b""

    def _drop(self, data: bytes) -> None:
        lines = max(1, data.count(b"\n"))
        self.dropped += lines
        self._unreported += lines

    def _write_waiting(self) -> bool:
        """Whether nothing waits, including a notice about dropped lines."""
        while self._waiting:
            waiting = self._waiting.popleft()
            rest = self._try(waiting)
            if rest is None:
                self._drop(waiting)
            elif rest:
                self._waiting.appendleft(rest)
                return False
        if self._unreported:
            self._report_dropped()
        return not (self._waiting or self._unreported)

    def _report_dropped(self) -> None:
        line = f"{self.notice(self._unreported)}\n".encode(errors="backslashreplace")
        rest = self._try(line)
        if rest is not None:
            self._unreported = 0
            self._waiting.extend([rest] if rest else [])

    def _start_writer(self) -> None:
        if self._writer is None and not self._over.is_set():
            self._writer = threading.Thread(target=self._run, name="output", daemon=True)
            with contextlib.suppress(RuntimeError):  # no memory: the next line tries again
                self._writer.start()
                return
            self._writer = None

    def _run(self) -> None:
        room = select.poll()
        room.register(self._number, select.POLLOUT)
        while not self._over.is_set():
            with self._lock:
                if self._write_waiting():
                    self._writer = None
                    return
            room.poll(_LOOK_S * 1000)
            # A terminal may report room and take nothing; without a reader, room is rare.
            self._over.wait(_LOOK_S / 5 if self._waiting else _LAST_S)


class _Raw(io.RawIOBase):
    """An `Output` in the form that Python's streams need."""

    def __init__(self, output: Output, number: int) -> None:
        self._output, self._number = output, number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: ReadableBuffer) -> int:
        given = bytes(data)
        self._output.write(given)
        return len(given)


class _Relay:
    """Copies a pipe of this process from a thread that may wait, for outputs that cannot be opened
    again, such as a socket. `number` is the pipe's end for writing.
    """

    def __init__(self, number: int) -> None:
        self._target = os.dup(number)
        self._end, write = os.pipe()
        os.set_blocking(write, False)
        os.dup2(write, number)
        os.close(write)
        self._is_idle = True
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def finish(self, wait_s: float = _LAST_S) -> None:
        """Returns once everything was copied, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            num_left = fcntl.ioctl(self._end, termios.FIONREAD, bytes(4))
            if self._is_idle and not any(num_left):
                return
            time.sleep(_LOOK_S / 10)

    def _run(self) -> None:
        while True:
            select.select([self._end], [], [])
            self._is_idle = False
            if not (data := os.read(self._end, _RELAY_BYTES)):  # the last descriptor was closed
                self._is_idle = True
                return
            with contextlib.suppress(OSError):
                while data:
                    data = data[self._pass_on(data) :]
            self._is_idle = True

    def _pass_on(self, data: bytes) -> int:
        try:
            return os.write(self._target, data)
        except BlockingIOError:  # the parent process made it so
            select.select([], [self._target], [], _LOOK_S)
            return 0


_OUTPUTS: Final[list[Output]] = []
_RELAYS: Final[list[_Relay]] = []
_elsewhere = 0


def never_wait(notice: Callable[[int], str]) -> None:
    """Makes standard output and error of this process never wait, from now on and at its end.

    `notice` makes the line, without its end, about this many dropped lines.
    """
    if not _OUTPUTS:
        atexit.register(finish)
        is_one = _is_same(1, 2)
        for number in (1, 2):
            _open_once_more(number)
        errors = Output(2, notice)
        _OUTPUTS.extend([errors] if is_one else [errors, Output(1, notice)])
        sys.stdout, sys.stderr = (
            _stream(sys.stdout, _OUTPUTS[-1], 1),
            _stream(sys.stderr, errors, 2),
        )
    for output in _OUTPUTS:
        output.notice = notice


def dropped_lines() -> int:
    """Lines of this process's output that were dropped, and those added by `count`."""
    return sum(output.dropped for output in _OUTPUTS) + _elsewhere


def count(lines: int) -> None:
    global _elsewhere
    _elsewhere += lines


def finish() -> None:
    """Gives waiting text a short time to be read. A process calls it before `os._exit`."""
    for output in _OUTPUTS:
        output.finish()
    for relay in _RELAYS:
        relay.finish()


def leave(status: int) -> NoReturn:
    """Ends this process with `status` once its output had time to be read.

    The interpreter is not ended: with torch in it that takes a second, and threads of gRPC can
    crash it (SIGSEGV).
    """
    finish()
    os._exit(status)


def _open_once_more(number: int) -> None:
    """Gives the descriptor an open file of its own, which does not block. A file on a disk never
    blocks, and is left unchanged.
    """
    try:
        mode = os.fstat(number).st_mode
    except OSError:  # it was closed: the next opened file must not get its number
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return
    if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not os.isatty(number)):
        return
    try:
        own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # a socket, or another user's pipe
        _RELAYS.append(_Relay(number))
        return
    os.dup2(own, number)
    os.close(own)


def _is_same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _stream(before: TextIO | None, output: Output, number: int) -> TextIO:
    """A Python stream for the descriptor; `before` is the previous one."""
    encoding = "utf-8" if before is None else before.encoding
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    # The types require a buffer; the class itself accepts a raw stream, and passes on whole lines.
    buffer = cast("io.BufferedWriter", _Raw(output, number))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)
