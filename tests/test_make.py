"""`make test` and `.ci/run` run all of their steps, and fail if any step failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLOSING_LINE = "a closing line"


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def _make_test(
    home: Path, at_once: int, chaos: int, *, first: str = ""
) -> subprocess.CompletedProcess[str]:
    """`make test` with an interpreter that runs `first` and exits with these statuses."""
    ends = f"echo '{CLOSING_LINE}'; [[ $* == *' -n '* ]] && exit {at_once}; exit {chaos}"
    _script(home / "bin" / "python", f"{first}\n{ends}")
    for stamp in (".effuse", ".dev"):
        (home / stamp).touch()
    return subprocess.run(
        ["make", "--no-print-directory", "test", f"VENV={home}"],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("at_once", "chaos"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (139, 5)])
def test_both_suites_run_and_the_status_is_of_both(
    tmp_path: Path, at_once: int, chaos: int
) -> None:
    done = _make_test(tmp_path, at_once, chaos)
    assert done.stdout.count(CLOSING_LINE) == 2, done.stdout + done.stderr
    assert (done.returncode == 0) == (at_once == chaos == 0), done.stderr
    assert ("the tests at once" in done.stderr) == bool(at_once), done.stderr
    assert ("tests/chaos" in done.stderr) == bool(chaos), done.stderr


def test_an_interrupt_ends_both(tmp_path: Path) -> None:
    done = _make_test(tmp_path, at_once=2, chaos=0, first="kill -INT $PPID")
    assert done.stdout.count(CLOSING_LINE) == 1, done.stdout + done.stderr
    assert done.returncode == 2 and "130" in done.stderr, done.stderr


def test_the_processes_of_tests_keep_what_they_compile(tmp_path: Path) -> None:
    done = _make_test(tmp_path, 0, 0, first="echo compiled ${PYTHONDONTWRITEBYTECODE-and kept}")
    assert done.stdout.count("compiled and kept") == 2, done.stdout


@pytest.mark.parametrize("fails", ["check-all", "test", "clients", ""])
def test_every_step_of_ci_runs(tmp_path: Path, fails: str) -> None:
    _script(tmp_path / "make", f'echo "asked for ${{!#}}"; [[ ${{!#}} != "{fails}" ]]')
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    asked = [line for line in done.stdout.splitlines() if line.startswith("asked for")]
    assert asked == [f"asked for {name}" for name in ("check-all", "clients", "test")]
    # A client that cannot be installed is no failure.
    assert (done.returncode == 0) == (fails in ("", "clients")), done.stderr


def test_the_longest_files_come_first(request: pytest.FixtureRequest) -> None:
    """Files of that list that are gone would leave others out of order unseen."""
    conftest = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest is not None
    missing = [name for name in conftest.LONGEST if not (ROOT / "tests" / name).is_file()]
    assert not missing and len(set(conftest.LONGEST)) == len(conftest.LONGEST)
