"""`effuse top`: its drawing of a fleet, once and again, at several widths, and its end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import pytest
from cli.looked_at import REQUEST, WORKER, router
from eventually import is_readable
from rich.console import Console

from effuse.cli import status
from effuse.cli.__main__ import main
from effuse.cli.status import Look, cells, looks
from effuse.cli.top import TokenPace, blocks_line, draw
from effuse.v1 import model_pb2, monitor_pb2


def test_it_draws_once_where_nobody_sits(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as target:
        assert main(["top", "--target", target]) == 0
    told = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert rows["prefill-0"][:3] == ["prefill-0", "to", "decode-0:"]
    assert "1 running, 0 waiting" in told
    assert rows[REQUEST.name][1:] == [
        *("decoding", "prefill-0", ">", "decode-0", "1", "1.2", "s", "8", "of", "64"),
        *("■■", "█░░█"),
    ]


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--target", "127.0.0.1:1"]) == 1
    assert "effuse top: UNAVAILABLE" in capsys.readouterr().err


def test_an_interval_that_no_router_takes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--interval", "100"])
    assert "expected a number in [0.05, 60], got 100" in capsys.readouterr().err


def test_looks_go_on_when_the_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_AGAIN_S", 0.0)
    with router() as target:
        seen = list(islice(looks(target, 0.05), 5))
    assert all(isinstance(one, Look) and list(one.workers) == [WORKER] for one in seen)
    shown = [
        [cells(b) for r in one.requests.requests for b in r.blocks] for one in seen if one.requests
    ]
    assert shown == [["█░░█"], ["█░██"], ["████"], [], ["█░░█"]]


def test_the_tail_of_a_prompt_is_no_part_of_an_answers_first_block() -> None:
    block = monitor_pb2.RunningBlock(token_offset=-1, num_tokens=4, masks=b"\x0c")
    assert cells(block) == "█░░"
    request = monitor_pb2.RunningRequest(num_tokens=0, block_size=4, blocks=[block])
    assert blocks_line(request) == "█░░"


def _busy() -> Look:
    """A fleet with long names, numbers and blocks."""
    decode = model_pb2.Worker()
    decode.CopyFrom(WORKER)
    decode.worker_id, decode.role = "decode-10", model_pb2.WORKER_ROLE_DECODE
    decode.model, decode.quarantined_pages, decode.steps = "a-long-name" * 3, 12, 10**7
    request = monitor_pb2.RunningRequest()
    request.CopyFrom(REQUEST)
    request.name, request.num_tokens, request.max_tokens = "c" * 100, 4000, 4096
    request.blocks.add(num_tokens=64, masks=b"\xff" * 8)
    requests = [REQUEST, request]
    running = monitor_pb2.WatchRequestsResponse(num_running=200, requests=requests)
    return Look(workers=[WORKER, decode], requests=running)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as drawn:
        console.print(draw(_busy(), width, 1234.5))
    lines = drawn.get().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "200 running, 0 waiting, 1,234 tokens/s"
    text = "\n".join(lines)
    assert re.search(r"^decode-10 .* ready .* 0 of 8 ", text, re.MULTILINE)
    assert "60 of 64, 12 in quarantine" in text
    assert re.search(
        r"^5ebe2294ecd0 .* 8 of 64 +\u25a0\u25a0 \u2588\u2591\u2591\u2588", text, re.MULTILINE
    )
    assert re.search(r"^c{23}\u2026 .* 4000 of 4096 +1000\u25a0 \u2588", text, re.MULTILINE)
    assert ("prefill-0 > decode-0" in text) == (width == 120)
    assert len(lines) == 12, "nothing is wrapped"


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = TokenPace()
    for at in range(11):
        if at < 2:
            assert pace.tokens_per_s is None
        count = 1000 * min(at, 5)
        pace.add(float(at), monitor_pb2.WatchRequestsResponse(router="a", num_tokens=count))
        if 1 <= at <= 5:
            assert pace.tokens_per_s == 1000
    assert pace.tokens_per_s == 0
    pace.add(11.0, monitor_pb2.WatchRequestsResponse(router="b", num_tokens=7))
    assert pace.tokens_per_s is None, "another router's count"
    pace.add(11.0, monitor_pb2.WatchRequestsResponse(router="b", num_tokens=9))
    assert pace.tokens_per_s is None, "no time has passed"


@contextmanager
def _at_a_terminal() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, drawing, and the other end of its terminal."""
    ours, theirs = pty.openpty()
    with router() as target:
        command = [sys.executable, "-P", "-m", "effuse.cli", "top", "--target", target]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        try:
            drawn, deadline = b"", time.monotonic() + 60
            while b"q or Ctrl-C ends" not in drawn or b"tokens/s" not in drawn:
                assert time.monotonic() < deadline, drawn
                if is_readable(ours, 0.1):
                    drawn += os.read(ours, 65536)
            yield child, ours
        finally:
            child.kill()
            child.wait(10)
            os.close(ours)
            os.close(theirs)


@pytest.mark.parametrize(
    ("end", "status"), [(b"q", 0), (b"xQ", 0), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_it_shows_how_it_ends_and_leaves_the_terminal_as_it_was(
    end: bytes | signal.Signals, status: int
) -> None:
    with _at_a_terminal() as (child, ours):
        if isinstance(end, bytes):
            os.write(ours, end)
        else:
            child.send_signal(end)
        left, deadline = b"", time.monotonic() + 30
        while child.poll() is None:
            assert time.monotonic() < deadline
            if is_readable(ours, 0.1):
                with suppress(OSError):
                    left += os.read(ours, 65536)
        assert child.returncode == status, left
        assert termios.tcgetattr(ours)[3] & termios.ECHO, "typed characters are seen again"


@pytest.mark.parametrize(("end", "status"), [(b"q", 0), (signal.SIGTERM, 130)])
def test_it_ends_at_a_terminal_that_is_paused(end: bytes | signal.Signals, status: int) -> None:
    """By Ctrl-S: its remaining output would wait for Ctrl-Q for ever."""
    with _at_a_terminal() as (child, ours):
        os.write(ours, b"\x13")
        while is_readable(ours, 1.0):  # it draws four times a second
            os.read(ours, 65536)
        if isinstance(end, bytes):
            os.write(ours, end)
        else:
            child.send_signal(end)
        assert child.wait(20) == status
