"""Requests to workers whose roles change and which are killed: every answer must be the same.

`python -m e2e.role_storm --requests 5000 --changes 100 --kills 50` prints a ledger and ends with
status 1 if a request failed, an answer differs, or a fault did not happen. A change counts if the
worker itself then reports the role; a kill, if the process ended by it and another one is ready.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc
import psutil
from e2e.client import connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job, draw_jobs
from slowness import patient

from effuse.cli.fleet import Fleet
from effuse.v1 import worker_pb2, worker_pb2_grpc
from effuse.worker.attempts import ROLES

CONCURRENT = 6
PAUSE_S = 0.1  # of each client, which leaves the processes that start some of a small machine


@dataclass
class Ledger:
    """What was sent, what came of it, and the faults meanwhile."""

    num_equal: int = 0
    failures: list[str] = field(default_factory=list)
    different: list[Job] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)  # proven ones
    kills: Counter[str] = field(default_factory=Counter)  # proven ones
    seconds_to_serve: list[float] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return self.num_equal + len(self.failures) + len(self.different)

    def has_ended(self, most: int) -> bool:
        return self.num_ended >= most

    def text(self, asked: argparse.Namespace, took_s: float) -> str:
        most_s = max(self.seconds_to_serve, default=0.0)
        lines = [
            f"requests: {self.num_ended} of {asked.requests} ended in {took_s:.0f} s",
            f"  with the same tokens: {self.num_equal}",
            f"  with other tokens: {len(self.different)}",
            f"  failed: {len(self.failures)}",
            *(f"    {one}" for one in self.failures[:8]),
            f"role changes: {self.changes.total()} of {asked.changes}, each reported by its worker",
            f"  {dict(self.changes.most_common())}",
            f"  longest until the worker reported the role: {most_s * 1000:.0f} ms",
            f"kills: {self.kills.total()} of {asked.kills}, each with a new process after it",
            f"  {dict(self.kills)}",
        ]
        return "\n".join(lines)

    def is_good(self, asked: argparse.Namespace) -> bool:
        counts = (self.num_equal, self.changes.total(), self.kills.total())
        return counts == (asked.requests, asked.changes, asked.kills)


class Clients:
    """Threads that each send one of the `jobs` after another, until so many have been sent."""

    def __init__(
        self, address: str, expected: dict[Job, list[int]], ledger: Ledger, most: int, seed: int
    ) -> None:
        self._address = address
        self.jobs = expected
        self._ledger = ledger
        self._left = most
        self._seed = seed
        self._lock = threading.Lock()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """The block runs beside them; its end waits for all answers."""
        with ThreadPoolExecutor(CONCURRENT) as threads:
            running = [threads.submit(self._send, number) for number in range(CONCURRENT)]
            yield
            for one in running:
                one.result()

    def _send(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        with connect(self._address, alone=True) as client:
            while self._take():
                job, tokens = draw.choice(list(self.jobs.items()))
                try:
                    answer = client.generate(job.message())
                except grpc.RpcError as error:
                    with self._lock:
                        self._ledger.failures.append(f"{error.code().name}: {error.details()}")
                    continue
                with self._lock:
                    if list(answer.token_ids) == tokens:
                        self._ledger.num_equal += 1
                    else:
                        self._ledger.different.append(job)
                time.sleep(PAUSE_S)

    def stop(self) -> None:
        """Nothing more is sent."""
        with self._lock:
            self._left = 0

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


class Faults:
    """Changes of roles, and kills, each of which proves that it happened. Beside them the router
    changes the roles of workers that start anew, until a change here sets them."""

    def __init__(self, fleet: Fleet, ledger: Ledger, draw: random.Random) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._draw = draw
        self.roles = dict.fromkeys(fleet.names("worker"), "both")
        self._set = set[str]()  # workers whose roles only change here

    def change(self) -> None:
        """Gives a worker another role; some worker always decodes."""
        names = [name for name in self.roles if self._fleet.is_back(name)]
        for name in set(names) - self._set:
            self.roles[name] = load_of(self._fleet.address_of(name)).role
        while True:
            name, role = self._draw.choice(names), self._draw.choice(ROLES)
            others = [one for other, one in self.roles.items() if other != name]
            if role != self.roles[name] and any(one != "prefill" for one in (*others, role)):
                break
        began = time.monotonic()
        set_role(self._fleet.address_of(name), role)
        wait_until(
            lambda: load_of(self._fleet.address_of(name)).role == role, f"{name} is not {role}"
        )
        self._ledger.seconds_to_serve.append(time.monotonic() - began)
        self._ledger.changes[f"{self.roles[name]} to {role}"] += 1
        self.roles[name] = role
        self._set.add(name)

    def kill(self) -> None:
        """Kills an engine, or a whole worker, and waits until another one is ready."""
        name = self._draw.choice(list(self.roles))
        if self._draw.random() < 0.5:
            self._kill_engine(name)
        else:
            self._kill_worker(name)

    def _kill_engine(self, name: str) -> None:
        address = self._fleet.address_of(name)
        before, engine = load_of(address).worker.incarnation, engine_of(self._pid(name))
        engine.send_signal(signal.SIGKILL)
        assert engine.wait(patient(10.0)) in (-signal.SIGKILL, None)

        def is_new() -> bool:
            return load_of(address).worker.incarnation not in ("", before)

        wait_until(is_new, f"{name} has no new engine", 120.0)
        is_same = load_of(address).role == self.roles[name]
        assert is_same or name not in self._set, "a role outlives an engine"
        self._ledger.kills["engine"] += 1

    def _kill_worker(self, name: str) -> None:
        process = psutil.Process(self._pid(name))
        self._fleet.processes[name].send(signal.SIGKILL)
        self._fleet.processes[name].wait(patient(10.0))
        assert not process.is_running()
        self._fleet.begin_restart(name)
        wait_until(lambda: self._fleet.is_back(name), f"{name} is not back", 120.0)
        assert self._pid(name) != process.pid
        self._set.discard(name)
        self._ledger.kills["worker"] += 1

    def _pid(self, name: str) -> int:
        return self._fleet.processes[name].pid


def set_role(
    address: str, role: str, hand_over_s: float | None = None
) -> worker_pb2.SetRoleResponse:
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.SetRoleRequest(role=role, hand_over_s=hand_over_s)
        answer: worker_pb2.SetRoleResponse = stub.SetRole(request, timeout=30)
        return answer


def expected_of(fleet: Fleet, seed: int) -> dict[Job, list[int]]:
    """Jobs with the tokens that a fleet writes while nothing happens to it."""
    jobs = draw_jobs(seed, 12, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with connect(fleet.address) as client:
        return {job: list(client.generate(job.message()).token_ids) for job in jobs}


def storm(fleet: Fleet, asked: argparse.Namespace) -> Ledger:
    """Runs it. Faults are spread evenly over the answers, in an order drawn from the seed."""
    ledger, draw = Ledger(), random.Random(asked.seed)
    expected = expected_of(fleet, asked.seed)
    faults = Faults(fleet, ledger, draw)
    acts = [faults.change] * asked.changes + [faults.kill] * asked.kills
    draw.shuffle(acts)
    clients = Clients(fleet.address, expected, ledger, asked.requests, asked.seed)
    with clients.sending():
        for number, act in enumerate(acts):
            due = number * asked.requests // (len(acts) + 1)
            wait_until(partial(ledger.has_ended, due), "no more answers", 600.0)
            act()
    return ledger


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="role_storm", description=__doc__)
    for name, default in (
        *(("requests", 500), ("changes", 40), ("kills", 10)),
        *(("workers", 3), ("seed", 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="zmq")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    with tiny_fleet(
        "sdar", connector=asked.connector, prefill=0, decode=0, workers=asked.workers
    ) as fleet:
        ledger = storm(fleet, asked)
    print(ledger.text(asked, time.monotonic() - began), flush=True)
    return 0 if ledger.is_good(asked) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
