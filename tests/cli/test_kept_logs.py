"""Logs outlive their fleets, a bounded number of them, and `effuse logs` finds the right ones."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from effuse.cli.__main__ import main
from effuse.cli.commands import FleetConfig
from effuse.cli.logs import KEPT, keep_logs, kept_logs, latest, logs_home, show


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return logs_home()


@pytest.fixture(params=["local", "NFS"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux locks a file on NFS only if it is open for reading, or exclusively for writing."""
    flock = fcntl.flock

    def flock_over_nfs(file: TextIO, operation: int) -> None:
        needed = os.O_WRONLY if operation & fcntl.LOCK_EX else os.O_RDONLY
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE not in (needed, os.O_RDWR):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    if request.param == "NFS":
        monkeypatch.setattr(fcntl, "flock", flock_over_nfs)


def _fleet(home: Path, name: str, at: float, **written: str) -> Path:
    with kept_logs(home, name, at) as kept:
        for process, text in written.items():
            (kept / f"{process.replace('_', '-')}.log").write_text(text)
    return kept


def test_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    assert logs_home() == tmp_path / ".local/state/effuse/logs"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert logs_home() == Path("/var/state/effuse/logs")


@pytest.mark.usefixtures("disk")
def test_the_oldest_go_but_for_those_in_use(home: Path) -> None:
    with kept_logs(home, "running", 0.0) as running:
        ended = [_fleet(home, f"fleet-{at}", float(at)) for at in range(1, KEPT + 4)]
        assert running.is_dir()
        # The last one was made when KEPT others had ended.
        assert [one.is_dir() for one in ended] == [False] * 2 + [True] * (KEPT + 1)
    _fleet(home, "last", 100.0)
    assert not running.exists()


def test_a_disk_without_locks_keeps_the_logs_of_all_fleets(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def flock(_: TextIO, operation: int) -> None:
        refused.append(operation & ~fcntl.LOCK_NB)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    kept = [_fleet(home, f"fleet-{at}", float(at)) for at in range(KEPT + 2)]
    assert all(one.is_dir() for one in kept)
    assert latest(home, None) == kept[-1]
    assert set(refused) == {fcntl.LOCK_SH, fcntl.LOCK_EX}


def test_the_last_fleet_is_found_or_one_by_name(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs"]) == 1
    assert "has no logs of a fleet" in capsys.readouterr().err
    first = _fleet(home, "first", 1.0, router="old\n")
    second = _fleet(home, "second", 2.0, router="new\n", decode_0="a\nb\nc\n")
    assert (latest(home, None), latest(home, "first"), latest(home, "none")) == (
        second,
        first,
        None,
    )
    assert main(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "decode-0   | a", "decode-0   | b", "decode-0   | c", "router     | new",
    ]  # fmt: skip
    assert main(["logs", "decode-0", "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["decode-0   | b", "decode-0   | c"]
    assert main(["logs", "--fleet", "first", "router"]) == 0
    assert capsys.readouterr().out == "router     | old\n"
    assert main(["logs", "--log-dir", str(first)]) == 0
    assert capsys.readouterr().out == "router     | old\n"


@pytest.mark.usefixtures("disk")
def test_a_fleet_that_never_began_to_write_hides_no_other(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example if its Redis does not answer, or its port is taken after all."""
    empty = _fleet(home, "failed", 2.0)
    assert main(["logs"]) == 1
    assert f"{empty} has no logs" in capsys.readouterr().err
    _fleet(home, "runs", 1.0, router="here\n")
    assert main(["logs"]) == 0
    assert capsys.readouterr().out == "router     | here\n"
    with kept_logs(home, "starts", 3.0) as waiting:  # whose Redis may still answer
        assert latest(home, None) == waiting


@pytest.mark.parametrize("name", ["prefill-7", "../router", "*"])
def test_a_process_that_was_not_there(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fleet(home, "only", 1.0, router="x\n", decode_0="y\n")
    assert main(["logs", name]) == 1
    refusal = f"has no log of {name!a}, only those of: decode-0, router"
    assert refusal in capsys.readouterr().err


def test_what_is_added_is_shown_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, out = _fleet(home, "only", 1.0, router="one\n"), io.StringIO()
    steps: list[Callable[[], object]] = [
        lambda: (where / "router.log").write_text("one\ntwo\n"),
        lambda: (where / "decode-0.log").write_text("three\n"),
        lambda: None,
    ]

    def sleep(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr("effuse.cli.logs.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        show(where, "*", 10, out, follow=True)
    assert out.getvalue().splitlines() == [
        "router     | one", "router     | two", "decode-0   | three",
    ]  # fmt: skip


def test_a_fleet_keeps_its_logs_unless_told_where(home: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        named = FleetConfig(log_dir=tmp_path / "mine")
        assert keep_logs(named, stack).log_dir == tmp_path / "mine"
        kept = keep_logs(FleetConfig(name="ours"), stack)
        assert kept.log_dir == latest(home, "ours")
        unnamed = keep_logs(FleetConfig(), stack)
        assert unnamed.name and unnamed.log_dir == latest(home, unnamed.name)


def test_a_fleet_that_logs_elsewhere_is_found_and_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = _fleet(home, "older", 1.0, router="old\n")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "router.log").write_text("new\n")
    with ExitStack() as stack:
        config = keep_logs(FleetConfig(name="ours", log_dir=Path("mine")), stack)
        assert (config.name, config.log_dir) == ("ours", Path("mine"))
    for words in ([], ["--fleet", "ours"]):
        assert main(["logs", *words]) == 0
        told = capsys.readouterr()
        assert told.out == "router     | new\n"
        assert told.err == f"effuse logs: fleet ours, in {mine}\n"
    shutil.rmtree(mine)
    assert main(["logs"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("router     | old\n", f"effuse logs: fleet older, in {older}\n")
    assert main(["logs", "--fleet", "ours"]) == 1
    assert f"{mine} has no logs" in capsys.readouterr().err


def test_what_a_fleet_logged_elsewhere_stays(home: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "router.log").write_text("x\n")
    with ExitStack() as stack:
        keep_logs(FleetConfig(name="ours", log_dir=mine), stack)
    for at in range(KEPT + 2):
        _fleet(home, f"fleet-{at}", 4e9 + at)
    assert latest(home, "ours") is None and (mine / "router.log").exists()


def test_a_directory_and_a_fleets_name_are_too_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["logs", "--log-dir", str(tmp_path), "--fleet", "ours"])
    assert ended.value.code == 2
    assert "--fleet: expected without --log-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (None, "logs are not written to files"),
        ("mine", "`effuse logs` shows this fleet only with --log-dir"),
    ],
)
def test_where_none_can_be_kept_the_fleet_starts_all_the_same(
    named: str | None,
    told: str,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "effuse").write_text("a file is in the way")
    config = FleetConfig(log_dir=tmp_path / named if named else None)
    assert keep_logs(config, ExitStack()) is config
    assert f"effuse up: {told}: " in capsys.readouterr().err


def test_a_user_without_a_home_learns_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert main(["logs"]) == 1
    assert "--log-dir names the logs' directory" in capsys.readouterr().err


def test_a_directory_among_the_logs_is_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.log").mkdir()
    (tmp_path / "router.log").write_text("a line\n")
    assert main(["logs", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "router     | a line\n"
