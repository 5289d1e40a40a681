"""The child processes of a fleet: each logs to a file, stops by a deadline and never outlives its
parent. Their logs can be shown as one stream.

Roles, addresses and readiness are in `fleet.py`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn, Protocol, Self

_TAIL_BYTES = 1 << 16
_POLL_S = 0.1
_LOOK_S = 0.02
_FREE_LOCK = "release un"  # of both kinds of lock: "un-acquired lock", "unlocked lock"
KILLED_S = 10.0  # time limit for the kernel to end a killed process
# Runs in the child before its program: asks the kernel for SIGTERM when the parent dies (prctl
# option 1), and exits if the parent has already died.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Process:
    """A running program and its log."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._child = child
        self._is_cleared = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    def send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            self._child.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Waits for the exit status. Raises TimeoutError."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as slow:
            raise TimeoutError(f"{self.name} still runs after {timeout_s:g} s") from slow

    def clear(self) -> None:
        """Kill it and all its remaining children; only once, because another process may have its
        id later. A process that waits for a device in the kernel may survive."""
        if not self._is_cleared:
            kill_group(self._child)
        self._is_cleared = True

    def tail(self, lines: int = 20) -> str:
        return "\n".join(f"  {line}" for line in last_lines(self.log, lines))

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.returncode
        if code is None:
            return f"{self.name} runs"
        if code < 0:
            # most real-time signals have no name
            names = {one.value: one.name for one in signal.Signals}
            by = names.get(-code, f"signal {-code}")
            return f"{self.name} (pid {self.pid}) was ended by {by}"
        return f"{self.name} (pid {self.pid}) exited with status {code}"


def kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_S)


def logs_in(directory: Path, process: str = "*") -> list[Path]:
    """The log files of processes that the pattern matches; a directory or a pipe is none."""
    return sorted(one for one in directory.glob(f"{process}.log") if one.is_file())


def last_lines(log: Path, lines: int) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        end, size, found = file.seek(0, os.SEEK_END), _TAIL_BYTES, b""
        while len(found) < end and found.count(b"\n") <= lines:
            file.seek(max(0, end - size))
            found, size = file.read(min(end, size)), 2 * size
    return found.decode(errors="replace").splitlines()[-lines:] if lines else []


class Spawner:
    """Starts processes from one thread that lives until `close`.

    The kernel sends a child its parent-death signal when the *thread* that started it ends, so a
    caller's short-lived thread must not start it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")
        self.close = self._thread.shutdown  # it also ends every process that still runs
        # Now, because `close` does not know a process if the caller was interrupted in its first
        # moment.
        self._thread.submit(int).result()

    def start(
        self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]
    ) -> Process:
        """Start `command` in its own process group; its output is appended to `log`."""
        return self._thread.submit(self._start, name, command, log, env).result()

    def _start(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> Process:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
        with log.open("ab") as output:
            child = subprocess.Popen(
                launch,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        return Process(name, child, log)


def stop_all(
    processes: Sequence[Process], grace_s: float, is_hurried: Callable[[], bool] = lambda: False
) -> None:
    """Ask all to end, wait `grace_s`, then kill the rest; immediately if `is_hurried`."""
    for process in processes:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(process.returncode is None for process in processes):
        if time.monotonic() > deadline or is_hurried():
            break
        time.sleep(_LOOK_S)
    for process in processes:
        process.clear()


def end_as_by_ctrl_c() -> None:
    """Makes SIGTERM end this process exactly like Ctrl-C, and also SIGHUP, which a closed terminal
    sends and nohup ignores."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _end_once)


def _end_once(number: int, frame: FrameType | None) -> NoReturn:
    """Acts like Ctrl-C and ignores further signals of the same kind. A shell may pass on a signal
    that it received itself, and a second one would break the orderly end."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt instead of the RuntimeError that an interruption may become.

    A signal can arrive after the wait for a `threading.Condition`, before its lock is taken again.
    The end of the `with` block then releases a lock that is free, as in grpc's channels.
    """
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__ if _FREE_LOCK in str(error) else None
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__
        if cause is None:
            raise
        raise KeyboardInterrupt from error


class LineOutput(Protocol):
    """Takes the lines of a follower."""

    def write(self, text: str, /) -> object:
        """Takes a whole line."""

    def flush(self) -> object:
        """All that is new was written."""


class LogFollower:
    """Copies new lines of the logs in a directory to `out`, until the context ends, and then also
    last lines without an end. Each line begins with its process's name or, if `as_json`, is an
    object with that name."""

    def __init__(
        self,
        directory: Path,
        out: LineOutput,
        process: str = "*",
        *,
        as_json: bool = False,
        shows: Callable[[str, str], bool] = lambda _name, _line: True,
    ) -> None:
        """shows: whether a line of a process is copied, given the process's name and the line."""
        self._directory = directory
        self._out = out
        self._process = process
        self._lead = _as_object if as_json else with_name
        self._shows = shows
        # Lines of an earlier fleet are not shown again.
        self._first = {log: log.stat().st_size for log in logs_in(directory, process)}
        self._read = self._first.copy()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def copy_new(self, *, is_last: bool = False) -> None:
        """Copy every complete line that was added since the last call; the last call also copies a
        line without an end."""
        for log in logs_in(self._directory, self._process):
            with log.open("rb") as file:
                begin = self._begin(log, file)
                file.seek(begin)
                whole, newline, rest = file.read().rpartition(b"\n")
            self._read[log] = begin + len(whole) + len(newline)
            lines = whole.decode(errors="replace").split("\n") if newline else []
            if is_last and rest:
                lines.append(rest.decode(errors="replace"))
            for line in (one for one in lines if self._shows(log.stem, one)):
                # Together with its line end, because other processes write here too.
                self._out.write(f"{self._lead(log.stem, line)}\n")
        self._out.flush()

    def _begin(self, log: Path, file: BinaryIO) -> int:
        """Where the first line that was not copied begins: at 0 if the log was emptied since."""
        begin = self._read.get(log, 0)
        if begin in (0, self._first.get(log)):  # where an earlier fleet may have left half a line
            return begin if file.seek(0, os.SEEK_END) >= begin else 0
        file.seek(begin - 1)
        return begin if file.read(1) == b"\n" else 0

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(_POLL_S)
            with contextlib.suppress(OSError):  # a full disk or no reader, but files have all lines
                self.copy_new(is_last=is_over)


def with_name(name: str, line: str) -> str:
    return f"{name:<10} | {line}"


def _as_object(name: str, line: str) -> str:
    """A JSON log line of effuse with the name of its process added; text of another program becomes
    a message."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    return json.dumps({"name": name, **(entry if isinstance(entry, dict) else {"message": line})})
