"""`effuse up` as a user runs it: ready, replaced, a crash survived, gone without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import grpc
import psutil
import pytest
import redis
import redis_server
from certificates import Authority
from checkpoints import write_tiny_checkpoint
from eventually import eventually, is_readable
from slowness import patient

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.logs import main as logs
from effuse.cli.ports import free_port

DEADLINE_S = patient(90)
OF_LOAD = "this process was stopped for|Timeout reading from"  # warnings of a busy machine
GREETING = (
    "(model|workers|gRPC|HTTP|page|metrics|link|redis|logs|decode-.) +[^|]*$|effuse up: stopping"
)


class Up:
    """A running command and its output."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-P", "-m", "effuse.cli", "up", "--port", "0", "--prefill", "0"]
        self.child = subprocess.Popen(
            [*command, "--model", str(model), "--num-pages", "64", "--max-queue", "7", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from now on that the pattern is found in."""
        while True:
            if match := re.search(pattern, self._lines.get(timeout=DEADLINE_S)):
                return match

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.child.pid).children(recursive=True)

    def end_lines(self) -> list[str]:
        """The output of a command that has ended."""
        self._reader.join()
        assert self.child.stdout is not None
        self.child.stdout.close()
        return [self._lines.get_nowait() for _ in range(self._lines.qsize())]

    def end(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(DEADLINE_S)
        self._reader.join()
        assert self.child.stdout is not None
        self.child.stdout.close()
        return status

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._lines.put(line)
            self.said.append(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "sdar")


def running(up: Up) -> Iterator[Up]:
    """Ends it if the test has not."""
    yield up
    if up.child.poll() is None:
        up.end()


@pytest.fixture
def metrics_port() -> int:
    return free_port()


@pytest.fixture
def verbose(model: Path, metrics_port: int) -> Iterator[Up]:
    """It also shows lines of its processes, Redis and the logs."""
    yield from running(Up(model, "--metrics-port", str(metrics_port), "--verbose"))


def test_what_is_replaced_and_what_dies_is_started_again(
    verbose: Up, metrics_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that takes another's place is scraped where that was. Its metrics follow once the
    port is free, which is after it was ready."""
    up = verbose
    up.wait_for(r"^decode-0 +\| .*INFO .*listens on")
    up.wait_for(r"^model .*: algorithm block_diffusion, .* \(SDAR's generate.py\)")
    ready = up.wait_for(r"effuse is ready on 127\.0\.0\.1:(\d+)")
    page = up.wait_for(r"^page +(http://127\.0\.0\.1:\d+/)")[1]
    up.wait_for("^metrics ")
    up.wait_for("^redis +redis://127")
    up.wait_for("^logs +/")
    assert int(ready[1]) > 0
    before = _targets(page)
    assert before["router"] == f"127.0.0.1:{metrics_port}"
    processes = up.processes()
    (router,) = [one for one in processes if "effuse.router" in one.cmdline()]
    (worker,) = [one for one in processes if "effuse.decode_worker" in one.cmdline()]
    assert "--max-queue 7" in " ".join(router.cmdline())
    assert "--num-pages 64" in " ".join(worker.cmdline())
    up.child.send_signal(signal.SIGUSR1)
    up.wait_for("effuse up: decode-0 was replaced")
    up.wait_for("effuse up: router was replaced")
    assert not psutil.wait_procs([router, worker], timeout=DEADLINE_S)[1]
    asyncio.run(eventually(lambda: _targets(page).get("router") == before["router"]))
    assert _targets(page).keys() == before.keys()
    processes += up.processes()
    (router,) = [one for one in up.processes() if "effuse.router" in one.cmdline()]
    (worker,) = [one for one in up.processes() if "effuse.decode_worker" in one.cmdline()]
    worker.kill()
    up.wait_for(r"effuse up: decode-0 \(pid \d+\) was ended by SIGKILL")
    up.wait_for("effuse up: decode-0 is back")
    (worker,) = [one for one in up.processes() if "effuse.decode_worker" in one.cmdline()]
    router.kill()
    up.wait_for("effuse up: router is back")
    with grpc.insecure_channel(f"127.0.0.1:{ready[1]}") as channel:  # at its previous address
        grpc.channel_ready_future(channel).result(DEADLINE_S)
    assert worker.is_running()
    processes += up.processes()
    assert up.end() == 0
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
    assert logs(["decode-0", "--lines", "100000"]) == 0
    kept = capsys.readouterr().out
    assert kept.count("weights: all ") == 3  # once in each life


def _targets(page: str) -> dict[str, str]:
    """Where Prometheus finds the targets to scrape."""
    with urllib.request.urlopen(f"{page}targets.json", timeout=DEADLINE_S) as answer:
        told = json.load(answer)
    return {one["labels"]["process"]: one["targets"][0] for one in told}


def test_every_gpu_of_the_machine_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """According to the driver's command, which lists two here; workers find none and go on."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: One'\necho 'GPU 1: Two'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    up = Up(model, "--decode", "2", "--log-format", "json")
    try:
        up.wait_for(r'^{"name": "decode-0", "message": "decode-0 starts on GPU 0"}$')
        up.wait_for("^workers +decode GPU 0, GPU 1")
        workers = [one for one in up.processes() if "effuse.decode_worker" in one.cmdline()]
        seen = [one.environ()["CUDA_VISIBLE_DEVICES"] for one in workers]
        assert sorted(seen) == ["0", "1"]
        workers[0].kill()
        ended = json.loads(up.wait_for("was ended by SIGKILL").string)
        assert (ended["process"], ended["level"]) == ("up", "warning")
    finally:
        assert up.end() == 0
    logged = [line for line in up.said if not re.match(GREETING, line)]
    told = {json.loads(line).get("process") for line in logged}
    assert told >= {"up", "router", "decode"}  # an engine may have no output


def test_certificates_that_are_exchanged_are_refused_in_a_line(tmp_path: Path, model: Path) -> None:
    """Before any process is started."""
    files = Authority.make(tmp_path / "ca").sign("router")
    up = Up(model, "--tls-cert", str(files.key), "--tls-key", str(files.cert))
    assert up.child.wait(DEADLINE_S) == 2
    (line,) = up.end_lines()
    assert "router.key: expected a PEM certificate, found a private key" in line


def test_keys_with_a_bad_line_are_refused_in_a_line(tmp_path: Path, model: Path) -> None:
    """Before any process is started."""
    (tmp_path / "keys").write_text("a tenant\n")
    up = Up(model, "--keys", str(tmp_path / "keys"))
    assert up.child.wait(DEADLINE_S) == 2
    (line,) = up.end_lines()
    assert line.startswith(f"effuse up: --keys: {tmp_path}/keys: line 1: expected `tenant sha256 ")


def test_a_redis_that_wants_a_password_is_one_line(model: Path) -> None:
    with redis_server.running() as server, redis.Redis(port=server.port) as admin:
        admin.config_set("requirepass", "p:w")
        up = Up(model, "--redis-url", f"redis://127.0.0.1:{server.port}")
        assert up.child.wait(DEADLINE_S) == 1
    (line,) = up.end_lines()
    assert "Redis needs a password: --redis-credentials names a file" in line


def test_what_is_not_served_is_refused_in_a_line(tmp_path: Path) -> None:
    """Before any process is started, and without the weights, which are not there."""
    named = {"model_type": "rnd1", "architectures": ["RND1LM"]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    up = Up(tmp_path)
    assert up.child.wait(DEADLINE_S) == 2
    (line,) = up.end_lines()
    assert line.startswith("effuse up: ") and "effuse does not serve 'rnd1' (RND1LM)" in line


def test_a_limit_in_which_the_model_does_not_fit_starts_nothing(model: Path) -> None:
    up = Up(model, "--max-num-batched-tokens", "1")
    assert up.child.wait(DEADLINE_S) == 2
    (line,) = up.end_lines()
    assert line.startswith("effuse up: --max-num-batched-tokens: expected at least ")


def test_a_worker_that_cannot_start_ends_the_fleet_with_its_reason(tmp_path: Path) -> None:
    broken = write_tiny_checkpoint(tmp_path / "model", "sdar")
    (broken / "model.safetensors").unlink()
    fleet = Fleet(FleetConfig(prefill=0, model=broken))
    with pytest.raises(FleetError, match=r"decode-0 .*exited with status 1") as failed:
        fleet.start()
    assert "safetensors" in str(failed.value)
    assert not fleet.processes
    assert not fleet.log_dir.exists()


@pytest.mark.parametrize(
    ("logs", "number"), [("read", signal.SIGINT), ("unread", signal.SIGHUP)], ids=str
)
def test_it_ends_in_order_though_nobody_reads_any_more(
    logs: str, number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    """As in `effuse up | tee log`, whose reader Ctrl-C also ends, or with a closed terminal."""
    command = [sys.executable, "-P", "-m", "effuse.cli", "up", "--port", "0", "--prefill", "0"]
    read, write = os.pipe()
    child = subprocess.Popen(
        [*command, "--model", str(model), "--num-pages", "64"],
        stdout=write,
        stderr=write if logs == "unread" else None,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    os.close(write)
    with os.fdopen(read) as said:
        assert any("effuse is ready on" in line for line in iter(said.readline, ""))
    processes = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(number)
    assert child.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
    assert not list(tmp_path.iterdir()), "its secrets are gone"


@pytest.mark.parametrize("logs", ["shown", "quiet"])
def test_it_ends_in_order_though_its_output_is_full(logs: str, model: Path, tmp_path: Path) -> None:
    """As under a parent that never reads, and with a paused terminal."""
    command = [sys.executable, "-P", "-m", "effuse.cli", "up", "--port", "0", "--prefill", "0"]
    flags = ["--quiet"] if logs == "quiet" else []
    read, write = os.pipe()
    child = subprocess.Popen(
        [*command, "--model", str(model), "--num-pages", "64", "--log-dir", str(tmp_path), *flags],
        stdout=write,
        stderr=write,
    )
    said = b""
    while b"effuse is ready on" not in said:
        said += os.read(read, 1 << 16)
    # Opened once more: the command shares the state of `write`.
    own = os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(own, b"x" * 512)
    with (tmp_path / "router.log").open("a") as log:  # more than the queue takes
        log.writelines(f"{number} {'y' * 1000}\n" for number in range(3000))
    processes = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGTERM)
    assert child.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
    for one in (read, write, own):
        os.close(one)


def test_a_good_start_is_eight_rows_of_a_terminal(model: Path) -> None:
    """Of a narrow one, in which lines wrap, and of several workers."""
    prefill, decode, columns = 1, 1, 60
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-P", "-m", "effuse.cli", "up", "--port", "0", "--num-pages", "64"]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--model", str(model)]
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    drawn = _drawn_until("metrics", ours)
    child.send_signal(signal.SIGTERM)
    assert child.wait(DEADLINE_S) == 0
    os.close(ours)
    assert f"0 of {prefill + decode} workers ready" in drawn, "progress was shown"
    rows = [line.split("\r\x1b[K")[-1] for line in drawn.strip().split("\n")]
    rows = [row for row in rows if not re.search(OF_LOAD, row)]
    assert [row.split()[0] for row in rows if row[0] != " "] == [
        *("model", "workers", "gRPC", "HTTP", "page", "metrics"),
    ]
    assert len(rows) <= 8 and max(map(len, rows)) <= columns


def _drawn_until(word: str, terminal: int) -> str:
    """All that was written to a terminal up to the end of the line that begins with a word."""
    drawn = ""
    while not re.search(rf"^{word}.*\n", drawn, re.MULTILINE):
        assert is_readable(terminal, DEADLINE_S), drawn
        drawn += os.read(terminal, 1 << 16).decode().replace("\r\n", "\n")
    return drawn


def test_a_good_start_is_eight_lines_of_a_pipe_and_told_to_end_twice_it_does_not_wait(
    model: Path,
) -> None:
    """Of two workers, one of which cannot end in order; errors are on the same pipe."""
    up = Up(model, "--prefill", "1")
    try:
        up.wait_for("^workers +1 prefill, 1 decode on the CPU; link")
        up.wait_for("^metrics .* decode-0 ")
        processes = up.processes()
        (worker,) = [one for one in processes if "effuse.decode_worker" in one.cmdline()]
        worker.suspend()
        up.child.send_signal(signal.SIGTERM)
        up.wait_for("stopping after running requests end")
    finally:
        assert up.end() == 0
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]
    said = [line for line in up.said if not re.search(OF_LOAD, line)]
    assert 0 < next(at for at, line in enumerate(said) if "effuse up: stopping" in line) <= 8
