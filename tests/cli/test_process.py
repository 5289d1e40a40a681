"""Child processes: how they end, their leftovers, and that they never outlive their parent."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from eventually import is_readable

from effuse.cli import bench, status, top
from effuse.cli.__main__ import main
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.process import _FREE_LOCK, Process, Spawner, interruptible, stop_all

# Reports that it is ready, then ignores SIGTERM until it is killed.
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'up');"
    " time.sleep(60)"
)
UNNAMED = int(signal.SIGRTMIN) + 1  # a signal
OBEDIENT = "import os, time; os.write(1, b'up'); time.sleep(60)"


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.close()


def _python(code: str) -> Sequence[str]:
    return [sys.executable, "-c", code]


def _start(spawner: Spawner, log: Path, code: str) -> Process:
    """Start it and wait until it has reported that it is up."""
    with _is_up(log):
        return spawner.start("child", _python(code), log=log, env={})


@contextlib.contextmanager
def _is_up(log: Path) -> Iterator[None]:
    """Makes the log a pipe; on leaving, waits until the program has written to it."""
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield
        assert is_readable(reader, 20), "the child said nothing"
        assert os.read(reader, 100) == b"up"
    finally:
        os.close(reader)


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Lets this process take a GiB more and no more: else what takes all there is ends others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_output_and_status(spawner: Spawner, tmp_path: Path) -> None:
    code = "import os, sys; print('out'); print(os.environ['X'], file=sys.stderr); sys.exit(3)"
    process = spawner.start("child", _python(code), log=tmp_path / "log", env={"X": "from env"})
    assert process.wait(20) == 3
    assert process.returncode == 3
    assert process.ending() == f"child (pid {process.pid}) exited with status 3"
    assert sorted(process.tail().splitlines()) == ["  from env", "  out"]
    process.clear()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGRTMIN, "SIGRTMIN"), (UNNAMED, f"signal {UNNAMED}")]
)
def test_an_end_by_a_signal_is_told_although_it_has_no_name(
    spawner: Spawner, tmp_path: Path, number: int, name: str
) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    process = spawner.start("child", _python(code), log=tmp_path / "log", env={})
    process.wait(20)
    assert process.ending() == f"child (pid {process.pid}) was ended by {name}"
    process.clear()


def test_what_is_left_of_a_process_is_killed_once(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its id may be another's process."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *call: killed.append(call))
    process = spawner.start("child", _python("pass"), log=tmp_path / "log", env={})
    process.wait(20)
    process.clear()
    process.clear()
    assert killed == [(process.pid, signal.SIGKILL)]


def test_the_tail_of_a_log_that_no_memory_holds(spawner: Spawner, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 42)  # takes no room on the disk
    process = spawner.start("child", _python("print('last\\nwords')"), log=log, env={})
    assert process.wait(20) == 0
    with _little_memory():
        assert process.tail(1) == "  words"
    process.clear()


def test_what_not_even_a_kill_ends_keeps_nobody_else_alive(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a driver's call that does not return: such a process ends with the call, if ever."""
    stuck, other = (_start(spawner, tmp_path / name, STUBBORN) for name in "ab")
    kill = os.killpg

    def kill_others(group: int, number: int) -> None:
        if group != stuck.pid:
            kill(group, number)

    monkeypatch.setattr(os, "killpg", kill_others)
    monkeypatch.setattr("effuse.cli.process.KILLED_S", 0.1)
    stop_all([stuck, other], 0.0, lambda: True)
    assert other.wait(10) == -signal.SIGKILL
    assert stuck.returncode is None
    kill(stuck.pid, signal.SIGKILL)
    assert stuck.wait(10) == -signal.SIGKILL


def test_stop_ends_the_obedient_and_kills_the_stubborn(spawner: Spawner, tmp_path: Path) -> None:
    obedient = _start(spawner, tmp_path / "one", OBEDIENT)
    stubborn = _start(spawner, tmp_path / "two", STUBBORN)
    stop_all([obedient, stubborn], grace_s=0.5)
    assert obedient.returncode == -signal.SIGTERM
    assert stubborn.returncode == -signal.SIGKILL
    assert "was ended by SIGKILL" in stubborn.ending()


def test_a_stop_that_is_hurried_midway_waits_for_nobody(spawner: Spawner, tmp_path: Path) -> None:
    stubborn = _start(spawner, tmp_path / "log", STUBBORN)
    looks = iter([False, False, True])
    stop_all([stubborn], 600, lambda: next(looks))  # far beyond the test's own limit
    assert stubborn.returncode == -signal.SIGKILL
    assert next(looks, None) is None


def test_who_is_interrupted_as_a_process_starts_knows_the_thread_that_starts_it(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that would go on by itself behind `close`, in a directory that is gone by then."""

    def start(thread: threading.Thread) -> None:
        raise AssertionError("a thread begins here")

    monkeypatch.setattr(threading.Thread, "start", start)
    spawner.start("child", _python(OBEDIENT), log=tmp_path / "log", env={}).clear()


def test_clear_takes_grandchildren_too(spawner: Spawner, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(60)']); os.write(1, b'up'); c.wait()"
    )
    process = _start(spawner, tmp_path / "log", code)
    (grandchild,) = psutil.Process(process.pid).children()
    process.send(signal.SIGKILL)
    process.wait(20)
    process.clear()
    grandchild.wait(20)
    assert not grandchild.is_running()


def test_wait_has_a_deadline(spawner: Spawner, tmp_path: Path) -> None:
    process = _start(spawner, tmp_path / "log", OBEDIENT)
    with pytest.raises(TimeoutError, match=r"child still runs after 0\.01 s"):
        process.wait(0.01)
    stop_all([process], grace_s=10)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from effuse.cli.process import Spawner
spawner = Spawner()  # kept: its end is the child's
child = spawner.start("child", [sys.executable, "-c", {OBEDIENT!r}], log=Path("log"), env={{}})
print(child.pid, flush=True)
child.wait(60)
"""
    command = [sys.executable, "-P", "-c", code]
    with _is_up(tmp_path / "log"):
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    with parent:
        parent.kill()
        child.wait(20)
    assert not child.is_running()


def test_the_end_of_a_log_that_is_shown_anyhow_is_not_told_again(tmp_path: Path) -> None:
    child = subprocess.Popen(["false"])
    child.wait(10)
    (log := tmp_path / "log").write_text("the reason\n")
    ended = FleetError("decode-0 has ended", Process("decode-0", child, log))
    assert str(ended) == "decode-0 has ended; its log ends:\n  the reason"
    assert ended.why == "decode-0 has ended"


def interrupted_wait() -> None:
    """Waits for a condition until a signal arrives, as it does between the end of the wait and the
    moment at which the lock is taken again."""
    lock = threading.Lock()
    condition = threading.Condition(lock)
    lock.acquire()
    try:
        condition.wait(0)
        lock.release()
        raise KeyboardInterrupt
    finally:
        lock.release()


def test_an_interruption_that_breaks_a_lock_is_an_interruption() -> None:
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        interrupted_wait()
    with pytest.raises(KeyboardInterrupt), interruptible():
        interrupted_wait()
    with pytest.raises(RuntimeError, match="another"), interruptible():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("another")
    lock = threading.RLock()
    with pytest.raises(RuntimeError) as uninterrupted, interruptible():
        lock.release()
    assert _FREE_LOCK in str(uninterrupted.value)


def test_commands_whose_lock_an_interruption_broke_end_as_by_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        interrupted_wait()

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n')
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    handlers = {
        one: signal.getsignal(one)
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    pressed = threading.Event()
    pressed.set()
    monkeypatch.setattr(top, "_ended_by_q", lambda: contextlib.nullcontext(pressed))
    for owner, name in ((status, "main"), (bench.Bench, "run"), (top, "_show"), (Fleet, "start")):
        monkeypatch.setattr(owner, name, interrupted)
    try:
        assert main(["status"]) == 130
        assert main(["bench", "--dataset", str(prompts)]) == 130
        assert "stopped before the first measurement" in capsys.readouterr().err
        assert main(["top"]) == 0, "q was pressed"
        assert main(["up", "--device", "cpu"]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
