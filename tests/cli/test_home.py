"""The directory of a fleet: leftovers of a killed one are removed, above all secrets."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from effuse.cli.addresses import addresses
from effuse.cli.home import Home
from effuse.protos.rpc import write_ready_file

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
    """The leftovers of a fleet whose process was killed."""
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


def test_a_living_fleets_directory_is_locked_against_cleaners_of_old_files(room: Path) -> None:
    """systemd-tmpfiles leaves a directory alone if it cannot lock it."""
    home = Home(())
    directory = os.open(home.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    home.remove()
    home.remove()
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(directory)


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


def test_the_addresses_of_a_fleet_are_found_by_its_routers(room: Path) -> None:
    killed(room)
    others, home = Home(()), Home(())
    write_ready_file(others.ready_file("router"), "127.0.0.1:50052", metrics="127.0.0.1:9")
    http = "http://127.0.0.1:8000/v1"
    for number in (0, 1):
        ready = home.ready_file(f"router-{number}")
        write_ready_file(ready, "127.0.0.1:50051", metrics=f"127.0.0.1:{number + 1}", http=http)
    write_ready_file(home.ready_file("decode-0"), "127.0.0.1:50053", metrics="127.0.0.1:3")
    home.ready_file("prefill-0").write_text("half of a")
    metrics = "metrics: decode-0 127.0.0.1:3, router-0 127.0.0.1:1, router-1 127.0.0.1:2"
    http = f"HTTP: {http}"
    assert addresses("localhost:50051") == ["gRPC: localhost:50051", http, metrics]
    home.write_page("http://127.0.0.1:7/")
    for target in ("127.0.0.1:50051", "[::1]:50051"):
        page = "page: http://127.0.0.1:7/"
        assert addresses(target) == [f"gRPC: {target}", http, page, metrics]
    for elsewhere in ("127.0.0.1:50053", "10.0.0.7:50051", "router.example:50051"):
        assert addresses(elsewhere) == [f"gRPC: {elsewhere}"]
    for one in (home, others):
        one.remove()
    assert addresses("127.0.0.1:50051") == ["gRPC: 127.0.0.1:50051"]
