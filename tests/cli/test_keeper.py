"""When a process that has ended is started again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.keeper import Restarts, Rolling, watch_over
from effuse.cli.process import Process, Spawner


def test_a_process_is_started_again_at_once_and_then_ever_more_slowly() -> None:
    restarts = Restarts()
    now, pauses = 0.0, []
    for _ in range(9):
        pause_s = restarts.ended("decode-0", now)
        assert pause_s is not None
        assert restarts.ended("decode-0", now) is None  # it is waited for already
        pauses.append(pause_s)
        if pause_s:
            assert restarts.due(now + 0.99 * pause_s) == []
        now += pause_s
        assert restarts.due(now) == ["decode-0"]
        assert restarts.due(now) == []
        restarts.back("decode-0", now)
        now += 1.0
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_process_that_was_well_for_a_minute_has_a_fresh_start() -> None:
    restarts = Restarts()
    for at in (0.0, 10.0, 20.0):
        restarts.ended("router", at)
        restarts.due(at + 5.0)
    restarts.back("router", 25.0)
    assert restarts.ended("router", 86.0) == 0


def test_a_process_that_was_well_long_ago_and_dies_in_its_start_has_no_fresh_start() -> None:
    restarts = Restarts()
    restarts.ended("decode-0", 0.0)
    restarts.due(0.0)
    restarts.back("decode-0", 5.0)
    now, pauses = 3600.0, []
    for _ in range(5):
        pause_s = restarts.ended("decode-0", now)
        assert pause_s is not None
        pauses.append(pause_s)
        assert restarts.due(now + pause_s) == ["decode-0"]
        now += pause_s + 5.0
    assert pauses == [0, 1, 2, 4, 8]


def test_each_process_is_judged_by_itself() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.ended("decode-0", 0.0)
        restarts.due(100.0)
    assert restarts.ended("decode-1", 0.0) == 0
    assert restarts.due(0.0) == ["decode-1"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """One process, which reports that it is ready and ends the first time."""
    fleet = Fleet(FleetConfig(log_dir=tmp_path / "logs"))
    ready = fleet.home.ready_file("decode-0")
    code = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[2]).exists() or sys.exit(1);"
        ' new = pathlib.Path(sys.argv[1] + ".new"); new.write_text(\'{"address": "a:1"}\');'
        " new.rename(sys.argv[1]); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(ready), str(tmp_path / "again")]
    fleet._commands["decode-0"] = command
    fleet._spawn("decode-0")
    assert fleet.processes["decode-0"].wait(20) == 1
    (tmp_path / "again").touch()
    yield fleet
    fleet.stop(lambda: True)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Why processes cannot be started, each for one time."""
    start, refusals = Spawner.start, list[OSError]()

    def start_with_luck(*given: object, **named: object) -> object:
        if refusals:
            raise refusals.pop()
        return start(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Spawner, "start", start_with_luck)
    return refusals


def watch_until(told: str, fleet: Fleet, rolling: Rolling, log: pytest.LogCaptureFixture) -> None:
    """Watches over the fleet until the log has that text."""

    class Clock:
        monotonic = staticmethod(time.monotonic)

        def sleep(self, seconds: float) -> None:
            if told in log.text:
                raise KeyboardInterrupt
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("effuse.cli.keeper.time", Clock())
        watch_over(fleet, rolling)


def no_memory() -> OSError:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_what_cannot_be_started_again_is_tried_once_more_and_the_others_go_on(
    fleet: Fleet, refusals: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    """For example for lack of memory; and a removed directory of logs is made again."""
    caplog.set_level("INFO")
    shutil.rmtree(fleet.log_dir)
    refusals.append(no_memory())
    watch_until("is back", fleet, Rolling(fleet), caplog)
    assert "decode-0 cannot be started: [Errno 12] Cannot allocate memory" in caplog.text


def test_what_cannot_be_replaced_at_once_is_replaced_once_it_can_be(
    fleet: Fleet, refusals: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rolling = Rolling(fleet)
    watch_until("decode-0 is back", fleet, rolling, caplog)
    before = fleet.processes["decode-0"]
    refusals += [no_memory(), no_memory()]
    rolling.ask()
    watch_until("all workers were replaced", fleet, rolling, caplog)
    assert fleet.processes["decode-0"] is not before and before.returncode == -signal.SIGTERM
    assert caplog.text.count("decode-0 cannot be started yet: [Errno 12] Cannot allocate") == 1


@pytest.mark.parametrize("has_room", [True, False])
def test_a_worker_ends_before_its_successor_begins_only_where_both_have_no_room(
    has_room: bool,
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    rolling = Rolling(fleet)
    watch_until("decode-0 is back", fleet, rolling, caplog)
    before, start, were_there = fleet.processes["decode-0"], Spawner.start, list[bool]()
    ready = fleet.home.ready_file("decode-0")

    def start_and_look(*given: object, **named: object) -> object:
        were_there.append(before.returncode is None)
        if has_room:  # the old worker has a new engine
            ready.write_text('{"address": "a:1"}')
        return start(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Spawner, "start", start_and_look)
    monkeypatch.setattr("effuse.cli.fleet.has_room_beside", lambda *_: has_room)
    rolling.ask()
    watch_until("all workers were replaced", fleet, rolling, caplog)
    assert were_there == [has_room]
    assert before.returncode == -signal.SIGTERM
    assert ready.exists() is not has_room, "its successor has another id, and a file of its own"


@pytest.fixture
def twins() -> Iterator[Fleet]:
    """Two processes that report that they are ready; the first must be started three times."""
    fleet = Fleet(FleetConfig())
    code = (
        "import pathlib, sys, time; tries = pathlib.Path(sys.argv[2]); tries.open('a').write('x');"
        " sys.exit(1) if len(tries.read_text()) < int(sys.argv[3]) else None;"
        ' new = pathlib.Path(sys.argv[1] + ".new"); new.write_text(\'{"address": "a:1"}\');'
        " new.rename(sys.argv[1]); time.sleep(60)"  # never half of it
    )
    for name, tries in (("prefill-0", "3"), ("decode-0", "2")):
        ready, tried = fleet.home.ready_file(name), fleet.log_dir / f"{name}.tries"
        fleet._commands[name] = [sys.executable, "-c", code, str(ready), str(tried), tries]
    yield fleet
    fleet.stop(lambda: True)


def test_processes_that_end_together_or_once_more_are_started_again(
    twins: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    class Clock:
        monotonic = staticmethod(time.monotonic)

        def sleep(self, seconds: float) -> None:
            if caplog.text.count("is back") == 2:
                raise KeyboardInterrupt
            time.sleep(0.01)

    cleared: list[Process] = []
    clear, begin_restart = Process.clear, Fleet.begin_restart

    def note_clear(process: Process) -> None:
        cleared.append(process)
        clear(process)

    def restart_what_was_cleared(self: Fleet, name: str) -> None:
        assert self.processes[name] in cleared, "its id may be another's process by now"
        begin_restart(self, name)

    monkeypatch.setattr(Process, "clear", note_clear)
    monkeypatch.setattr(Fleet, "begin_restart", restart_what_was_cleared)
    for name in twins._commands:
        twins._spawn(name)
        assert twins.processes[name].wait(20) == 1
    monkeypatch.setattr("effuse.cli.keeper.time", Clock())
    with pytest.raises(KeyboardInterrupt):
        watch_over(twins, Rolling(twins))
    assert caplog.text.count("exited with status 1") == 3
    assert caplog.text.count("it starts again in 1 s") == 1  # the process that ended twice
    assert not twins._ended
