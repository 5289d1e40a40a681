"""All processes are replaced one by one under load: no client notices."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import psutil
from e2e.client import DEADLINE_S, connect, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job, draw_jobs
from slowness import patient

from effuse.cli.fleet import Fleet
from effuse.cli.keeper import Rolling
from effuse.protos.rpc import CALLER_KEEPALIVE, keepalive_options, reconnect_options
from effuse.v1 import generation_pb2, generation_pb2_grpc

CONCURRENT = 3
ROUTERS = 2
HURRIED = ("--drain-s", "0.01")
PATIENT = ("--hang-timeout-s", str(patient(240.0)))  # a stopped engine is hung after a quarter
METHOD = {
    "name": [{"service": "effuse.v1.GenerationService"}],
    "retryPolicy": {
        "maxAttempts": 4,
        "initialBackoff": "0.5s",
        "maxBackoff": "10s",
        "backoffMultiplier": 4.5,  # four attempts span at least 10 s
        # A stopping server cancels calls that it has not accepted yet.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    },
}
THINK_S = 0.3  # which leaves the processes that start some of a small machine


@dataclass
class Load:
    """Streams that each of several threads reads one after another, each over its own connection
    and with gRPC's own retries, until they are stopped.
    """

    address: str
    jobs: list[Job]
    stop: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[Job, list[int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def send(self, thread: int) -> None:
        draw = random.Random(thread)
        arguments = [
            ("grpc.service_config", json.dumps({"methodConfig": [METHOD]})),
            ("grpc.use_local_subchannel_pool", 1),
            *reconnect_options(),
            *keepalive_options(CALLER_KEEPALIVE),
        ]
        with grpc.insecure_channel(self.address, arguments) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while not self.stop.is_set():
                job = draw.choice(self.jobs)
                token_ids: list[int] = []
                try:
                    asked = generation_pb2.GenerateStreamRequest(request=job.message())
                    for event in stub.GenerateStream(asked, timeout=DEADLINE_S):
                        token_ids += event.commit.token_ids
                except grpc.RpcError as error:
                    self.failures.append(f"{error.code().name}: {error.details()}")
                else:
                    self.answers.append((job, token_ids))
                self.stop.wait(THINK_S)

    def wait_for_answers(self, number: int) -> None:
        """Returns once so many more have come."""
        enough = len(self.answers) + number
        wait_until(lambda: len(self.answers) >= enough, "streams are not answered any more")

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Streams are read for as long as this lasts."""
        with ThreadPoolExecutor(CONCURRENT) as threads:
            sending = [threads.submit(self.send, thread) for thread in range(CONCURRENT)]
            try:
                yield
            finally:
                self.stop.set()
        for one in sending:
            one.result()


def test_every_process_is_replaced_twice_and_no_stream_notices() -> None:
    """Each successor is there before its predecessor ends. The first decode worker has no time for
    its requests and leaves them to the next one. The routers share their port."""
    jobs = draw_jobs(8, 12, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids, least_blocks=4)
    with tiny_fleet(
        "sdar", connector="zmq", routers=ROUTERS, worker_flags=PATIENT, decode_flags=HURRIED
    ) as fleet:
        with connect(fleet.address) as client:
            undisturbed = {job: list(client.generate(job.message()).token_ids) for job in jobs}
        command = fleet._commands["decode-0"]  # of its successors, which have time
        at = command.index(HURRIED[0])
        assert tuple(command[at : at + 2]) == HURRIED
        del command[at : at + 2]
        engine = engine_of(fleet.processes["decode-0"].pid)
        load = Load(fleet.address, jobs)
        with load.sending():
            for _ in range(2):
                load.wait_for_answers(2 * CONCURRENT)
                replace_all(fleet, engine)
            load.wait_for_answers(2 * CONCURRENT)
        assert "requests that are still running" in (fleet.log_dir / "decode-0.log").read_text()
    assert not load.failures, load.failures
    assert not [job for job, token_ids in load.answers if token_ids != undisturbed[job]]


def replace_all(fleet: Fleet, stopped: psutil.Process) -> None:
    """As SIGUSR1 does; sees that every process is another one, and that one of each name was ready
    at all times. One engine stands still once its worker is being replaced, so that its requests do
    not end."""
    before = {name: one.pid for name, one in fleet.processes.items() if name != "redis"}
    ready = set(before.values())
    rolling = Rolling(fleet)
    rolling.ask()

    def is_over() -> bool:
        rolling.advance()
        if any(one.name == "decode-0" for one in fleet._ended):
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped.suspend()
        now = {name: one for name, one in fleet.processes.items() if name in before}
        ready.update(one.pid for name, one in now.items() if fleet.is_back(name))
        alive = {
            one.name
            for one in (*now.values(), *fleet._ended)
            if one.returncode is None and one.pid in ready
        }
        assert alive == before.keys()
        return rolling.is_over

    wait_until(is_over, "not all workers were replaced")
    assert not [pid for pid in before.values() if psutil.pid_exists(pid)]
    assert not {one.pid for one in fleet.processes.values()} & set(before.values())
