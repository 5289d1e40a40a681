"""The line about the start of a fleet: drawn again on a terminal, printed seldom on a pipe."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from effuse.cli.process import LogFollower
from effuse.cli.screen import EVERY_S, Screen, StartProgress

HEAD = "2026-11-26 12:34:49,502 INFO    engine effuse.models.progress: "


def _screen(out: io.StringIO, clock: list[float], *, terminal: bool, width: int = 60) -> Screen:
    return Screen(out, 2, is_terminal=terminal, width=lambda: width, now=lambda: clock[0])


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([], "0 of 2 workers ready"),
        (["decode-0 listens on a:1"], "0 of 2 workers ready, decode-0 starts"),
        (["engine a-b is now loading"], "0 of 2 workers ready, decode-0 loads"),
        (
            ["weights: 3.2 of 15.6 GB after 4 s"],
            "0 of 2 workers ready, decode-0 loads weights, 3.2 of 15.6 GB",
        ),
        (
            ["weights: 3.2 of 15.6 GB after 4 s", "engine a-b is now compiling"],
            "0 of 2 workers ready, decode-0 compiles kernels",
        ),
        (
            ["engine a-b is now capturing", "graphs of steps: 3 of 12 after 2 s"],
            "0 of 2 workers ready, decode-0 captures graphs, 3 of 12",
        ),
        (["engine a-b is ready"], "1 of 2 workers ready, links warm up"),
    ],
)
def test_the_step_of_a_worker(texts: list[str], shown: str) -> None:
    progress = StartProgress(2)
    progress.take("router", "listening on a:1")
    for text in texts:
        progress.take("decode-0", text)
    assert progress.text() == shown


def test_the_worker_that_is_furthest_behind_is_shown() -> None:
    progress = StartProgress(2)
    progress.take("decode-0", "engine a-b is ready")
    progress.take("prefill-0", "engine a-b is now loading")
    assert progress.text() == "1 of 2 workers ready, prefill-0 loads"


def test_a_terminal_shows_one_line_that_is_gone_in_the_end() -> None:
    out, clock = io.StringIO(), [0.0]
    with _screen(out, clock, terminal=True, width=30) as screen:
        screen.flush()
        clock[0] = 1.2
        assert not screen.shows("decode-0", f"{HEAD}weights: 3.2 of 15.6 GB after 4 s")
        screen.flush()
        screen.flush()
        screen.write("a warning\n")
        screen.flush()
    screen.flush()
    pieces = out.getvalue().split("\r\x1b[K")
    assert pieces == [
        *("", "0 s: 0 of 2 workers ready", "1 s: 0 of 2 workers ready, de"),
        *("a warning\n", "1 s: 0 of 2 workers ready, de", ""),
    ]


def test_a_pipe_gets_a_line_seldom(tmp_path: Path) -> None:
    out, clock = io.StringIO(), [0.0]
    with _screen(out, clock, terminal=False) as screen:
        follower = LogFollower(tmp_path, screen, shows=screen.shows)
        (tmp_path / "decode-0.log").write_text(f"{HEAD}weights: 3.2 of 15.6 GB after 4 s\n")
        for clock[0] in range(int(2 * EVERY_S) + 5):
            follower.copy_new()
    assert out.getvalue().splitlines() == [
        f"effuse up: {at:.0f} s: 0 of 2 workers ready, decode-0 loads weights, 3.2 of 15.6 GB"
        for at in (EVERY_S, 2 * EVERY_S)
    ]
