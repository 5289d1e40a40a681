"""Processes that made a NIXL agent end with status 0 where the system has RDMA libraries.

The libraries are the system's, or Debian's packages, which are unpacked only for the test.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

import pytest

PACKAGES = (
    *("libibverbs1", "ibverbs-providers", "librdmacm1"),
    *("libnl-route-3-200", "libnl-3-200"),
)
MAKE_AGENT = """
from effuse.kvtransfer import nixl_agent
{before}
agent = nixl_agent.NixlAgent("short-lived")
agent.register({address}, 4096, 0, "DRAM")
{after}
print("made", flush=True)
"""
BARE = """
import effuse
from effuse.benchmarks.raw_transfer import _memory, _nixl_agent
agent = _nixl_agent("bare", _memory(4096))
print("made", flush=True)
"""
UNBOUND = "nixl_agent.bind_netlink = lambda: None"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Value of LD_LIBRARY_PATH with which UCX finds RDMA libraries; empty if the system has
    them.
    """
    if all(_loads(name) for name in ("libmlx5.so.1", "libnl-route-3.so.200")):
        return ""
    home = tmp_path_factory.mktemp("rdma")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("this system has no RDMA libraries and no apt-get to get them with")
    got = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=home, capture_output=True, text=True, timeout=120
    )
    packages = list(home.glob("*.deb"))
    if got.returncode or len(packages) < len(PACKAGES):
        pytest.skip(f"RDMA packages cannot be downloaded here: {got.stderr.strip()[-200:]}")
    for package in packages:
        subprocess.run(["dpkg", "-x", package, home / "root"], check=True, timeout=60)
    found = {str(path.parent) for path in (home / "root").rglob("lib*.so.*")}
    return ":".join(sorted(found))


def _loads(name: str) -> bool:
    code = f"import ctypes; ctypes.CDLL({name!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def _status(code: str, libraries: str) -> int:
    """The exit status of a process that did its work."""
    paths = [libraries, os.environ.get("LD_LIBRARY_PATH", "")]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.endswith("made\n"), ended.stderr
    return ended.returncode


def _made(before: str = "", after: str = "") -> str:
    memory = """
import ctypes
buffer = ctypes.create_string_buffer(4096)
"""
    address = "ctypes.addressof(buffer)"
    return memory + MAKE_AGENT.format(before=before, after=after, address=address)


@pytest.mark.rdma
@pytest.mark.parametrize("after", ["", "agent.close()", "del agent"])
def test_a_process_that_made_an_agent_ends_well(libraries: str, after: str) -> None:
    assert _status(_made(after=after), libraries) == 0


@pytest.mark.rdma
def test_so_does_one_that_uses_nixl_alone_in_a_benchmark(libraries: str) -> None:
    assert _status(BARE, libraries) == 0


@pytest.mark.rdma
def test_without_the_order_of_loading_it_would_crash(libraries: str) -> None:
    assert _status(_made(before=UNBOUND), libraries) == -signal.SIGSEGV


def test_a_system_without_the_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from effuse.kvtransfer import nixl_agent

    asked: list[str] = []

    def missing(name: str, mode: int) -> None:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nixl_agent.bind_netlink()
    assert asked == ["libnl-route-3.so.200"]
