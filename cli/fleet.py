"""A whole fleet on one machine: Redis, routers, prefill and decode workers as processes.

`with Fleet(FleetConfig(...)) as fleet:` is the base of `effuse up`, the demo, the end-to-end tests
and the benchmarks. No process and no file is left, unless the start failed.
"""

import contextlib
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Final, Literal, Self

from effuse.cli.commands import (
    LOOPBACK,
    FleetConfig,
    has_room_beside,
    longest_end_s,
    longest_start_s,
    member_commands,
    new_name,
    redis_command,
    renamed,
    router_names,
)
from effuse.cli.home import Home, hold
from effuse.cli.ports import free_port, hold_port
from effuse.cli.process import Process, Spawner, stop_all
from effuse.config.flags import CommandError
from effuse.placement.access import Silence
from effuse.worker.gpus import VARIABLE

LOG: Final = logging.getLogger(__name__)
Role = Literal["redis", "router", "prefill", "decode", "worker"]
WORKERS: Final[tuple[Role, ...]] = ("prefill", "decode", "worker")

_POLL_S = 0.02
_REDIS_S = 20.0  # time limit for Redis to answer
_QUIET = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


class FleetError(CommandError):
    """The fleet could not start, or one of its processes ended unexpectedly.

    `why` is the reason; the text also has the end of the failed process's log.
    """

    def __init__(self, why: str, process: Process | None = None) -> None:
        tail = "" if process is None else f"; its log ends:\n{process.tail()}"
        super().__init__(f"{why}{tail}")
        self.why = why


class Fleet:
    """A running fleet. Processes are named redis, router, prefill-0, decode-0, worker-0, ..."""

    def __init__(self, config: FleetConfig) -> None:
        """Raises OSError if the log directory cannot be made or written, or is another fleet's."""
        self.config = config
        self.name = config.name or new_name()
        self.redis_url = config.redis_url or ""
        self.processes: dict[str, Process] = {}
        self.gpus = config.assignments()  # by worker; empty if the environment decides
        self.ready_s = 0.0  # seconds from `start` until the router knew every worker
        self._facts: dict[str, dict[str, str]] = {}  # of each process, once it is ready
        self._commands: dict[str, list[str]] = {}
        self._ids: dict[str, str] = {}  # of workers that replaced another one, by name
        self._ended: list[Process] = []  # processes that are being replaced
        self._spawner = Spawner()
        self._port: socket.socket | None = None  # reserved for the routers
        self._held = contextlib.ExitStack()  # the log directory
        if config.log_dir is not None:
            try:
                config.log_dir.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=config.log_dir):
                    pass
                self._held.callback(os.close, hold(config.log_dir))
            except OSError as error:
                raise OSError(f"--log-dir {config.log_dir}: {error.strerror}") from error
        self.home = Home(config.router_flags)
        self.log_dir = config.log_dir or self.home.path

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return self.address_of(router_names(self.config)[0])

    def address_of(self, name: str) -> str:
        return self._facts[name]["address"]

    def metrics(self) -> dict[str, str]:
        """Current addresses of the processes' metrics, host:port by name."""
        current = self._facts.copy()
        for name in current:
            with contextlib.suppress(FileNotFoundError):  # it is starting again
                current[name] = self.home.facts(self._id(name))
        return {name: facts["metrics"] for name, facts in current.items() if "metrics" in facts}

    def names(self, *roles: Role) -> list[str]:
        return [name for role in roles for name in self.processes if _role_of(name) == role]

    def start(self) -> None:
        """Start everything and return once the fleet can answer requests.

        On failure it stops everything and raises FleetError with the failed process's log. Raises
        ModuleNotFoundError if the workers' packages are not installed.
        """
        began = time.monotonic()
        deadline = began + longest_start_s(self.config)
        try:
            if find_spec("torch") is None:
                raise ModuleNotFoundError("workers need torch", name="torch")
            if self.config.has_secret:
                self.home.make_secret()
            try:
                self._port = hold_port(self.config.host, self.config.port)
            except OSError as error:
                raise FleetError(str(error)) from error
            self._start_redis(deadline)
            port = self._port.getsockname()[1]
            members = member_commands(self.config, port, self.gpus, self._shared_flags)
            self._commands.update(members)
            for name in members:
                self._spawn(name)
            for name in members:
                if not self._wait(deadline, partial(self.is_back, name)):
                    raise FleetError(f"{name} did not become ready", self.processes[name])
            left_s = max(0.0, deadline - time.monotonic())
            prefill, decode = self.config.prefill, self.config.decode
            more = self.config.workers  # they do both at first
            self.wait_for_workers(prefill + more, decode + more, left_s)
        except BaseException:
            self.stop(lambda: True)  # nothing runs yet
            raise
        self.ready_s = time.monotonic() - began

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """End every process, routers first and Redis last. Running requests finish within each
        process's drain time, or until `is_hurried`."""
        for roles in (("router",), WORKERS, ("redis",)):
            members = [*self.processes.values(), *self._ended]
            longest_s = _REDIS_S if roles == ("redis",) else longest_end_s(self.config, roles[0])
            stop_all([one for one in members if _role_of(one.name) in roles], longest_s, is_hurried)
        self.processes.clear()
        self._ended.clear()
        self._spawner.close()
        if self._port is not None:
            self._port.close()
        self._held.close()
        self.home.remove()

    def roll(self, name: str) -> Iterator[None]:
        """Replace one process without losing a request: its successor is ready, and known to the
        routers, before it ends. A worker whose GPU has no room for two ends first. Yields while
        there is something to wait for; the caller may stop early."""
        old, ready = self.processes.pop(name), self.home.ready_file(self._id(name))
        self._ended.append(old)
        if _role_of(name) == "router":
            yield from self._bring(name)
        elif has_room_beside(self._commands[name], self.gpus.get(name)):
            before, after = self._id(name), name if self._id(name) != name else f"{name}.2"
            self._ids[name] = after  # two living workers need two ids
            files = (self.home.ready_file(before), self.home.ready_file(after))
            files[0].unlink(missing_ok=True)
            self._commands[name] = renamed(self._commands[name], after, *files)
            yield from self._bring(name)
        old.send(signal.SIGTERM)
        deadline = time.monotonic() + longest_end_s(self.config, _role_of(name))
        while old.returncode is None and time.monotonic() < deadline:
            yield
        old.clear()
        self._ended.remove(old)
        if ready != self.home.ready_file(self._id(name)):
            ready.unlink(missing_ok=True)  # its next engine may have been ready meanwhile
        yield from self._bring(name)

    def _id(self, name: str) -> str:
        """The fleet's id of a process: a worker's id, otherwise its name."""
        return self._ids.get(name, name)

    def _bring(self, name: str) -> Iterator[None]:
        """Start a missing process, and wait until it and all routers are ready."""
        is_logged = False
        while name not in self.processes:
            try:
                self._spawn(name)
            except OSError as error:  # no memory for it, or no room for its log
                if not is_logged:
                    LOG.warning("%s cannot be started yet: %s", name, error)
                is_logged = True
                yield
        routers = self.names("router") if _role_of(name) in WORKERS else []
        while not (
            self.is_back(name) and all(self.home.knows(one, self._id(name)) for one in routers)
        ):
            yield

    def begin_restart(self, name: str) -> None:
        """Start a process that has ended again, with the same name and flags, without waiting;
        `is_back` shows when it is ready."""
        if name in self.processes:
            self.processes.pop(name).clear()
        self._spawn(name)

    def is_back(self, name: str) -> bool:
        """Whether a restarted process is ready; then its address is known."""
        if name == "redis":
            return self.home.redis_access.silence(self.redis_url, self.name) is None
        try:
            self._facts[name] = self.home.facts(self._id(name))
        except FileNotFoundError:
            return False
        return True

    def dead(self) -> list[Process]:
        return [one for one in self.processes.values() if one.returncode is not None]

    def wait_for_workers(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait until every router can choose among this many live workers. Raises FleetError."""
        seen = 0, 0

        def enough() -> bool:
            nonlocal seen
            counts = [self.home.live_workers(name) for name in router_names(self.config)]
            seen = min(one for one, _ in counts), min(one for _, one in counts)
            return seen[0] >= prefill and seen[1] >= decode

        if not self._wait(time.monotonic() + timeout_s, enough):
            raise FleetError(
                f"after {timeout_s:.0f} s a router sees {seen[0]} prefill and {seen[1]} decode "
                f"workers, expected {prefill} and {decode}",
                self.processes[router_names(self.config)[0]],
            )

    def _wait(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Whether `done()` became true in time. Raises FleetError if a process ends."""
        while not done():
            if dead := self.dead():
                raise FleetError(dead[0].ending(), dead[0])
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _spawn(self, name: str) -> None:
        self.home.ready_file(self._id(name)).unlink(missing_ok=True)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log, env = self.log_dir / f"{name}.log", {**_QUIET, **self.config.env}
        if gpu := self.gpus.get(name):
            env[VARIABLE] = gpu.gpu
            with log.open("a") as lines:
                print(f"{name} starts on {gpu}", file=lines)
        self.processes[name] = self._spawner.start(name, self._commands[name], log=log, env=env)

    def _start_redis(self, deadline: float) -> None:
        if not self.redis_url:
            port = free_port()
            self.redis_url = f"redis://{LOOPBACK}:{port}/0"
            users = self.home.make_redis_user()
            self._commands["redis"] = redis_command(port, self.home.path, users)
            self._spawn("redis")
        last: Silence | None = None

        def is_settled() -> bool:
            nonlocal last
            before, last = last, self.home.redis_access.silence(self.redis_url, self.name)
            if last and not (last.is_final or before) and self.config.redis_url:
                LOG.warning("Redis does not answer on %s yet: %s", self.redis_url, last.why)
            return last is None or last.is_final

        self._wait(min(deadline, time.monotonic() + _REDIS_S), is_settled)
        if last is not None:
            raise FleetError(f"Redis does not answer on {self.redis_url}: {last.why}")

    def _shared_flags(self, name: str) -> list[str]:
        files = {
            "--fleet-secret": self.home.secret_file,
            "--redis-credentials": self.home.redis_access.credentials,
            "--ready-file": self.home.ready_file(name),
        }
        given = [word for flag, path in files.items() if path for word in (flag, str(path))]
        return ["--redis-url", self.redis_url, "--fleet", self.name, *given]


def _role_of(name: str) -> str:
    return name.split("-")[0]
