"""The process between an engine and Mooncake's client, with a stand-in for that client.

The stand-in keeps objects in files. It fails and stands still like the real one, which
`test_mooncake.py` uses where it is installed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import torch
from kvtransfer.pool_user import FACTS, KEYS, PoolUser

from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer import mooncake_pool
from effuse.kvtransfer.mooncake_pool import _Batches
from effuse.kvtransfer.stores import Threads, UnitFacts

STAND_IN = """
import ctypes, os
from pathlib import Path

HOME = Path(os.environ["STAND_IN"])

def obey(name):
    if (HOME / "ends").exists():
        os._exit(9)
    if (HOME / "raises").exists():
        raise RuntimeError
    if (HOME / f"{name} stands still").exists():
        ctypes.PyDLL(None).sleep(1000)  # with Python's lock
    return int((HOME / "code").read_text()) if (HOME / "code").exists() else 0

def path(name):
    return HOME / name.encode().hex()

class MooncakeDistributedStore:
    def setup(self, host, metadata, memory, buffer, protocol, devices, master):
        (HOME / "master").write_text(master)
        return obey("setup")

    def register_buffer(self, address, size):
        return 0

    def batch_is_exist(self, names):
        return [obey("call") or int(path(name).exists()) for name in names]

    def get_size(self, name):
        return obey("call") or (path(name).stat().st_size if path(name).exists() else -704)

    def remove(self, name, force):
        return obey("call") or path(name).unlink()

    def batch_put_from_multi_buffers(self, names, addresses, sizes):
        for name, *parts in zip(names, addresses, sizes):
            path(name).write_bytes(b"".join(map(ctypes.string_at, *parts)))
        return [obey("call") for _ in names]

    def batch_put_from(self, names, addresses, sizes):
        parts = [[[one] for one in both] for both in (addresses, sizes)]
        return self.batch_put_from_multi_buffers(names, *parts)

    def batch_get_into(self, names, addresses, sizes):
        if (HOME / "answers nonsense").exists():
            return []
        return [self.get(name, [at], [size]) for name, at, size in zip(names, addresses, sizes)]

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        return [self.get(*one) for one in zip(names, addresses, sizes)]

    def get(self, name, addresses, sizes):
        data = path(name).read_bytes() if path(name).exists() else None
        if data is None or len(data) > sum(sizes):
            return obey("call") or (-704 if data is None else -600)
        for address, size in zip(addresses, sizes):
            ctypes.memmove(address, data[:size], min(size, len(data)))
            data = data[size:]
        return obey("call") or sum(sizes)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(STAND_IN)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return tmp_path


@pytest.fixture
def address() -> Iterator[PoolAddress]:
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield PoolAddress(host="127.0.0.1", port=master.getsockname()[1])


@pytest.fixture
def user(home: Path, address: PoolAddress, request: pytest.FixtureRequest) -> Iterator[PoolUser]:
    made = PoolUser(replace(address, protocol=getattr(request, "param", "tcp")))
    yield made
    made.pool.close()


both_ways = pytest.mark.parametrize("user", ["tcp", "rdma"], indirect=True)


@both_ways
def test_a_unit_comes_back_as_it_was(user: PoolUser) -> None:
    """From slots in any order into others."""
    before = user.slots[[3, 4, 5, 1]]
    user.keep(KEYS[0], 3, 4, 5, 1)
    assert user.load(KEYS[0], 9, 11, 12, 15) == FACTS
    for slots in ([9, 11, 12, 15], [3, 4, 5, 1]):
        assert torch.equal(user.slots[slots], before)
    assert user.count(KEYS[0], KEYS[1]) == 1


@both_ways
def test_many_units_come_at_once(user: PoolUser) -> None:
    views = [user.host.views([at]) for at in range(6)]
    keeps = [
        user.pool.keep(key, b"", lambda: FACTS, one)
        for key, one in zip(KEYS[:6], views, strict=True)
    ]
    assert len({one.result(20) for one in keeps}) == 1
    slots = range(8, 14)
    views = [user.host.views([slot]) for slot in slots]
    loads = [user.pool.load(key, one) for key, one in zip(KEYS[:6], views, strict=True)]
    missing = user.pool.load(KEYS[7], user.host.views([15]))
    assert {load.result(20) for load in loads} == {FACTS}
    assert torch.equal(user.slots[8:14], user.slots[:6])
    assert isinstance(missing.exception(20), FileNotFoundError)


def test_calls_beyond_those_that_go_together_go_next() -> None:
    """And calls that wait together wake one thread."""
    began, goes_on = Event(), Event()
    runs: list[list[int]] = []

    def run(asked: Sequence[int]) -> list[int]:
        runs.append(list(asked))
        began.set()
        assert goes_on.wait(10)
        return [-one for one in asked]

    with contextlib.closing(Threads(1)) as threads:
        wakes = Mock(wraps=threads.submit)
        threads.submit = wakes  # type: ignore[method-assign]
        batches = _Batches(threads, run, most=3)
        results = [batches.submit(0)]
        assert began.wait(10)
        results += [batches.submit(number) for number in range(1, 8)]
        goes_on.set()
        assert [one.result(10) for one in results] == [-number for number in range(8)]
    assert runs == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert wakes.call_count == len(runs)


def test_many_searches_at_once_have_their_own_results(home: Path, user: PoolUser) -> None:
    for at in (0, 1, 3):
        user.keep(KEYS[at], at)
    texts = [KEYS[:2], KEYS[2:4], KEYS[:4], KEYS[3:4], KEYS[7:]]
    asked = [user.pool.find(dict.fromkeys(text, b"")) for text in texts]
    assert [one.result(20) for one in asked] == [2, 0, 2, 1, 0]
    (home / "code").write_text("-800")
    asked = [user.pool.find(dict.fromkeys(text, b"")) for text in texts]
    assert {type(one.exception(20)) for one in asked} == {ConnectionError}


def test_a_unit_that_is_not_there_is_no_failure_of_the_pool(user: PoolUser) -> None:
    with pytest.raises(FileNotFoundError):
        user.load(KEYS[0], 1)


@both_ways
def test_a_unit_of_another_size_is_refused(user: PoolUser) -> None:
    user.keep(KEYS[0], 1, 2)
    for slots in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"cut|expected"):
            user.load(KEYS[0], *slots)


@pytest.mark.parametrize(
    ("code", "kind"), [(-200, OSError), (-800, ConnectionError), (-901, ConnectionError)]
)
def test_codes_are_errors(home: Path, user: PoolUser, code: int, kind: type[OSError]) -> None:
    (home / "code").write_text(str(code))
    with pytest.raises(kind) as caught:
        user.keep(KEYS[0], 1)
    assert isinstance(caught.value, ConnectionError) == (kind is ConnectionError)


def test_a_client_that_stands_still_is_killed_and_replaced(
    home: Path, user: PoolUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its Python's lock, so nothing in it could end the call."""
    user.keep(KEYS[0], 1)
    assert user.pool._client is not None
    process = user.pool._client._process
    (home / "call stands still").touch()
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_pool, "_ANSWER_S", 1.0)
        with pytest.raises(ConnectionError, match=r"no answer within 1 s"):
            user.count(KEYS[0])
    assert process.poll() == -9
    (home / "call stands still").unlink()
    with pytest.raises(ConnectionError):
        user.count(KEYS[0])
    user.pool.open().result(20)
    assert user.count(KEYS[0]) == 1


def test_an_address_of_ipv6_reaches_the_client_in_brackets(home: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as master:
        port = master.getsockname()[1]
        made = PoolUser(PoolAddress.parse(f"mooncake://[::1]:{port}/team"))
        made.pool.close()
    assert (home / "master").read_text() == f"[::1]:{port}"


@pytest.mark.parametrize("fault", ["ends", "setup stands still", "no master", "no package"])
def test_a_start_that_fails_is_an_error(
    home: Path, address: PoolAddress, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no master":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = PoolAddress(host="127.0.0.1", port=unused.getsockname()[1])
    elif fault == "no package":
        (home / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: missing')")
    else:
        (home / fault).touch()
        if fault == "setup stands still":
            monkeypatch.setattr(mooncake_pool, "_ANSWER_S", 1.0)
    reason = {
        "ends": r"client process has ended",
        "setup stands still": r"no answer within 1 s",
        "no master": r"refused",
        "no package": r"libibverbs.so.1: missing",
    }[fault]
    with pytest.raises(ConnectionError, match=reason):
        PoolUser(address)


def test_an_answer_without_all_units_is_an_error_of_each(home: Path, user: PoolUser) -> None:
    """Else their slots stay with reads that never end, and the pool is never used again."""
    (home / "answers nonsense").touch()
    batch = [((key, user.host.views([0])), Future[UnitFacts]()) for key in KEYS[:2]]
    for one in batch:
        user.pool._loads.waiting.put(one)
    user.pool._loads.run_some()
    for _, result in batch:
        assert isinstance(result.exception(5), ConnectionError)


@pytest.mark.parametrize("fault", ["ends", "raises"])
def test_a_client_that_ends_is_an_error(home: Path, user: PoolUser, fault: str) -> None:
    (home / fault).touch()
    with pytest.raises(ConnectionError, match=r"client process has ended"):
        user.count(KEYS[0])


def test_an_engine_that_is_killed_leaves_no_process(home: Path, address: PoolAddress) -> None:
    """Even if its Mooncake client stands still with Python's lock."""
    code = f"""
import time
from pathlib import Path
from kvtransfer.pool_user import KEYS, PoolUser
from effuse.config.pool_address import PoolAddress
user = PoolUser(PoolAddress(host="127.0.0.1", port={address.port}))
Path({str(home / "call stands still")!r}).touch()
user.pool.find({{KEYS[0]: b""}})
print(user.pool._client._process.pid, flush=True)
time.sleep(1000)
"""
    tests = str(Path(__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tests}"}
    engine = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, env=env)
    assert engine.stdout is not None
    with engine.stdout:
        pid = int(engine.stdout.readline())
    os.kill(pid, 0)
    time.sleep(0.2)
    engine.kill()
    engine.wait(10)
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.01)


def test_a_package_that_does_not_work_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: missing')")
    monkeypatch.setattr(mooncake_pool, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"--kv-pool: the package mooncake .* libibverbs"):
        mooncake_pool.check_package()
    (home / "mooncake" / "store.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(mooncake_pool, "_IMPORT_S", 0.5)
    with pytest.raises(ValueError, match=r"--kv-pool: the package mooncake .* within 0.5 s"):
        mooncake_pool.check_package()
    monkeypatch.setattr(mooncake_pool, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--kv-pool: mooncake is needed: .*\.\[mooncake\]"):
        mooncake_pool.check_package()
