"""Workers that do both kinds of work, and change while clients ask."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from e2e import role_storm
from e2e.client import connect, load_of, wait_until
from e2e.comparison import compare
from e2e.role_storm import Clients, Ledger, expected_of, set_role, storm
from e2e.test_equality import ask, solid_jobs
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job, draw_jobs

from effuse.cli.__main__ import main
from effuse.cli.fleet import Fleet
from effuse.placement.store import Store
from effuse.router import process, role_changes, steering
from effuse.router.config import parse
from effuse.router.measures import Measured
from effuse.router.planner import AnswerPace, PromptTime, Times
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import model_pb2, model_pb2_grpc

REMOTE = ("--prefill", "remote")


def workers_of(fleet: Fleet) -> dict[str, model_pb2.Worker]:
    with connect(fleet.address) as client:
        stub = model_pb2_grpc.ModelServiceStub(client.channel)
        listed = stub.ListWorkers(model_pb2.ListWorkersRequest(), timeout=30)
        return {one.worker_id: one for one in listed.workers}


def test_one_worker_that_does_both_gives_the_oracles_answers() -> None:
    with tiny_fleet("dream", connector="zmq", prefill=0, decode=0, workers=1) as fleet:
        pairs = solid_jobs("dream", "d2f", seed=2)
        answers = ask(fleet, [job for job, _ in pairs])
        compare(pairs, answers)
        assert not any(answer.stats.prefill_worker for answer in answers)
        (worker,) = workers_of(fleet).values()
        assert worker.role == model_pb2.WORKER_ROLE_BOTH and worker.may_change_role


def test_two_that_compute_prompts_for_each_other_give_the_oracles_answers() -> None:
    """Each rank of each one pushes and receives at the same time."""
    ranks = ("--tensor-parallel-size", "2")
    with tiny_fleet(
        "sdar", connector="nixl", prefill=0, decode=0, workers=2, worker_flags=ranks,
        router_flags=REMOTE,
    ) as fleet:  # fmt: skip
        wait_until(lambda: all(one.links for one in workers_of(fleet).values()), "links are cold")
        pairs = solid_jobs("sdar", "block_diffusion", seed=2)
        ways = set[tuple[str, str]]()

        def both_ways_were_taken() -> bool:
            answers = ask(fleet, [job for job, _ in pairs])
            compare(pairs, answers)
            ways.update((one.stats.prefill_worker, one.stats.decode_worker) for one in answers)
            return ways == {("worker-0", "worker-1"), ("worker-1", "worker-0")}

        # If one link is slower at first, all of a first turn may take the other.
        wait_until(both_ways_were_taken, "prompts went one way")
        for name in fleet.names("worker"):
            wait_until(partial(has_all_pages, fleet.address_of(name)), "pages are left")


def has_all_pages(address: str) -> bool:
    load = load_of(address)
    return load.free_pages == load.total_pages


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    """Three workers that do both, for tests that set the roles of all first."""
    with tiny_fleet("sdar", connector="zmq", prefill=0, decode=0, workers=3) as fleet:
        yield fleet


def test_roles_swap_while_clients_ask_and_no_request_notices(three: Fleet) -> None:
    fleet = three
    expected, ledger = expected_of(fleet, 3), Ledger()
    first, second, third = (fleet.address_of(name) for name in fleet.names("worker"))
    set_role(third, "prefill")
    clients = Clients(fleet.address, expected, ledger, 120, seed=3)
    with clients.sending():
        for number in range(6):
            wait_until(partial(ledger.has_ended, 16 * number), "no answers")
            one, other = (first, second) if number % 2 else (second, first)
            # Nobody decodes for a moment, and requests wait for it.
            set_role(one, "prefill", hand_over_s=0.2)
            set_role(other, "decode")
    assert ledger.num_equal == 120, (ledger.failures, ledger.different)
    assert {load_of(one).role for one in (first, second)} == {"prefill", "decode"}
    for one in (first, second, third):
        wait_until(partial(has_all_pages, one), "pages are left")


def test_a_changed_worker_serves_its_new_role_within_a_second(three: Fleet) -> None:
    fleet = three
    (job, tokens), *_ = expected_of(fleet, 5).items()
    addresses = [fleet.address_of(name) for name in fleet.names("worker")]
    for address, name in zip(addresses, ("prefill", "decode", "prefill"), strict=True):
        set_role(address, name)
    lives = {name: one.incarnation for name, one in workers_of(fleet).items()}
    with connect(fleet.address) as client:
        for number in range(1, 5):
            began = time.monotonic()
            set_role(addresses[number % 2], "prefill")
            set_role(addresses[1 - number % 2], "decode")
            answer = client.generate(job.message())
            took_s = time.monotonic() - began
            assert list(answer.token_ids) == tokens
            assert answer.stats.decode_worker == f"worker-{1 - number % 2}"
            print(f"change {number}: an answer of the new role after {took_s * 1000:.0f} ms")
    assert {name: one.incarnation for name, one in workers_of(fleet).items()} == lives


def test_the_command_changes_a_role_and_the_table_shows_it(
    three: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", three.address)
    for name, role in zip(three.names("worker"), ("decode", "decode", "prefill"), strict=True):
        set_role(three.address_of(name), role)
    assert main(["role", "worker-0", "prefill", *target]) == 0
    assert capsys.readouterr().out == "worker-0 is now prefill\n"

    def is_shown() -> bool:
        assert main(["status", *target]) == 0
        return "2 prefill workers and 1 decode worker are ready" in capsys.readouterr().out

    wait_until(is_shown, "the router does not see it")
    assert main(["role", "worker-9", "both", *target]) == 1
    assert "no worker 'worker-9': it has worker-0, worker-1, worker-2" in capsys.readouterr().err


def test_changes_and_kills_together_lose_nothing(three: Fleet) -> None:
    asked = argparse.Namespace(requests=60, changes=8, kills=2, seed=1)
    ledger = storm(three, asked)
    assert ledger.is_good(asked), ledger.text(asked, 0.0)


def jobs_of(fleet: Fleet, prompt: int, answer: int) -> dict[Job, list[int]]:
    """Jobs with prompts and answers of about these lengths, and an undisturbed fleet's tokens."""
    drawn = draw_jobs(7, 8, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    jobs = [
        replace(
            one,
            prompt=tuple((3 * number + 7 * at) % 250 for at in range(prompt + number)),
            max_tokens=answer,
            ignore_eos=True,
        )
        for number, one in enumerate(drawn)
    ]
    return {
        job: list(answered.token_ids) for job, answered in zip(jobs, ask(fleet, jobs), strict=True)
    }


@contextmanager
def router_in_this_process(fleet: Fleet, *flags: str) -> Iterator[Router]:
    """A router of the fleet whose parts a test may replace."""
    model = fleet.config.model
    assert model is not None
    where = ("--redis-url", fleet.redis_url, "--fleet", fleet.name, "--model")
    config = parse(["--port", "0", *where, str(model), *flags])
    started, stop, loop = Future[Router](), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with Store(config.redis_url, config.fleet) as store:
            router = Router(config, Tokenizer.load(model), store)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(process.serve(router, stop))
                await router.ports.ready.wait()
                started.set_result(router)

    def note_end(done: Future[None]) -> None:
        if not started.done():
            started.set_exception(done.exception() or AssertionError("the router has ended"))

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(loop.run_until_complete, serve())
        running.add_done_callback(note_end)
        try:
            yield started.result(60)
        finally:
            loop.call_soon_threadsafe(stop.set)
            running.result(60)
            loop.close()


TIMES = Times(  # slow ones, so that any load is worth other roles
    prompts=(PromptTime(100, 0.5),),
    answers=(AnswerPace(4, 40.0, 0.05),),
)


def test_roles_follow_a_load_and_no_request_notices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the measured times are given: these cores are shared, and their times mean little."""
    monkeypatch.setattr(Measured, "times", lambda self, piece, link: TIMES)
    monkeypatch.setattr(Measured, "hits", 0.0)
    monkeypatch.setattr(steering, "AFTER_S", 1.0)
    monkeypatch.setattr(role_changes, "COOL_S", 2.0)
    monkeypatch.setattr(role_storm, "PAUSE_S", 0.8)
    with (
        tiny_fleet(
            "sdar", connector="zmq", prefill=0, decode=0, workers=3, router_flags=("--no-steering",)
        ) as fleet,
        router_in_this_process(fleet, "--gap-objective-s", "0.05") as router,
    ):
        long_prompts, long_answers = jobs_of(fleet, 180, 8), jobs_of(fleet, 10, 56)
        ledger = Ledger()
        clients = Clients(router.ports.address, long_prompts, ledger, 1 << 30, seed=3)

        def has_roles(*wanted: str) -> bool:
            found = [load_of(fleet.address_of(name)).role for name in fleet.names("worker")]
            return sorted(found) == sorted(wanted)

        with clients.sending():
            try:
                wait_until(partial(has_roles, "decode", "prefill", "prefill"), "roles stay")
                clients.jobs = long_answers
                wait_until(partial(has_roles, "decode", "decode", "prefill"), "roles stay", 90.0)
                until = ledger.num_ended + 20
                wait_until(partial(ledger.has_ended, until), "no answers")
            finally:
                clients.stop()
        assert not ledger.failures and not ledger.different, ledger
        (model,) = router.steering.models
        labels = {"model_name": model, "to": "prefill", "result": "ok"}
        assert router.metrics.value("effuse_role_changes_total", labels) == 2
        assert main(["plan", "--target", router.ports.address]) == 0
        assert "this router changes the roles" in capsys.readouterr().out
        assert main(["role", "worker-0", "both", "--target", router.ports.address]) == 0
        assert main(["role", "worker-0", "auto", "--target", router.ports.address]) == 0
        told = "worker-0 is now both, and routers may change that"
        assert told in capsys.readouterr().out
        for name in fleet.names("worker"):
            wait_until(partial(has_all_pages, fleet.address_of(name)), "pages are left")
