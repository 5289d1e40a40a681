"""A program's lines are read as they come, and its hang or end only fails its waiter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operators import child

Write = Callable[[str], child.Program]
FIRST = "import json, sys, time\nprint(json.dumps({'name': sys.argv[1]}), flush=True)\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Begins a program with this text after its first line."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.ExitStack() as begun:

        def begin(text: str) -> child.Program:
            (tmp_path / "written.py").write_text(FIRST + text)
            return begun.enter_context(contextlib.closing(child.Program("written", "first")))

        yield begin


def test_a_line_is_there_while_the_program_runs(write: Write) -> None:
    program = write("time.sleep(1000)")
    assert program.line("first") == {"name": "first"}


def test_a_program_that_hangs_fails_who_waits_for_its_next_line(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = write("time.sleep(1000)")
    assert program.line("first")
    monkeypatch.setattr(child, "LINE_S", 0.05)
    with pytest.raises(AssertionError, match="written first printed nothing"):
        program.line("second")
    monkeypatch.undo()
    assert program.line("first")
    with pytest.raises(AssertionError, match="written first ended with -9"):
        program.line("third")


def test_a_program_that_fails_shows_why(write: Write) -> None:
    program = write("sys.exit('it was tired')")
    assert program.line("first")
    with pytest.raises(AssertionError, match="ended with 1:\nit was tired"):
        program.line("second")
    with pytest.raises(AssertionError, match="it was tired"):
        program.all()


def test_a_line_that_never_comes_is_missed(write: Write) -> None:
    program = write("print(json.dumps({'name': 'last'}))")
    assert [line["name"] for line in program.all()] == ["first", "last"]
    with pytest.raises(AssertionError, match="has no line second"):
        program.line("second")
