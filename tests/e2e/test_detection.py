"""Real processes that die, hang or stop: the detection, and the reports."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from e2e.client import Client, connect, wait_until
from e2e.processes import engine_of, tree
from e2e.tiny import tiny_fleet
from slowness import patient

from effuse.cli.fleet import Fleet
from effuse.placement.leases import GRACE_S, STALE_S
from effuse.v1 import generation_pb2, model_pb2, model_pb2_grpc

WORKERS = ("prefill-0", "decode-0", "decode-1")
PAUSE_S = 12.0  # longer than a lease, and than an engine or a connection may be silent
READY = model_pb2.WORKER_STATE_READY


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    flags = ("--hang-timeout-s", str(patient(3)))
    with tiny_fleet("sdar", connector="zmq", decode=2, worker_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[Client]:
    with connect(fleet.address) as connected:
        yield connected


def workers(client: Client) -> dict[str, model_pb2.Worker]:
    """The router's knowledge of each worker, by address."""
    stub = model_pb2_grpc.ModelServiceStub(client.channel)
    answer = stub.ListWorkers(model_pb2.ListWorkersRequest(), timeout=30)
    return {worker.address: worker for worker in answer.workers}


def lives(client: Client) -> dict[str, str]:
    """The incarnation of each worker that is ready, by address."""
    return {at: one.incarnation for at, one in workers(client).items() if one.state == READY}


def answer(client: Client) -> generation_pb2.GenerateResponse:
    return client.generate(
        generation_pb2.GenerateRequest(
            prompt_token_ids=generation_pb2.TokenIds(ids=range(5, 30)),
            stopping=generation_pb2.StoppingParams(max_tokens=16),
        )
    )


@contextlib.contextmanager
def frozen(fleet: Fleet) -> Iterator[None]:
    """All processes of the fleet are stopped, like on a paused machine."""
    everyone = [one for process in fleet.processes.values() for one in tree(process.pid)]
    assert len(everyone) >= 2 + 2 * len(WORKERS)
    for process in everyone:
        process.suspend()
    try:
        stopped = psutil.STATUS_STOPPED
        wait_until(lambda: all(one.status() == stopped for one in everyone), "somebody runs")
        yield
    finally:
        for process in everyone:
            process.resume()


def test_a_paused_machine_costs_no_engine_and_no_lease(fleet: Fleet, client: Client) -> None:
    wait_until(lambda: len(lives(client)) == len(WORKERS), "the fleet is not whole")
    before = lives(client)
    engines = [engine_of(fleet.processes[name].pid) for name in WORKERS]
    with frozen(fleet):
        time.sleep(PAUSE_S)
    until = time.monotonic() + 2 * (STALE_S + GRACE_S)
    while time.monotonic() < until:
        assert lives(client) == before
        time.sleep(0.02)
    assert all(engine.is_running() for engine in engines)
    assert answer(client).usage.completion_tokens


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_is_told_of_before_the_next_one_is_ready(
    fleet: Fleet, client: Client, number: signal.Signals
) -> None:
    wait_until(lambda: len(lives(client)) == len(WORKERS), "the fleet is not whole")
    address, engine = fleet.address_of("decode-0"), engine_of(fleet.processes["decode-0"].pid)
    old = lives(client)[address]
    seen: list[tuple[bool, str]] = []

    def look() -> None:
        worker = workers(client)[address]
        now = (worker.state == READY, worker.incarnation)
        if now not in seen[-1:]:
            seen.append(now)

    def is_replaced() -> bool:
        look()
        return seen[-1][0] and seen[-1][1] != old

    look()
    engine.send_signal(number)
    wait_until(is_replaced, f"the engine was not replaced: {seen}")
    assert [one for one in seen if one[1] == old] == [(True, old), (False, old)]
    assert not engine.is_running()
    assert answer(client).usage.completion_tokens


def test_a_front_that_stands_still_is_left_out_and_comes_back(fleet: Fleet, client: Client) -> None:
    wait_until(lambda: len(lives(client)) == len(WORKERS), "the fleet is not whole")
    before, address = lives(client), fleet.address_of("decode-1")
    engine = engine_of(fleet.processes["decode-1"].pid)
    front = psutil.Process(fleet.processes["decode-1"].pid)
    front.suspend()
    try:
        wait_until(lambda: front.status() == psutil.STATUS_STOPPED, "it still runs")
        wait_until(lambda: address not in workers(client), "it is still taken for alive")
        assert answer(client).usage.completion_tokens
    finally:
        front.resume()
    wait_until(lambda: lives(client) == before, "it did not come back")
    assert engine.is_running()
