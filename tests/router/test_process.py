"""The router as a process: its imports, its size, how it begins and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
import redis_server
from eventually import eventually
from loopbacks import LOOPBACKS
from router.asking import ask
from router.fake_model import byte_tokenizer
from router.fakes import FakeFleet, FakeStore, run, until
from unread import full_pipe

from effuse.placement.store import Store
from effuse.router import seats
from effuse.router.config import RouterConfig
from effuse.router.role_changes import RoleDriver
from effuse.router.steering import Steering

COMMAND = [sys.executable, "-P", "-m", "effuse.router"]

FOOTPRINT = """
import json, sys
from pathlib import Path
import effuse.router.process
from effuse.router.tokenizer import Tokenizer
heavy = {"torch", "transformers", "numpy", "triton", "nixl", "effuse.models", "effuse.worker"}
# Not ru_maxrss: that counts what the parent weighed when it forked.
(size,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
print(json.dumps({"heavy": sorted(heavy & set(sys.modules)), "rss_kib": int(size.split()[1])}))
"""


def test_the_router_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FOOTPRINT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert found["rss_kib"] < 200 * 1024


@pytest.mark.parametrize("host", LOOPBACKS)
def test_it_starts_without_redis_and_ends_on_sigterm(host: str, tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ready = tmp_path / "ready"
    flags = ["--port", "0", "--model", str(tmp_path), "--ready-file", str(ready)]
    flags += ["--redis-url", "redis://127.0.0.1:1", "--host", host, "--metrics-host", host]
    flags += ["--health-port", "0"]
    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "listening on" in line)
            told = json.loads(ready.read_text())
            assert told["address"] in line
            hosts = {told[name].rpartition(":")[0] for name in ("address", "metrics")}
            assert hosts == {"127.0.0.1" if host == "127.0.0.1" else "[::1]"}
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(30) == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


def test_a_router_whose_output_is_full_serves_and_ends(tmp_path: Path) -> None:
    """With a reader that is stopped from before its start, and counts dropped lines."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ready = tmp_path / "ready"
    flags = ["--port", "0", "--model", str(tmp_path), "--ready-file", str(ready)]
    flags += ["--redis-url", "redis://127.0.0.1:1"]
    with (
        full_pipe() as full,
        subprocess.Popen([*COMMAND, *flags], stdout=full, stderr=full) as process,
    ):
        try:
            asyncio.run(eventually(ready.exists))
            told = json.loads(ready.read_text())
            with urllib.request.urlopen(f"http://{told['metrics']}/metrics", timeout=30) as page:
                assert b"effuse_log_lines_dropped_total" in page.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--port", "x"], 2, "expected a whole number"),
        (
            ["--model", "{empty}"],
            1,
            "make it with `effuse convert-tokenizer",
        ),
    ],
)
def test_a_bad_start_is_one_line(flags: list[str], status: int, text: str, tmp_path: Path) -> None:
    flags = [flag.replace("{empty}", str(tmp_path)) for flag in flags]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--port", "--health-port", "--metrics-port"])
def test_a_port_that_is_taken_is_one_line(flag: str, tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with socket.create_server(("127.0.0.1", 0)) as taken, redis_server.running() as redis:
        port = str(taken.getsockname()[1])
        flags = ["--port", "0", "--model", str(tmp_path), "--redis-url", redis.connection_url]
        flags += [flag, port]
        done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ready_file_that_cannot_be_written_ends_it_at_its_start_alone(tmp_path: Path) -> None:
    """Later nothing waits for it, and a disk full of logs does not stop its work."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ready, partial = tmp_path / "ready", tmp_path / "ready.partial"
    with redis_server.running() as redis:
        flags = ["--port", "0", "--model", str(tmp_path), "--redis-url", redis.connection_url]
        flags += ["--ready-file", str(ready)]
        partial.mkdir()
        done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "ready.partial" in done.stderr
        assert "Traceback" not in done.stderr
        partial.rmdir()
        with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert any("listening on" in line for line in process.stderr)
                asyncio.run(eventually(lambda: _is_made(partial)))
                asyncio.run(_announce(redis.connection_url))
                assert any("could not be written: " in line for line in process.stderr)
                process.send_signal(signal.SIGTERM)
                rest = process.stderr.read()
                assert process.wait(30) == 0, rest
            finally:
                process.kill()


def _is_made(folder: Path) -> bool:
    """Makes it; False while the router writes a file of that name."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


async def _announce(url: str) -> None:
    async with Store(url, RouterConfig().fleet) as store:
        await store.announce(redis_server.RECORD, 60.0, "process-1", takes=True)


def test_one_that_shares_its_port_listens_once_it_knows_the_fleet(tmp_path: Path) -> None:
    """As soon as it listens its predecessor may end."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
        flags = ["--port", "0", "--share-port", "--model", str(tmp_path)]
        flags += ["--redis-url", f"redis://127.0.0.1:{port}"]
        process = subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True)
        nobody.accept()[0].close()  # it has asked for the first time, in vain
    with process, redis_server.running(port):
        try:
            assert process.stderr is not None
            told = []
            for line in process.stderr:
                told += [
                    one for one in ("view of the fleet is current", "listening on") if one in line
                ]
                if "listening on" in told:
                    break
            assert told == ["view of the fleet is current", "listening on"]
        finally:
            process.kill()


def test_a_ready_file_that_cannot_be_written_any_more_ends_no_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is full, when the number of workers changes."""
    ready = tmp_path / "ready"

    async def body(fleet: FakeFleet) -> None:
        ready.with_name("ready.partial").mkdir()
        last = fleet.decode[1]
        last.record = msgspec.structs.replace(last.record, state="draining")
        await fleet.announce()
        await until(lambda: f"{ready} could not be written: " in caplog.text)
        assert (await ask(fleet)).text == "the answer is three"
        ready.with_name("ready.partial").rmdir()
        await until(lambda: json.loads(ready.read_text())["decode"] == "1")
        assert caplog.text.count("could not be written") == 1

    run(body, num_decode=2, ready_file=ready)


def test_a_router_that_has_ended_is_not_announced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would count it as alive as long as its lease holds, and its leftovers as running."""
    stores = []
    release = FakeStore.release_router

    async def release_slowly(store: FakeStore, router_id: str) -> None:
        await release(store, router_id)
        for _ in range(100):
            await asyncio.sleep(0)

    async def body(fleet: FakeFleet) -> None:
        stores.append(fleet.store)

    monkeypatch.setattr(seats, "ALONE_S", 0.0)
    monkeypatch.setattr(FakeStore, "release_router", release_slowly)
    run(body)
    assert not stores[0].routers


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Steering, "could not plan roles; trying again"),
        (RoleDriver, "could not carry out the plan of roles; trying again"),
    ],
    ids=["made", "carried out"],
)
def test_a_fault_in_a_plan_ends_no_request(
    part: type, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError("planted")

    async def body(fleet: FakeFleet) -> None:
        await until(lambda: text in caplog.text)
        assert (await ask(fleet)).text == "the answer is three"

    monkeypatch.setattr(part, "look" if part is Steering else "step", fault)
    run(body)
