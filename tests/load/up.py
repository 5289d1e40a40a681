"""`effuse up` as a user starts it, as long as a context lasts, and its resources meanwhile.

The requests are elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from e2e.client import load_of
from e2e.processes import tree
from slowness import patient

from effuse.placement.access import RedisAccess
from effuse.placement.records import decode_worker
from effuse.placement.store import Store
from effuse.protos.fleet_secret import FleetSecret

MORE_DESCRIPTORS = 16  # connections that come and go
MORE_TASKS = 4  # that are ending, or look after connections
MORE_BYTES = 64 << 20  # part of the peak that allocators keep
START_S = patient(150.0)
END_S = patient(60.0)
SETTLE_S = patient(30.0)
READY = re.compile(r"gRPC +effuse is ready on (?P<address>\S+) after ")
REDIS = re.compile(r"redis +(?P<redis>redis://\S+)$")


class UpError(Exception):
    """The command did not start a fleet, or had something to complain of."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Tasks of each worker's front, descriptors and bytes of each process, by their names."""

    tasks: Mapping[str, int]
    descriptors: Mapping[str, int]
    resident: Mapping[str, int]

    def faults(self, before: Baseline) -> list[str]:
        """Growth beyond normal variation, and replaced processes."""
        if self.resident.keys() != before.resident.keys():
            return [
                f"processes are others: {sorted(self.resident.keys() ^ before.resident.keys())}"
            ]
        pairs = (
            ("tasks", self.tasks, before.tasks, MORE_TASKS),
            ("descriptors", self.descriptors, before.descriptors, MORE_DESCRIPTORS),
            ("bytes", self.resident, before.resident, MORE_BYTES),
        )
        return [
            f"{name} has {now[name]} {what}, {earlier[name]} before"
            for what, now, earlier, more in pairs
            for name in now
            if now[name] - earlier[name] > more
        ]

    def told(self, before: Baseline) -> list[str]:
        """Both, for people."""
        return [
            f"{name}: {before.descriptors[name]} descriptors, then {self.descriptors[name]}; "
            f"{before.resident[name] >> 20} MiB, then {self.resident[name] >> 20}"
            for name in self.resident
            if name in before.resident
        ] + [f"{name}: {before.tasks[name]} tasks, then {self.tasks[name]}" for name in self.tasks]


@dataclass(frozen=True, slots=True)
class Up:
    """A running `effuse up`."""

    greeting: str
    address: str  # host:port of its router
    redis_url: str
    fleet: str
    pid: int
    secret: FleetSecret  # that its workers answer to
    redis_access: RedisAccess

    def held(self) -> list[str]:
        """Resources of its workers after some time to release them; empty if all is right."""
        addresses = asyncio.run(self._workers())
        deadline = time.monotonic() + SETTLE_S
        while (left := _held_by(addresses, self.secret)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def baseline(self) -> Baseline:
        """Current resources of each of its processes, idle if all is right."""
        addresses = asyncio.run(self._workers())
        processes = {_name_of(one): one for one in tree(self.pid)}
        return Baseline(
            tasks={at: load_of(addresses[at], self.secret).tasks for at in sorted(addresses)},
            descriptors={name: one.num_fds() for name, one in processes.items()},
            resident={name: one.memory_info().rss for name, one in processes.items()},
        )

    async def _workers(self) -> dict[str, str]:
        """Addresses of its workers by their names."""
        access = self.redis_access
        async with Store(self.redis_url, self.fleet, access=access, timeout_s=30.0) as store:
            records = [decode_worker(value) for value, _ in await store.workers()]
        return {record.worker_id: record.address for record in records}


@contextmanager
def running(
    flags: Sequence[str], *, complains: bool = False, environment: Mapping[str, str] | None = None
) -> Generator[Up, None, None]:
    """`effuse up` with `flags` on a free port, in a separate fleet, and with additional variables.
    It is ended on leaving.

    Raises UpError with its output if it does not start, ends badly or, unless it `complains` with
    reason, complains.
    """
    fleet = f"load-{secrets.token_hex(4)}"
    command = [str(Path(sys.executable).with_name("effuse")), "up", "--port", "0"]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile("w+") as said:
        secret = Path(home) / "secret"
        FleetSecret.make(secret)
        command += ["--quiet", "--verbose", "--fleet", fleet, "--fleet-secret", str(secret), *flags]
        with subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as child:
            ready, at = _found(child, READY), _found(child, REDIS)
            try:
                if ready and at:
                    yield Up(
                        ready.string, ready["address"], at["redis"], fleet, child.pid,
                        *_known_by(secret),
                    )  # fmt: skip
            finally:
                child.send_signal(signal.SIGTERM)
                status = child.wait(END_S)
        said.seek(0)
        complaint = said.read().strip()
        if not (ready and at) or status or (complaint and not complains):
            raise UpError(f"effuse up ended with status {status} and printed: {complaint}")


def _known_by(path: Path) -> tuple[FleetSecret, RedisAccess]:
    """The secret in a file, and the credentials of the fleet's Redis for its owner."""
    secret, credentials = FleetSecret.read(path), path.with_name("redis")
    credentials.write_text(f"effuse:{secret.derive('redis').hex()}")
    return secret, RedisAccess(credentials=credentials)


def _found(child: subprocess.Popen[str], pattern: re.Pattern[str]) -> re.Match[str] | None:
    """The next line of the command that the pattern matches; None if it ends before."""
    assert child.stdout is not None
    alarm = threading.Timer(START_S, child.kill)
    alarm.start()
    try:
        # Not by iteration, which would read ahead.
        lines = (line.strip() for line in iter(child.stdout.readline, ""))
        return next(filter(None, map(pattern.match, lines)), None)
    finally:
        alarm.cancel()
        alarm.join()


def _name_of(process: psutil.Process) -> str:
    """Of a process, by its program; the id distinguishes two of a kind."""
    words = process.cmdline()
    role = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
    return f"{role} {process.pid}"


def _held_by(addresses: dict[str, str], secret: FleetSecret) -> list[str]:
    left = []
    for name, address in sorted(addresses.items()):
        load = load_of(address, secret)
        pages = load.total_pages - load.free_pages
        if pages or load.running or load.waiting:
            left.append(f"{name} holds {pages} pages, {load.running + load.waiting} requests")
    return left
