"""A fleet without a worker of a kind that a request needs: it waits in the queue, in bounds."""

from __future__ import annotations

import asyncio

import grpc
import msgspec
import pytest
from router.asking import ask, failure, request
from router.fake_workers import FakeWorker
from router.fakes import FakeFleet, run, until

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb

TEXT = "the answer is three"


async def leave(fleet: FakeFleet, *workers: FakeWorker) -> None:
    """These workers are gone, lease and all."""
    for worker in workers:
        worker.record = msgspec.structs.replace(worker.record, state="released")
    await fleet.announce()
    await until(lambda: not set(workers) & {w for w in fleet.workers if fleet.condition(w)})
    await until(lambda: any(fleet.condition(w) for w in fleet.decode) or seats(fleet) == 0)


async def come(fleet: FakeFleet, *workers: FakeWorker) -> None:
    for worker in workers:
        worker.record = msgspec.structs.replace(worker.record, state="ready")
    await fleet.announce()


def seats(fleet: FakeFleet) -> int:
    return fleet.router.admission.slots_of("fake").max_running


async def state(fleet: FakeFleet, request_id: str) -> pb.GetRequestResponse:
    return await fleet.generation.GetRequest(pb.GetRequestRequest(request_id=request_id))


def named(request_id: str) -> pb.GenerateRequest:
    asked = request()
    asked.request_id = request_id
    return asked


def waits(fleet: FakeFleet, number: int = 1) -> bool:
    return fleet.router.admission.num_waiting == number


def test_requests_wait_in_the_queue_for_the_only_decode_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        assert (await ask(fleet)).text == TEXT
        await leave(fleet, *fleet.decode)
        asking = [asyncio.create_task(ask(fleet)) for _ in range(5)]
        named_one = asyncio.ensure_future(fleet.generation.Generate(named("mine")))
        await until(lambda: waits(fleet, 6))
        found = await state(fleet, "mine")
        assert (found.state, found.attempt) == (pb.REQUEST_STATE_QUEUED, 0)
        assert fleet.metric("effuse_num_requests_waiting", model_name="fake") == 6
        assert fleet.metric("effuse_num_requests_running", model_name="fake") == 0
        assert fleet.metric("effuse_num_requests_stalled", reason="worker") == 6
        await come(fleet, *fleet.decode)
        assert {answer.text for answer in await asyncio.gather(*asking)} == {TEXT}
        assert (await named_one).text == TEXT
        assert fleet.metric("effuse_num_requests_stalled", reason="worker") == 0

    run(body, num_prefill=0)


def test_a_router_that_knows_no_model_waits_for_the_first_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        asking = asyncio.create_task(ask(fleet))
        mine = asyncio.create_task(failure(fleet.generation.Generate(named("mine"))))
        wrong = asyncio.create_task(failure(ask(fleet, model="other")))
        await until(lambda: waits(fleet, 3))
        assert (await state(fleet, "mine")).state == pb.REQUEST_STATE_QUEUED
        assert fleet.metric("effuse_num_requests_waiting", model_name="") == 3
        again = await failure(fleet.generation.Generate(named("mine")))
        assert type(again) is errors.AlreadyRunning
        ended = await fleet.generation.CancelRequest(pb.CancelRequestRequest(request_id="mine"))
        assert ended.was_running
        assert type(await mine) is errors.EndedById
        await come(fleet, *fleet.workers)
        assert (await asking).text == TEXT
        error = await wrong
        assert type(error) is errors.NotFound and "serves fake" in error.message
        assert waits(fleet, 0)

    run(body, state="released")


def test_requests_that_wait_for_a_first_model_are_counted_however_long_none_comes() -> None:
    async def body(fleet: FakeFleet) -> None:
        admission, asking = fleet.router.admission, []
        for _ in range(12):  # three times as long as the first one waits
            asking.append(asyncio.create_task(failure(ask(fleet))))
            await asyncio.sleep(0.1)
            assert admission.num_waiting > 0
            assert admission.waiting_by_model() == {"": admission.num_waiting}
        assert asking[0].done()
        assert {type(error) for error in await asyncio.gather(*asking)} == {errors.Unavailable}

    run(body, state="released", recovery_s=0.4)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "never seen"])
def test_cancels_and_deadlines_are_honoured_while_waiting(is_known: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        await come(fleet, *fleet.workers)
        if is_known:
            await ask(fleet)
        await leave(fleet, *fleet.workers)
        late = await failure(fleet.generation.Generate(request(), timeout=0.3))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        call = fleet.generation.Generate(request())
        await until(lambda: waits(fleet))
        call.cancel()
        await until(lambda: waits(fleet, 0))
        assert fleet.router.requests.num_running == 0

    run(body, num_prefill=0, state="released" if not is_known else "ready")


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "never seen"])
def test_the_queue_bounds_those_that_wait(is_known: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        if is_known:
            await ask(fleet)
            await leave(fleet, *fleet.decode)
        asking = [asyncio.create_task(ask(fleet)) for _ in range(3)]
        await until(lambda: waits(fleet, 3))
        error = await failure(ask(fleet))
        assert type(error) is errors.Overloaded and "3 are waiting" in error.message
        await come(fleet, *fleet.decode)
        assert {answer.text for answer in await asyncio.gather(*asking)} == {TEXT}

    run(body, num_prefill=0, max_queue=3, state="ready" if is_known else "released")


def test_after_recovery_s_it_is_told_what_is_missing() -> None:
    async def body(fleet: FakeFleet) -> None:
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable and error.retry_after_s
        assert error.message == (
            "no worker could begin within 0.4 s: no worker has announced a model"
        )
        await come(fleet, *fleet.workers)
        await ask(fleet)
        await leave(fleet, *fleet.decode)
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable and error.retry_after_s
        assert error.message == (
            "no worker could begin within 0.4 s: no live decode worker serves 'fake' "
            "(none is known)"
        )
        assert fleet.router.admission.num_waiting == 0

    run(body, recovery_s=0.4, state="released")


def test_where_prefill_is_remote_the_prefill_worker_is_waited_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        await leave(fleet, *fleet.prefill)
        asking = [asyncio.create_task(ask(fleet)) for _ in range(5)]
        await until(lambda: fleet.metric("effuse_num_requests_stalled", reason="worker") == 5)
        await come(fleet, *fleet.prefill)
        assert {answer.text for answer in await asyncio.gather(*asking)} == {TEXT}
        await leave(fleet, *fleet.prefill)
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable
        assert "no live prefill worker serves 'fake'" in error.message

    run(body, prefill="remote", recovery_s=1.5)


def test_requests_behind_those_that_lack_a_prefill_worker_wait_no_longer_than_these() -> None:
    async def body(fleet: FakeFleet) -> None:
        await leave(fleet, *fleet.prefill)
        began = asyncio.get_running_loop().time()
        ends = await asyncio.gather(*(failure(ask(fleet)) for _ in range(6)))
        assert {type(end) for end in ends} == {errors.Unavailable}
        assert all("no live prefill worker" in end.message for end in ends)
        assert asyncio.get_running_loop().time() - began < 3.0, "1 s for each in turn would be 3"

    run(body, prefill="remote", recovery_s=1.0, max_concurrent_requests=2)
