"""Directories of engines' sockets: those of killed fronts are swept, and no others."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from effuse.worker.engine_home import ANSWERS_SOCKET, SOCKET, make_home, sweep


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="e-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def gone() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(30)
    return done.pid


def left_by(pid: int, room: Path) -> Path:
    """The leftovers of a killed front: a socket's name without a listener."""
    home = room / f"effuse-engine-{pid}-abc"
    home.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home / SOCKET))
        listening.listen()
    return home


def test_what_a_killed_front_left_is_removed(room: Path) -> None:
    home, empty = left_by(gone(), room), room / f"effuse-engine-{gone()}-x"
    empty.mkdir()
    assert sweep() == 2
    assert not home.exists() and not empty.exists()


@pytest.mark.parametrize("name", [SOCKET, ANSWERS_SOCKET])
def test_what_may_be_in_use_is_kept(room: Path, name: str) -> None:
    mine = make_home()
    assert mine.parent == room and mine.stat().st_mode & 0o777 == 0o700
    others = [left_by(os.getpid(), room), room / "effuse-engine-old", room / "effuse-v_1234"]
    for other in others[1:]:
        other.mkdir()
    unseen = left_by(gone(), room)
    (unseen / SOCKET).unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(unseen / name))
        listening.listen()
        assert sweep() == 0
    assert all(home.is_dir() for home in (mine, unseen, *others))


def test_a_path_too_long_for_a_socket_is_named(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = room / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match="TMPDIR: expected a shorter path"):
        make_home()
    assert list(deep.iterdir()) == []


def test_a_file_system_without_sockets_is_named(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(OSError, match="TMPDIR: expected a directory in which sockets work, got '/"):
        make_home()
    assert list(room.iterdir()) == []
