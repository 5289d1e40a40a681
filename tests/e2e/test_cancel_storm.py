"""Requests that are cancelled at random moments leave nothing behind.

Nor do those whose prefill worker is frozen, front and engine, while pages are open to it over NIXL.
It is on the decode worker's machine and may write by itself. So its pages stay out of use as long
as it is stopped, and are back as soon as it goes on or has been killed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from operator import le
from typing import TypeAlias

import grpc
import pytest
import redis
from e2e.client import Client, connect, load_of, wait_until
from e2e.processes import connections_to, engine_of, open_files, pids, resident_bytes
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job, draw_jobs

from effuse.cli.fleet import Fleet
from effuse.cli.process import Process
from effuse.client.client import Client as EffuseClient
from effuse.placement.store import MOST_CONNECTIONS
from effuse.v1.generation_pb2 import GenerateResponse
from effuse.v1.model_pb2 import WorkerQuarantine

Call: TypeAlias = "grpc._CallFuture[GenerateResponse]"

REQUESTS = 150
WARM_UP = 50
IN_FLIGHT = 24
RSS_SLACK_BYTES = 24 << 20
STILL_S = 12.0  # longer than a writer elsewhere is waited for
SHORT_S = 2.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tiny_fleet("sdar", connector="nixl") as running:
        yield running


def test_requests_a_third_of_which_are_cancelled_leave_nothing(fleet: Fleet) -> None:
    with connect(fleet.address) as client:
        jobs = draw_jobs(
            7, WARM_UP + REQUESTS, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids
        )
        _storm(client, jobs[:WARM_UP], seed=1)  # caches, arenas and connections are grown by then
        wait_until(lambda: _idle(fleet), "the warm-up leaves something running")
        before = _resources(fleet)
        cancelled, finished = _storm(client, jobs[WARM_UP:], seed=2)
    assert cancelled >= REQUESTS // 4, "the fault did not happen often enough"
    assert cancelled + finished == REQUESTS
    wait_until(lambda: _idle(fleet), "pages, requests or quarantine are left")
    wait_until(lambda: not _running_keys(fleet), "Redis holds keys of running requests")
    wait_until(
        lambda: all(map(le, _files_and_tasks(fleet), before[0])),
        "tasks or file descriptors are left",
    )
    grown = sum(resident_bytes(one.pid) for one in _members(fleet)) - before[1]
    assert grown < RSS_SLACK_BYTES, f"resident memory grew by {grown >> 20} MiB"


@pytest.mark.parametrize(("end", "still_s"), [(signal.SIGCONT, STILL_S), (signal.SIGKILL, SHORT_S)])
def test_pages_wait_for_a_frozen_writer_until_it_goes_on_or_is_killed(
    fleet: Fleet, end: signal.Signals, still_s: float
) -> None:
    with connect(fleet.address) as client:
        jobs = draw_jobs(3, 20, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
        job = max(jobs, key=lambda one: len(one.prompt))  # a short one takes no page
        client.generate(job.message(f"before-{end.name}"))
        wait_until(lambda: _free(fleet) == _total(fleet), "the first request left pages")
        front = fleet.processes["prefill-0"].pid
        frozen = [front, engine_of(front).pid]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        call = client.stub.Generate.future(job.message(f"given-up-{end.name}"), timeout=60)
        wait_until(lambda: _free(fleet) < _total(fleet), "no page was reserved")
        call.cancel()
        wait_until(lambda: bool(_quarantines(fleet)), "no page is in quarantine")
        time.sleep(still_s)
        (held,) = _quarantines(fleet)
        assert held.writer == fleet.address_of("prefill-0")
        assert held.pages == _total(fleet) - _free(fleet) > 0
        assert held.age.ToTimedelta().total_seconds() > still_s / 2
        for pid in frozen:
            os.kill(pid, end)
        wait_until(lambda: _free(fleet) == _total(fleet), "pages are still in quarantine")
        wait_until(lambda: not _quarantines(fleet), "it is still said that they are")
        if end is signal.SIGCONT:
            client.generate(job.message("after"))


def _storm(client: Client, jobs: list[Job], seed: int) -> tuple[int, int]:
    """Sends all, `IN_FLIGHT` at a time, every third one cancelled at a random moment."""
    chance = random.Random(seed)
    waiting: list[tuple[Call, float | None]] = []
    cancelled = finished = 0
    for number, job in enumerate(jobs):
        call = client.stub.Generate.future(job.message(), timeout=60)
        now = time.monotonic()
        waiting.append((call, now + chance.expovariate(20.0) if number % 3 == 0 else None))
        while len(waiting) >= IN_FLIGHT or (number == len(jobs) - 1 and waiting):
            ended = _sweep(waiting)
            cancelled += sum(call.cancelled() for call in ended)
            finished += sum(
                not call.cancelled() and call.code() is grpc.StatusCode.OK for call in ended
            )
            time.sleep(0.002)
    return cancelled, finished


def _sweep(waiting: list[tuple[Call, float | None]]) -> list[Call]:
    for call, when in waiting:
        if when is not None and time.monotonic() >= when:
            call.cancel()
    seen = [(call, when, call.done()) for call, when in waiting]  # once: calls end meanwhile
    ended = [call for call, _, is_done in seen if is_done]
    waiting[:] = [(call, when) for call, when, is_done in seen if not is_done]
    for call in ended:
        if not call.cancelled() and call.exception(timeout=0) is not None:
            raise AssertionError(f"a request failed: {call.code()} {call.details()}")
    return ended


def _members(fleet: Fleet) -> list[Process]:
    return [fleet.processes[name] for name in fleet.processes if name != "redis"]


def _idle(fleet: Fleet) -> bool:
    loads = [load_of(fleet.address_of(name)) for name in fleet.processes if "-" in name]
    return all(
        load.running == load.waiting == load.quarantined_pages == 0
        and load.free_pages == load.total_pages
        for load in loads
    )


def _files_and_tasks(fleet: Fleet) -> tuple[int, int]:
    """Without connections to Redis: a process opens several at need, up to its limit, and keeps
    them.
    """
    port = int(fleet.redis_url.rsplit(":", 1)[1].split("/")[0])
    files = 0
    for one in _members(fleet):
        kept = connections_to(one.pid, port)
        assert kept <= MOST_CONNECTIONS * len(pids(one.pid)), f"{one.name} keeps {kept} to Redis"
        files += open_files(one.pid) - kept
    tasks = sum(load_of(fleet.address_of(name)).tasks for name in fleet.processes if "-" in name)
    return files, tasks


def _resources(fleet: Fleet) -> tuple[tuple[int, int], int]:
    return _files_and_tasks(fleet), sum(resident_bytes(one.pid) for one in _members(fleet))


def _running_keys(fleet: Fleet) -> list[bytes]:
    """Keys of placements without the end of their request; the set of running ones."""
    with redis.Redis.from_url(fleet.redis_url, socket_timeout=30) as client:
        keys = [key for key in client.scan_iter(match="*request*") if client.type(key) != b"none"]
        assert keys, "no placement was ever written"
        unended = [key for key in keys if b"running" in _content(client, key)]
        return [*unended, *client.scan_iter(match="*:running")]


def _content(client: redis.Redis, key: bytes) -> bytes:
    if client.type(key) == b"hash":
        return b" ".join(_bytes(part) for pair in client.hgetall(key).items() for part in pair)
    return _bytes(client.get(key) or b"")


def _bytes(answer: bytes | str) -> bytes:
    assert isinstance(answer, bytes)
    return answer


def _free(fleet: Fleet) -> int:
    return load_of(fleet.address_of("decode-0")).free_pages


def _total(fleet: Fleet) -> int:
    return load_of(fleet.address_of("decode-0")).total_pages


def _quarantines(fleet: Fleet) -> list[WorkerQuarantine]:
    """Those of the decode worker, as clients see them."""
    with EffuseClient(fleet.address) as client:
        workers = {one.worker_id: one for one in client.workers()}
    return list(workers["decode-0"].quarantines)
