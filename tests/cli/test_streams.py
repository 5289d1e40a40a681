"""Commands in plain locales, with closed or full streams: a stand-in or one line, never a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.looked_at import router

PLAIN = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


def _run(
    words: list[str], env: dict[str, str], out: int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "effuse.cli", *words]
    return subprocess.run(
        command, env={**os.environ, **env}, stdout=out, stderr=subprocess.PIPE, timeout=60
    )


@pytest.mark.parametrize("env", PLAIN, ids=["ascii", "latin-1", "C"])
def test_what_a_terminal_cannot_show_has_a_stand_in(env: dict[str, str], tmp_path: Path) -> None:
    with router() as target:
        drawn = _run(["top", "--target", target], env)
        status = _run(["status", "--target", target], env)
    assert (drawn.returncode, drawn.stderr) == (0, b"")
    assert b"== #..#" in drawn.stdout, "final blocks, and one in flight with two masks"
    assert status.stderr == b""
    (tmp_path / "router.log").write_text("caf\u00e9 \u4e2d\n")
    logs = _run(["logs", "--log-dir", str(tmp_path)], env)
    assert (logs.returncode, logs.stderr) == (0, b"")
    assert b"caf" in logs.stdout and logs.stdout.rstrip().endswith(b"?")


@pytest.mark.parametrize("env", PLAIN, ids=["ascii", "latin-1", "C"])
@pytest.mark.parametrize("flags", [[], ["--watch"]], ids=["text", "watch"])
def test_an_answer_is_printed_whole_in_a_plain_locale(
    env: dict[str, str], flags: list[str]
) -> None:
    code = (
        "import sys; from effuse.cli import __main__ as command\n"
        "from effuse.client.answer import Gathering\n"
        "from effuse.client.streams import Stream\n"
        "from effuse.v1 import generation_pb2 as pb\n"
        "def events(self):\n"
        "    gathering = Gathering()\n"
        "    for event in (\n"
        "        pb.GenerateStreamResponse(draft=pb.BlockDraft(token_offset=0, text='a\u2591')),\n"
        "        pb.GenerateStreamResponse(commit=pb.BlockCommit(num_tokens=2, text='a\u4e2d!')),\n"
        "        pb.GenerateStreamResponse(finished=pb.Finished()),\n"
        "    ):\n"
        "        gathering.take(event)\n"
        "        yield event\n"
        "    self._answer = gathering.answer()\n"
        "Stream.events = events\n"
        "sys.exit(command.main(['generate', *sys.argv[1:], 'caf\u00e9']))"
    )
    with router() as target:
        words = [*flags, "--target", target]
        done = subprocess.run(
            [sys.executable, "-P", "-c", code.encode("ascii", "backslashreplace"), *words],
            env={**os.environ, **env}, capture_output=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"|a.\na?!\n" if flags else b"a?!\n")


@pytest.mark.parametrize("words", [["status"], ["top"], ["completion", "bash"], ["--help"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with router() as target:
            flags = ["--target", target] if words[0] in ("status", "top") else []
            done = _run([*words, *flags], {}, full)
    finally:
        os.close(full)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("effuse") and line.endswith("No space left on device")


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("generate", "<&-"),
        ("logs --log-dir /", ">&-"),
        ("top", ">&-"),
        ("generate", "2>&-"),
        ("status", "<&- >&- 2>&-"),
    ],
)
def test_a_closed_stream_is_no_trace(words: str, closed: str) -> None:
    with router() as target:
        flags = "" if words.startswith("logs") else f"--target {target}"
        line = f"{sys.executable} -P -m effuse.cli {words} {flags} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60)
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    assert done.returncode in (0, 1, 2)
