"""Model-written code runs under limits, and takes nothing of the process that runs it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from effuse.cli.sandbox import CodeLimits, passes, works

QUICK = CodeLimits(cpu_s=1, wall_s=10.0, memory_bytes=256 << 20, file_bytes=1 << 16)


def test_a_sandbox_checks_itself() -> None:
    assert works()


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "import math, re, heapq\nassert math.sqrt(4) == 2",
        "print('a' * 10_000_000)",
        "open('here', 'w').write('x' * 60_000)",
        "if __name__ == '__main__': raise ValueError",
    ],
)
def test_what_passes(source: str) -> None:
    assert passes(source, QUICK)


@pytest.mark.parametrize(
    "source",
    [
        "assert False",
        "def f(:",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.abort()",
        "while True: pass",
        "x = bytearray(1 << 30)",
        "open('here', 'w').write('x' * (1 << 20))",
        "input()",
        "\ud800",
        "def f(): f()\nf()",
    ],
)
def test_what_fails(source: str) -> None:
    assert not passes(source, QUICK)


@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "subprocess.run(['true'])",
        "threading.Thread(target=print).start()",
        "os.kill(1, 0)",
        "os.setuid(0)",
    ],
)
def test_what_a_program_may_not_do(start: str) -> None:
    source = (
        f"import os, subprocess, threading\ntry:\n    {start}\nexcept Exception: pass\nelse: 1/0"
    )
    assert passes(source, QUICK)


def test_a_program_that_sleeps_is_killed(tmp_path: Path) -> None:
    before = time.monotonic()
    assert not passes("import time\ntime.sleep(60)", CodeLimits(wall_s=0.5))
    assert time.monotonic() - before < 30
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_ours(path)]
    assert not alive


def _is_ours(path: Path) -> bool:
    """A sandbox that this very process has started."""
    try:
        status = (path.parent / "status").read_text()
        is_child = f"\nPPid:\t{os.getpid()}\n" in status and "\nState:\tZ" not in status
        return is_child and b"sandbox_child" in path.read_bytes()
    except OSError:
        return False


def test_what_a_program_leaves_behind_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also directories in one another, more than Python's own removal can follow."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\n"
    assert passes(deep, QUICK)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFUSE_TOKEN", "a secret")
    with socket.socket() as listening:
        os.set_inheritable(listening.fileno(), True)
        source = f"""
import os
allowed = {{"HOME", "TMPDIR", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}}
assert "EFFUSE_TOKEN" not in os.environ, os.environ
assert set(os.environ) <= allowed, os.environ
opened = os.listdir("/proc/self/fd")
assert len(opened) == 5, opened  # the standard ones, one for the result, and the listing's own
assert not os.path.exists("/proc/self/fd/{listening.fileno()}") or {listening.fileno()} < 5
assert os.listdir(".") == []
"""
        assert passes(source, QUICK)


def test_the_environment_of_the_parent_cannot_be_read() -> None:
    source = f"""
try:
    open("/proc/{os.getpid()}/environ", "rb").read()
except OSError:
    pass
else:
    assert False
"""
    assert passes(source, QUICK) or not _has_namespaces()


def test_there_is_no_network() -> None:
    if not _has_namespaces():
        return  # the kernel permits none here
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        address = server.getsockname()
        source = f"import socket\ntry: socket.create_connection({address}, 2)\nexcept OSError: pass"
        assert passes(source, QUICK)
        with pytest.raises(BlockingIOError):
            server.accept()


def _has_namespaces() -> bool:
    return passes("import socket\nassert len(socket.if_nameindex()) == 1", QUICK)
