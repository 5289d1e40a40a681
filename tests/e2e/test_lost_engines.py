"""Two of three decode engines killed together, repeatedly, under load: no client notices."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import psutil
from e2e.client import Client, connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job, draw_jobs

from effuse.cli.fleet import Fleet

ROUNDS = 2  # so that each engine is killed
CONCURRENT = 4
THINK_S = 0.8  # which leaves the engines that start some of a small machine
DECODE = ("decode-0", "decode-1", "decode-2")


@dataclass
class Load:
    """Requests that each of several threads sends one after another, until they are stopped."""

    client: Client
    jobs: list[Job]
    stop: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[Job, list[int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)  # that each answer took

    def send(self, thread: int) -> None:
        draw = random.Random(thread)
        for number in range(1_000_000):
            if self.stop.is_set():
                return
            job, name = draw.choice(self.jobs), f"load-{thread}-{number}"
            try:
                answer = self.client.generate(job.message(name))
            except grpc.RpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
            else:
                self.answers.append((job, list(answer.token_ids)))
                self.attempts.append(self.client.attempt_of(name))
            self.stop.wait(THINK_S)

    def wait_for_answers(self, number: int) -> None:
        """Returns once so many more have come."""
        enough = len(self.answers) + number
        wait_until(lambda: len(self.answers) >= enough, "requests are not answered any more")


def life_of(fleet: Fleet, name: str) -> str:
    """The incarnation of a worker's engine; empty while none is ready."""
    return load_of(fleet.address_of(name)).worker.incarnation


def kill_engines(fleet: Fleet, names: Sequence[str]) -> None:
    """Kills the engines of these workers at the same moment, while one of them runs a request, sees
    them dead, and waits until each worker has another one."""
    engines = [engine_of(fleet.processes[name].pid) for name in names]
    lives = {name: life_of(fleet, name) for name in names}
    wait_until(
        lambda: any(load_of(fleet.address_of(name)).running for name in names), "no request runs"
    )
    for engine in engines:
        engine.kill()
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive, "an engine outlived its kill"
    wait_until(
        lambda: all(life_of(fleet, name) not in ("", old) for name, old in lives.items()),
        "an engine did not come back",
    )


def test_killed_engines_cost_no_request_and_change_no_token() -> None:
    jobs = draw_jobs(8, 12, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with tiny_fleet("sdar", connector="zmq", decode=3) as fleet, connect(fleet.address) as client:
        undisturbed = {job: list(client.generate(job.message()).token_ids) for job in jobs}
        load = Load(client, jobs)
        with ThreadPoolExecutor(CONCURRENT) as threads:
            sending = [threads.submit(load.send, thread) for thread in range(CONCURRENT)]
            try:
                for number in range(ROUNDS):
                    load.wait_for_answers(2 * CONCURRENT)
                    kill_engines(fleet, [name for name in DECODE if name != DECODE[number]])
                load.wait_for_answers(2 * CONCURRENT)
            finally:
                load.stop.set()
            for one in sending:
                one.result()
    assert not load.failures, load.failures
    wrong = [job for job, token_ids in load.answers if token_ids != undisturbed[job]]
    assert not wrong
    assert max(load.attempts) > 1, "no request ever lost its worker"
