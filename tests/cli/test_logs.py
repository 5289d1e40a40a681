"""Log files shown as one stream."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path

import pytest

from effuse.cli.process import LogFollower, last_lines
from effuse.cli.screen import Severe


def test_whole_lines_are_copied_once(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, out)
    log = tmp_path / "decode-0.log"
    log.write_text("one\ntwo\nthr")
    follower.copy_new()
    assert out.getvalue().splitlines() == ["decode-0   | one", "decode-0   | two"]
    with log.open("a") as more:
        more.write("ee\n")
    follower.copy_new()
    follower.copy_new()
    assert out.getvalue().splitlines()[2:] == ["decode-0   | three"]


def test_what_was_written_before_the_end_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    with LogFollower(tmp_path, out):
        (tmp_path / "router.log").write_text("last words\n")
    assert out.getvalue() == "router     | last words\n"


def test_a_last_line_without_an_end_is_shown_with_the_last_look(tmp_path: Path) -> None:
    """For example of a process that crashed."""
    out = io.StringIO()
    with LogFollower(tmp_path, out):
        (tmp_path / "router.log").write_text("listening\nFatal error: Segmentation fault")
    assert (
        out.getvalue() == "router     | listening\nrouter     | Fatal error: Segmentation fault\n"
    )


def test_what_an_earlier_fleet_left_is_not_shown(tmp_path: Path) -> None:
    log, out = tmp_path / "router.log", io.StringIO()
    log.write_text("an error of last week\n")
    with LogFollower(tmp_path, out), log.open("a") as more:
        more.write("news\n")
    assert out.getvalue() == "router     | news\n"


def test_a_log_that_was_emptied_is_shown_from_its_begin(tmp_path: Path) -> None:
    """Like a user without room on a disk, or logrotate's copytruncate."""
    log, out = tmp_path / "router.log", io.StringIO()
    log.write_text("a long story\n")
    follower = LogFollower(tmp_path, out)
    for content in ("", "", "news\n"):
        log.write_text(content)
        follower.copy_new()
    assert out.getvalue() == "router     | news\n"


def test_a_log_that_was_emptied_and_grew_again_is_shown_in_whole_lines(tmp_path: Path) -> None:
    log, out = tmp_path / "router.log", io.StringIO()
    follower = LogFollower(tmp_path, out)
    log.write_text("one\ntwo\n")
    follower.copy_new()
    log.write_text("a longer line\nnews\n")
    follower.copy_new()
    shown = ["one", "two", "a longer line", "news"]
    assert out.getvalue() == "".join(f"router     | {line}\n" for line in shown)


@pytest.mark.parametrize("content", ["x" * 9, "half of a line, of an earlier fleet"])
def test_the_rest_of_a_line_of_an_earlier_fleet_is_no_emptied_log(
    tmp_path: Path, content: str
) -> None:
    log, out = tmp_path / "router.log", io.StringIO()
    log.write_text(content)
    follower = LogFollower(tmp_path, out)
    for news in ("the rest\n", "news\n"):
        with log.open("a") as more:
            more.write(news)
        follower.copy_new()
    assert out.getvalue() == "router     | the rest\nrouter     | news\n"


def test_only_files_are_read(tmp_path: Path) -> None:
    """A pipe would never end."""
    (tmp_path / "backup.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nothing")
    out = io.StringIO()
    follower = LogFollower(tmp_path, out)
    (tmp_path / "router.log").write_text("news\n")
    follower.copy_new()
    assert out.getvalue() == "router     | news\n"


def test_what_cannot_be_shown_is_left_out_and_the_rest_is_shown(tmp_path: Path) -> None:
    """For example if a disk was full for a moment."""
    refused = threading.Event()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if refused.is_set():
                return super().write(text)
            refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    out = Full()
    with LogFollower(tmp_path, out):
        (tmp_path / "router.log").write_text("lost\n")
        assert refused.wait(20)
        (tmp_path / "decode-0.log").write_text("news\n")
    assert out.getvalue() == "decode-0   | news\n"


def test_a_line_is_written_in_one_piece(tmp_path: Path) -> None:
    """Other processes write to the same place, and unbuffered output leaves piece by piece."""

    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    written: list[str] = []
    with LogFollower(tmp_path, Pieces()):
        (tmp_path / "router.log").write_text("one\ntwo\n")
    assert written == ["router     | one\n", "router     | two\n"]


@pytest.mark.parametrize(
    ("process", "line", "shown"),
    [
        ("redis", "1:M 26 Nov 2026 * Ready to accept connections", False),
        (
            "router",
            "2026-11-26 12:34:37,725 INFO    router effuse.router.process: listening",
            False,
        ),
        ("decode-0", "2026-11-26 12:34:49,502 INFO    decode effuse.placement.announcer: x", False),
        ("decode-0", "2026-11-26 12:34:49,459 ERROR   decode effuse.worker.supervisor: x", True),
        ("router", "2026-11-26 12:34:49,459 INFO    router effuse.router.request: x", False),
        ("router", "2026-11-26 12:34:49,459 ERROR   router effuse.router.request: x\n  y", True),
        ("decode-0", "decode-0 starts on GPU 0", False),
        ("router", "Traceback (most recent call last):", True),
    ],
)
def test_people_who_watch_see_warnings_and_what_is_worse(
    process: str, line: str, shown: bool, tmp_path: Path
) -> None:
    out = io.StringIO()
    with LogFollower(tmp_path, out, shows=Severe().shows):
        (tmp_path / f"{process}.log").write_text(f"{line}\n")
    assert out.getvalue().count(" | ") == shown * (1 + line.count("\n"))


@pytest.mark.parametrize("count", [0, 1, 250, 1000, 2000])
def test_the_last_lines_are_whole_however_long_they_are(tmp_path: Path, count: int) -> None:
    lines = [f"{number} " + "long " * 80 for number in range(1000)]
    log = tmp_path / "router.log"
    log.write_text("\n".join(lines) + "\n")
    assert last_lines(log, count) == lines[len(lines) - min(count, 1000) :]
