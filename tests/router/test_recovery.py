"""As long as one worker can answer, or may come back, a request is answered: excluded workers,
awaited workers, and how a request ends without any.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from router.asking import ask, failure, request
from router.fake_model import BLOCK_SIZE, worker_record
from router.fake_workers import FakeWorker, ends_its_engine, holds, once, raises
from router.fakes import FakeFleet, pass_time, run, until

from effuse.placement.records import Capacity
from effuse.protos import errors
from effuse.router import answer
from effuse.router.policy import Condition
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

TEXT = "the answer is three"


@pytest.fixture(autouse=True)
def _is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting requests get changes, and need not poll."""
    monkeypatch.setattr(answer, "LOOK_S", 1000.0)


async def start_anew(fleet: FakeFleet, worker: FakeWorker, incarnation: str) -> None:
    """The worker has another engine, and announces it."""
    worker.at.clear()
    worker.is_starting = False
    worker.record = msgspec.structs.replace(worker.record, incarnation=incarnation)
    await fleet.announce()


# Excluded workers.


@pytest.mark.parametrize(
    "error",
    [errors.EngineLost("it died"), errors.Starting("no engine"), errors.Replaced("another life")],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_without_its_engine_is_asked_once_however_idle_it_looks(
    error: errors.EffuseError,
) -> None:
    async def body(fleet: FakeFleet) -> None:
        dead = fleet.decode[0]
        dead.at["start"] = raises(error)
        dead.is_starting = True
        for _ in range(5):
            assert (await ask(fleet)).text == TEXT
        assert len(dead.requests) == 1
        assert fleet.condition(dead) not in (Condition.READY, None)

    run(body, num_prefill=0, num_decode=2)


def test_a_worker_that_says_that_it_is_ready_takes_part_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        worker = fleet.decode[0]
        worker.at["start"] = once(raises(errors.PeerLost("a moment's silence")))
        assert (await ask(fleet)).text == TEXT
        assert (await ask(fleet)).stats.decode_worker == "d0"

    run(body, num_prefill=0)


def test_refusals_are_no_attempts() -> None:
    async def body(fleet: FakeFleet) -> None:
        for at, worker in enumerate(fleet.decode[:4]):
            refuses = (errors.Starting, errors.Draining, errors.Replaced, errors.Overloaded)
            worker.at["start"] = raises(refuses[at]("not now"))
            worker.is_starting = True
        answer = await ask(fleet)
        assert (answer.text, answer.stats.decode_worker) == (TEXT, "d4")
        assert fleet.metric("effuse_retries_total") == 0
        assert fleet.metric("effuse_worker_refusals_total", worker="d0", reason="STARTING") == 1
        assert fleet.metric("effuse_worker_losses_total", worker="d0", reason="STARTING") is None

    run(body, num_prefill=0, num_decode=5, max_losses=0)


# Awaited workers.


def test_the_only_decode_worker_is_waited_for_while_its_engine_starts() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.at["commit 2"] = ends_its_engine(worker)
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        fleet.store.records.clear()  # no engine, no lease
        await start_anew(fleet, worker, "2")
        assert (await asking).text == TEXT
        resumed = worker.requests[-1]
        assert (resumed.incarnation, len(worker.requests)) == ("2", 2)
        assert len(resumed.resume.committed_token_ids) == 2 * BLOCK_SIZE

    run(body, num_prefill=0)


def test_a_front_that_answers_is_waited_for_although_its_lease_has_run_out() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.at["start"] = ends_its_engine(worker)
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.condition(worker) is Condition.STARTING)
        worker.record = msgspec.structs.replace(worker.record, state="released")
        await fleet.announce()
        assert not fleet.router.fleet.view.workers()
        await fleet.router.fleet.forget_ended()
        assert fleet.condition(worker) is Condition.STARTING
        worker.record = msgspec.structs.replace(worker.record, state="ready")
        await start_anew(fleet, worker, "2")
        assert (await asking).text == TEXT

    run(body, num_prefill=0)


def test_who_announces_that_it_is_starting_is_waited_for_and_not_asked() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.record = msgspec.structs.replace(worker.record, state="starting")
        await fleet.announce()
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        worker.record = msgspec.structs.replace(worker.record, state="ready")
        await start_anew(fleet, worker, "2")
        assert (await asking).text == TEXT
        assert len(worker.requests) == 1

    run(body, num_prefill=0)


def test_a_request_that_comes_meanwhile_waits_too() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.at["start"] = ends_its_engine(worker)
        first = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        second = asyncio.create_task(ask(fleet))
        stalled = "effuse_num_requests_stalled"
        await until(lambda: fleet.metric(stalled, reason="worker") == 2)
        await start_anew(fleet, worker, "2")
        assert {(await first).text, (await second).text} == {TEXT}
        assert len(worker.requests) == 3

    run(body, num_prefill=0)


def test_a_worker_that_was_full_is_asked_again_later() -> None:
    async def body(fleet: FakeFleet) -> None:
        full = once(raises(errors.Overloaded("no free pages", retry_after_s=0.8)))
        fleet.decode[0].at["start"] = full
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("seat"))
        assert len(fleet.decode[0].requests) == 1
        assert (await asking).text == TEXT

    run(body, num_prefill=0)


def test_survivors_are_not_asked_for_more_than_their_seats() -> None:
    async def body(fleet: FakeFleet) -> None:
        first, second = fleet.decode
        seats = Capacity(total_pages=256, page_size=16, max_num_seqs=2, max_num_batched_tokens=512)
        for worker in fleet.decode:
            worker.record = msgspec.structs.replace(worker.record, capacity=seats)
        await fleet.announce()
        go, most = asyncio.Event(), 0

        async def count() -> None:
            nonlocal most
            most = max(most, len(second.running))
            await go.wait()

        second.at["verified"] = count
        first.at["verified"] = holds(go)
        first.at["commit 1"] = ends_its_engine(first)
        asking = [asyncio.create_task(ask(fleet)) for _ in range(4)]
        await until(lambda: len(first.running) == len(second.running) == 2)
        go.set()
        assert {answer.text for answer in await asyncio.gather(*asking)} == {TEXT}
        assert most == 2

    run(body, num_prefill=0, num_decode=2)


def test_an_empty_budget_delays_and_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = once(raises(errors.Unavailable("a step failed")))
        budget, now = fleet.router.budget, time.monotonic()
        take = budget.take
        # Otherwise time by itself fills it before the attempt is lost, on a slow machine.
        monkeypatch.setattr(budget, "take", lambda _: take(now))
        while budget.take(now) < 0.2:
            pass
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("budget"))
        assert (await asking).text == TEXT
        assert budget.left(now) < 1
        left = fleet.metric("effuse_retry_budget")
        assert left is not None and left < fleet.router.config.max_concurrent_requests

    run(body, num_prefill=0, retry_share=0.0)


# Without any worker.


def test_workers_that_are_gone_are_waited_for_and_then_the_story_is_told() -> None:
    async def body(fleet: FakeFleet) -> None:
        first, second = fleet.decode
        second.at["start"] = once(raises(errors.Starting("no engine")))
        second.is_starting = True
        first.at["commit 2"] = ends_its_engine(first)
        asking = asyncio.create_task(failure(ask(fleet)))
        await until(lambda: fleet.is_waiting("worker"))
        for worker in fleet.decode:
            worker.record = msgspec.structs.replace(worker.record, state="released")
            worker.crashed.set()
        await fleet.announce()
        error = await asking
        assert type(error) is errors.Unavailable
        assert "no worker could continue the answer within 2" in error.message
        assert "no live decode worker serves 'fake' (none is known)" in error.message
        assert "8 of 245 tokens were written" in error.message
        assert "1 attempt lost (d0: the engine was lost)" in error.message
        assert error.retry_after_s and error.retryable
        assert (error.labels["losses"], error.labels["tokens"]) == ("1", "8")

    run(body, num_prefill=0, num_decode=2, recovery_s=2.0)


def test_who_does_not_come_back_is_waited_for_as_long_as_the_flag_says() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 2"] = fleet.decode[0].crash
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable
        assert "no worker could continue the answer within" in error.message
        assert "of 245 tokens were written; 1 attempt lost (d0: " in error.message
        assert error.retry_after_s

    run(body, num_prefill=0, recovery_s=0.4)


def test_the_deadline_bounds_waiting_and_the_error_says_for_whom() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = ends_its_engine(fleet.decode[0])
        asking = asyncio.create_task(failure(fleet.generation.Generate(request())))
        await until(lambda: fleet.is_waiting("worker"))
        pass_time(300.0)
        error = await asking
        assert type(error) is errors.DeadlineExceeded
        assert (
            "the request was lost; 0 of 245 tokens were written; 1 attempt lost (d0: "
            in error.message
        )

    run(body, num_prefill=0, timeout_s=1000.0, max_request_s=300.0, recovery_s=3000.0)


# Other weights.


def test_an_answer_that_was_begun_goes_on_with_the_same_weights_only() -> None:
    async def body(fleet: FakeFleet) -> None:
        old, new = fleet.decode
        new.record = msgspec.structs.replace(
            worker_record("d1", "decode", address=new.record.address, fingerprint="v2"),
        )
        new.at["start"] = raises(errors.InvalidRequest.of("resume", "of other weights"))
        old.at["commit 2"] = ends_its_engine(old)
        await fleet.announce()
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        await start_anew(fleet, old, "2")
        assert (await asking).text == TEXT
        assert not new.requests

    async def first_to_old(fleet: FakeFleet) -> None:
        fleet.decode[1].record = msgspec.structs.replace(fleet.decode[1].record, state="ready")
        await body(fleet)

    run(first_to_old, num_prefill=0, num_decode=2)


def test_a_request_that_has_no_token_yet_may_take_other_weights() -> None:
    async def body(fleet: FakeFleet) -> None:
        old, new = fleet.decode
        new.record = worker_record("d1", "decode", address=new.record.address, fingerprint="v2")
        old.at["verified"] = ends_its_engine(old)
        await fleet.announce()
        answer = await ask(fleet)
        assert (answer.text, answer.stats.decode_worker) == (TEXT, "d1")

    run(body, num_prefill=0, num_decode=2)


# Prompts in the place of prefill workers.


def test_decode_workers_prefill_a_few_prompts_at_a_time_and_the_rest_waits() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        small = msgspec.structs.replace(worker.record.capacity, max_num_batched_tokens=8)
        cut = msgspec.structs.replace(worker.record.model, prompt_attention="causal_blocks")
        worker.record = msgspec.structs.replace(worker.record, capacity=small, model=cut)
        await fleet.announce()
        go, answering = asyncio.Event(), asyncio.Event()
        worker.at["reserved"] = holds(go)
        worker.at["commit 1"] = holds(answering)
        decoding = pb.DecodingParams(window=1)
        asking = [asyncio.create_task(ask(fleet, decoding=decoding)) for _ in range(4)]
        stalled = "effuse_num_requests_stalled"
        await until(lambda: len(worker.running) == 3)
        await until(lambda: fleet.metric(stalled, reason="seat") == 1)
        assert len(worker.requests) == 3, "32 tokens are four steps' worth, a prompt has 11"
        go.set()
        await until(lambda: len(worker.requests) == 4)
        assert len(worker.running) == 4, "it waited for prompts and not for answers"
        answering.set()
        assert {answer.text for answer in await asyncio.gather(*asking)} == {TEXT}
        (candidate,) = fleet.router.fleet.candidates()
        assert candidate.in_flight.to_prefill == 0

    run(body, num_prefill=0)


# Reports.


def test_workers_are_counted_by_role_and_state_and_models_by_who_is_ready() -> None:
    async def body(fleet: FakeFleet) -> None:
        dead = fleet.decode[0]
        dead.at["start"] = ends_its_engine(dead)
        await ask(fleet)
        await until(lambda: fleet.condition(dead) is Condition.STARTING)
        counts = {("decode", "starting"): 1, ("decode", "ready"): 1, ("prefill", "ready"): 1}

        def is_shown() -> bool:
            return all(
                fleet.metric("effuse_workers", worker_role=role, state=state) == count
                for (role, state), count in counts.items()
            )

        await until(is_shown)
        (model,) = (await fleet.models.ListModels(model_pb2.ListModelsRequest())).models
        assert (model.prefill_workers, model.decode_workers) == (1, 1)
        listed = (await fleet.models.ListWorkers(model_pb2.ListWorkersRequest())).workers
        assert {worker.worker_id: worker.state for worker in listed} == {
            "d0": model_pb2.WORKER_STATE_STARTING,
            "d1": model_pb2.WORKER_STATE_READY,
            "p0": model_pb2.WORKER_STATE_READY,
        }

    run(body, num_decode=2)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_engine_lost_after_the_last_token_takes_nothing_along(reason: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.at["finish"] = ends_its_engine(worker)
        more = 0 if reason == "length" else 20
        stopping = pb.StoppingParams(max_tokens=len(worker.answer) + more)
        output = pb.OutputOptions(token_ids=True)
        answer = await ask(fleet, stopping=stopping, output=output)
        assert answer.token_ids == worker.answer
        assert answer.finish_reason == pb.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
        assert len(worker.requests) == 1
        assert fleet.condition(worker) is not Condition.READY
        assert fleet.metric("effuse_worker_losses_total", worker="d0", reason="ENGINE_LOST") == 1

    run(body)


def test_a_request_that_waits_can_be_looked_up() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.at["start"] = ends_its_engine(worker)
        asking = asyncio.create_task(ask(fleet, request_id="w"))
        await until(lambda: fleet.is_waiting("worker"))
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="w"))
        assert (found.state, found.attempt) == (pb.REQUEST_STATE_RUNNING, 1)
        await start_anew(fleet, worker, "2")
        await asking

    run(body, num_prefill=0)
