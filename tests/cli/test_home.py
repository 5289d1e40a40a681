"""The directory of a fleet: what one that was killed has left goes, secrets above all."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from effuse.cli.home import Home

KILLED = """
import os, signal
from effuse.cli.home import Home
Home(()).make_secret()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(room: Path) -> Path:
    """What a fleet leaves whose process was killed."""
    before = set(room.iterdir())
    command = [sys.executable, "-P", "-c", KILLED]
    assert subprocess.run(command, env={**os.environ, "TMPDIR": str(room)}).returncode == -9
    (left,) = set(room.iterdir()) - before
    return left


def test_what_killed_fleets_left_goes_with_the_next_one(room: Path) -> None:
    left = killed(room)
    assert (left / "fleet.secret").exists()
    home = Home(())
    assert [*room.iterdir()] == [home.path]
    home.remove()
    assert not [*room.iterdir()]


def test_what_may_be_in_use_stays(room: Path) -> None:
    living = Home(())
    unseen = killed(room)  # as if its process were one that we do not see
    foreign = room / "effuse-fleet-x"
    foreign.mkdir()
    with (unseen / "in-use").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        home = Home(())
        assert {*room.iterdir()} == {living.path, unseen, foreign, home.path}
    for one in (living, home):
        one.remove()
