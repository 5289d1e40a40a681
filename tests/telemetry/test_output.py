"""Output without a reader: nothing waits, lines are dropped and counted, and a reader that comes
back gets whole lines in order."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from effuse.telemetry.logs import Output, _Relay

DEADLINE_S = 60
WRITES = """
import ctypes, logging, os, subprocess, sys
from effuse.telemetry import logs
logs.set_up("router", "info", sys.argv[1])
for number in range(int(sys.argv[2])):
    logging.info("line %d %s", number, "x" * 300)
    print("printed", number, "y" * 300)
    sys.stderr.write("half a line, ")
    sys.stderr.write("and the rest\\n")
    ctypes.CDLL(None).write(2, b"by C\\n", 5)
print("dropped", logs.dropped_lines(), file=open(sys.argv[3], "w"))
"""


def start(writes: int, told: Path, sink: int, form: str = "text") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", WRITES, form, str(writes), str(told)]
    return subprocess.Popen(command, stdout=sink, stderr=sink)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


@contextmanager
def paused_terminal() -> Iterator[tuple[int, int]]:
    """As by Ctrl-S."""
    shown, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    yield shown, terminal
    os.close(shown)
    os.close(terminal)


@contextmanager
def socket_pair() -> Iterator[tuple[int, int]]:
    """As systemd and Node.js give to their child processes."""
    here, there = socket.socketpair()
    yield here.fileno(), there.fileno()
    here.close()
    there.close()


@pytest.mark.parametrize("sink", [pipe, paused_terminal, socket_pair])
def test_a_process_whose_output_nobody_reads_goes_on_and_ends(
    sink: Callable[[], AbstractContextManager[tuple[int, int]]], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with sink() as (_, write):
        child = start(6000, told, write)
        assert child.wait(DEADLINE_S) == 0
        assert os.get_blocking(write), "others have the same pipe"
    assert int(told.read_text().split()[1]) > 1000


@pytest.mark.parametrize("sink", [pipe, socket_pair])
def test_with_a_reader_every_line_comes_in_order(
    sink: Callable[[], AbstractContextManager[tuple[int, int]]], tmp_path: Path
) -> None:
    """Also with a slow one, as long as the queue of the process has room."""
    with sink() as (read, write):
        child = start(400, tmp_path / "told", write)
        time.sleep(1.0)
        came = threading.Thread(target=lambda: read_all(read, lines))
        lines: list[bytes] = []
        came.start()
        assert child.wait(DEADLINE_S) == 0
        os.write(write, b"END\n")
        came.join(DEADLINE_S)
    text = b"".join(lines).decode()
    for pattern in (r"line (\d+) x{300}\n", r"printed (\d+) y{300}\n"):
        assert [int(one) for one in re.findall(pattern, text)] == list(range(400))
    assert text.count("\nhalf a line, and the rest\n") == 400
    assert (tmp_path / "told").read_text() == "dropped 0\n"


def read_all(read: int, lines: list[bytes]) -> None:
    while not b"".join(lines[-2:]).endswith(b"END\n"):
        lines.append(os.read(read, 1 << 16))


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_comes_back_is_told_once_how_many_lines_are_missing(
    form: str, tmp_path: Path
) -> None:
    program = WRITES + "sys.stdin.read(); logging.info('news')"
    command = [sys.executable, "-P", "-c", program, form, "3000", str(tmp_path / "told")]
    with pipe() as (read, write):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, stderr=write)
        until = time.monotonic() + DEADLINE_S
        while not (tmp_path / "told").exists() or not (tmp_path / "told").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        lines: list[bytes] = []
        came = threading.Thread(target=lambda: read_all(read, lines))
        came.start()
        while b"lines, because this output" not in b"".join(lines):
            assert time.monotonic() < until
            time.sleep(0.05)
        child.communicate(timeout=DEADLINE_S)
        os.write(write, b"END\n")
        came.join(DEADLINE_S)
    whole = [line for line in b"".join(lines).decode().splitlines() if line != "by C"]
    (notice,) = [line for line in whole if "lines, because this output" in line]
    dropped = int((tmp_path / "told").read_text().split()[1])
    assert f"dropped {dropped} lines, because this output was not read" in notice
    assert len(whole) - 3 + dropped == 3 * 3000  # the notice, the news and the END
    assert notice == whole[-3] and "news" in whole[-2]
    if form == "json":
        assert json.loads(notice)["level"] == "warning"


def test_last_words_of_a_process_that_is_killed_are_there() -> None:
    program = (
        "import os, signal, sys; from effuse.telemetry import logs; logs.set_up('router', 'info');"
        "print('last words'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"last words\n")


@pytest.mark.parametrize("flags", ["a", "w"])
def test_a_file_keeps_all_of_it(flags: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open(flags) as file:
        file.write("first\n")
        file.flush()
        assert start(3000, tmp_path / "told", file.fileno()).wait(DEADLINE_S) == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 4 * 3000 + (2 if flags == "a" else 1)


def test_closed_output_is_as_good_as_none(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", WRITES, "text", "10", str(tmp_path / "told")]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, (tmp_path / "told").read_text()) == (0, "dropped 0\n")


def test_what_cannot_be_written_is_counted_and_told_once_it_can_be(tmp_path: Path) -> None:
    """As on a disk that was full for a while."""
    number = os.open("/dev/full", os.O_WRONLY)
    output = Output(number, lambda lines: f"{lines} dropped")
    output.write(b"one\ntwo\n")
    output.write(b"three\n")
    assert output.dropped == 3
    file = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
    output.write(b"four\n")
    output.finish()
    assert (tmp_path / "out").read_text() == "3 dropped\nfour\n"
    os.close(file)
    os.close(number)


def test_a_relay_ends_with_its_last_descriptor() -> None:
    """Otherwise its thread would read the end again and again."""
    read, write = os.pipe()
    before = set(threading.enumerate())
    _Relay(write)
    (relay,) = set(threading.enumerate()) - before
    os.close(write)
    relay.join(DEADLINE_S)
    assert not relay.is_alive()
    os.close(read)
