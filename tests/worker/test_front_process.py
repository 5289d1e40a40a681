"""A worker's two processes from outside: signals, exit statuses, and leftovers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fronts
import psutil
import pytest
from slowness import patient
from unread import full_pipe

LAUNCH = """
import sys, fronts
from effuse.decode_worker.server import make_role
from effuse.config import flags
from effuse.worker import front
from effuse.worker.config import WorkerConfig
config = flags.parse(WorkerConfig, sys.argv[1:], prog="test", about="")
sys.exit(front.run(config, fronts.use_fake_engine(make_role())))
"""
PATHS = [str(Path(fronts.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
STARTS = re.compile(r"engine .* starts as process (\d+)\n")
HANG_S = patient(2.5)  # for which an engine may be silent, with other tests beside it


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Also before its parent has collected its exit status; it may vanish while it is checked."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextmanager
def started(
    tmp_path: Path, *others: str, launch: str = LAUNCH, ready: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A worker in a process of its own, ready, and its engine."""
    ready = ready or tmp_path / "ready.json"
    flags = ["--ready-file", str(ready), "--log-level", "error", *others]
    command = [sys.executable, "-P", "-c", launch, *flags]
    log = tmp_path / "log"
    with log.open("wb") as told, subprocess.Popen(command, env=ENVIRONMENT, stderr=told) as process:
        try:
            until(lambda: ready.exists() or process.poll() is not None)
            (engine,) = psutil.Process(process.pid).children()
            yield process, engine
        finally:
            process.kill()
            sys.stderr.write(log.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_with_status_0_and_no_engine_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path) as (process, engine):
        process.send_signal(number)
        assert process.wait(patient(30)) == 0
        assert not engine.is_running()


def test_a_signal_while_the_engine_still_starts_ends_both(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", LAUNCH, "--served-model-name", "slow"]
    log = tmp_path / "log"
    with (
        log.open("wb") as told,
        subprocess.Popen(command, env=ENVIRONMENT, stderr=told) as process,
    ):
        # Not by its children: a library may run a command while it is imported.
        until(lambda: STARTS.search(log.read_text()) is not None)
        (number,) = STARTS.findall(log.read_text())
        engine = psutil.Process(int(number))
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(30)) == 0
        assert not engine.is_running()


def test_a_checkpoint_that_is_not_served_is_refused_in_a_line_and_starts_no_engine(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rnd1", "architectures": ["RND1LM"]}')
    command = [sys.executable, "-P", "-c", LAUNCH, "--model", str(tmp_path)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=30)
    (line,) = run.stderr.splitlines()  # the start of an engine would be another one
    assert "effuse does not serve 'rnd1' (RND1LM): it would need layers with a mixture of" in line
    assert (run.returncode, run.stdout) == (1, "")


def test_a_worker_whose_output_is_full_serves_and_ends(tmp_path: Path) -> None:
    """Its front and its engine, with a reader that stands still from before their start."""
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-P", "-c", LAUNCH, "--ready-file", str(ready)]
    with (
        full_pipe() as full,
        subprocess.Popen(
            [*command, "--log-level", "debug"], env=ENVIRONMENT, stdout=full, stderr=full
        ) as process,
    ):
        try:
            until(ready.exists)
            (engine,) = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert has_ended(engine)
        finally:
            process.kill()


def test_the_engine_leaves_the_signals_of_a_terminal_to_its_front(tmp_path: Path) -> None:
    with started(tmp_path) as (process, engine):
        status = Path(f"/proc/{engine.pid}/status").read_text()
        (ignored,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert int(ignored, 16) >> number - 1 & 1
            engine.send_signal(number)
        process.send_signal(signal.SIGINT)
        assert process.wait(patient(30)) == 0


def test_an_engine_dies_with_its_front(tmp_path: Path) -> None:
    with started(tmp_path) as (process, engine):
        process.kill()
        process.wait(patient(30))
        until(lambda: not engine.is_running())


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a socket's path has room behind it
        temporary = Path(name)
        ENVIRONMENT["TMPDIR"] = name
        try:
            with started(tmp_path) as (process, _):
                (home,) = temporary.iterdir()
                assert home.stat().st_mode & 0o777 == 0o700
                process.terminate()
                assert process.wait(patient(30)) == 0
        finally:
            del ENVIRONMENT["TMPDIR"]
        assert list(temporary.iterdir()) == []


def test_a_taken_port_is_an_error_and_not_a_share(tmp_path: Path) -> None:
    with started(tmp_path):
        port = json.loads((tmp_path / "ready.json").read_text())["address"].rpartition(":")[2]
        second = subprocess.run(
            [sys.executable, "-P", "-c", LAUNCH, "--port", port],
            env=ENVIRONMENT,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert second.returncode == 1
    assert b"cannot listen" in second.stderr
    assert b"Traceback" not in second.stderr


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_front_imports_no_torch(role: str) -> None:
    code = (
        f"import contextlib, sys, effuse.{role}_worker.__main__ as front\n"
        "sys.argv = ['front', '--help']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    front.main()\n"
        "heavy = {'torch', 'numpy', 'triton', 'transformers', 'nixl'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_an_engine_imports_no_grpc() -> None:
    code = (
        "import sys, effuse.decode_worker.build, effuse.prefill_worker.build\n"
        "assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("role", "flags", "told"),
    [
        ("decode", ["--page-size", "none"], b"expected a whole number, got 'none'"),
        ("prefill", ["--pages", "3"], b"unrecognized arguments: --pages 3"),
        ("decode", ["--connector", "tcp"], b"invalid choice: 'tcp'"),
        ("prefill", ["--device", "cuda"], b"--device cuda: no GPU was found on this machine (CUD"),
        ("decode", ["--device", "cuda"], b"--device cuda: no GPU was found on this machine (CUD"),
        ("decode", ["--device", "cuda:7"], b"invalid choice: 'cuda:7'"),
        ("prefill", ["--gpu-memory-utilization", "2"], b"expected a share in (0, 1], got 2"),
        ("decode", ["--model", "/nowhere"], b"--model: expected a directory, got '/nowhere'"),
    ],
)
def test_wrong_flags_are_told_with_the_accepted_form(
    role: str, flags: list[str], told: bytes
) -> None:
    command = [sys.executable, "-P", "-m", f"effuse.{role}_worker", *flags]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, timeout=60, check=False, env=env)
    assert run.returncode == 2
    assert told in run.stderr


def test_a_front_that_stood_still_does_not_take_its_engine_for_hung(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with started(tmp_path, "--hang-timeout-s", str(HANG_S)) as (process, engine):
        before = json.loads(ready.read_text())
        front = psutil.Process(process.pid)
        front.suspend()
        until(lambda: front.status() == psutil.STATUS_STOPPED)
        time.sleep(2 * HANG_S)  # twice as long as an engine may be silent
        front.resume()
        time.sleep(2 * HANG_S)  # long enough to find out an engine that is silent from now on
        assert not has_ended(engine)
        assert json.loads(ready.read_text()) == before


def test_a_stopped_engine_is_noticed_killed_and_replaced(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with started(tmp_path) as (process, engine):
        before = json.loads(ready.read_text())["incarnation"]
        engine.suspend()
        until(lambda: engine.status() == psutil.STATUS_STOPPED)
        until(lambda: not engine.is_running())
        until(lambda: before not in ready.read_text())
        (lost,) = [line for line in (tmp_path / "log").read_text().splitlines() if "lost" in line]
        assert f"engine {before} is lost: the engine hangs: its loop has not run" in lost
        (successor,) = psutil.Process(process.pid).children()
        assert successor.pid != engine.pid


def test_a_directory_that_takes_no_ready_file_any_more_is_no_end_of_a_worker(
    tmp_path: Path,
) -> None:
    """Like one on a disk full of logs, once an engine is replaced."""
    ready = tmp_path / "told" / "ready.json"
    ready.parent.mkdir()
    with started(tmp_path, "--log-level", "info", ready=ready) as (process, engine):
        ready.unlink()
        ready.parent.rmdir()
        engine.kill()
        log = tmp_path / "log"
        until(lambda: log.read_text().count(" is ready") == 2 or process.poll() is not None)
        until(lambda: "could not be written: " in log.read_text() or process.poll() is not None)
        process.terminate()
        assert process.wait(patient(30)) == 0


def test_an_engine_that_cannot_be_killed_ends_the_worker_with_a_line(tmp_path: Path) -> None:
    """Like one that its kernel holds in a device's driver; here no parent waits for its end."""
    impatient = "import effuse.worker.supervisor as one\none._KILL_TIMEOUT_S = 0.0\n" + LAUNCH
    with started(tmp_path, "--hang-timeout-s", str(HANG_S), launch=impatient) as (process, engine):
        engine.suspend()
        assert process.wait(patient(30)) == 1
    lost, told = (tmp_path / "log").read_text().splitlines()
    assert "the engine hangs" in lost
    assert told.endswith(f"engine process {engine.pid} survives SIGKILL")


def test_an_engine_that_hangs_after_that_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, "--hang-timeout-s", str(HANG_S)) as (process, engine):
        engine.suspend()
        front = psutil.Process(process.pid)
        front.suspend()
        time.sleep(2 * HANG_S)
        front.resume()
        until(lambda: has_ended(engine))
        until(lambda: any(child.pid != engine.pid for child in front.children()))
