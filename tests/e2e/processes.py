"""Processes of a fleet, and a process and its children in the kernel."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil
from e2e.client import wait_until

from effuse.cli.fleet import Fleet


def kill(fleet: Fleet, name: str) -> None:
    """Kills one process of a fleet, like a crash, and waits for its end."""
    fleet.processes[name].send(signal.SIGKILL)
    fleet.processes[name].wait(10.0)


def restart(fleet: Fleet, name: str, within_s: float = 60.0) -> None:
    """Starts a process that has ended, and returns once it is ready."""
    fleet.begin_restart(name)
    wait_until(lambda: fleet.is_back(name), f"{name} is not back", within_s)


def tree(pid: int) -> list[psutil.Process]:
    """The process and all that it started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def open_files(pid: int) -> int:
    """File descriptors of the process and its children."""
    return sum(process.num_fds() for process in tree(pid))


def connections_to(pid: int, port: int) -> int:
    """Connections that the process and its children hold to a port of this machine."""
    ends = [end for process in tree(pid) for end in process.net_connections("tcp")]
    return sum(bool(end.raddr) and end.raddr.port == port for end in ends)


def resident_bytes(pid: int) -> int:
    """Resident memory of the process and its children, shared pages counted for each."""
    return sum(process.memory_info().rss for process in tree(pid))


def pids(pid: int) -> set[int]:
    """Ids of the process and its children."""
    return {process.pid for process in tree(pid)}


def engine_of(worker: int) -> psutil.Process:
    """The engine of a worker, whose own process is its front."""
    (engine,) = psutil.Process(worker).children()
    return engine


@contextlib.contextmanager
def standing_still(worker: int) -> Iterator[None]:
    """The worker's engine does nothing meanwhile, which it may not outlive; shorter than it takes
    to be called hung."""
    engine = engine_of(worker)
    engine.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.resume()
