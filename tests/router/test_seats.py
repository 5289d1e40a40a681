"""How many requests run at once follows what live decode workers can run; the rest waits."""

from __future__ import annotations

import asyncio
import time
from typing import cast
from unittest.mock import Mock

import grpc.aio
import msgspec
import pytest
from router.fake_model import worker_record
from router.fake_workers import FakeDecode, holds
from router.fakes import FakeFleet, run, until

from effuse.placement.leases import FleetView, Snapshot, merge
from effuse.placement.records import Capacity, StoredWorker, WorkerRecord
from effuse.placement.store import Store
from effuse.protos import errors
from effuse.router.admission import LEAST_HOLDS, Admission
from effuse.router.fleet import RoutedFleet
from effuse.router.policy import IDLE, InFlight
from effuse.router.seats import Catalogue
from effuse.v1 import generation_pb2 as pb


def resized(record: WorkerRecord, max_num_seqs: int) -> WorkerRecord:
    capacity = Capacity(
        total_pages=256, page_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=512
    )
    return msgspec.structs.replace(record, capacity=capacity)


def ask(fleet: FakeFleet, model: str | None = None) -> asyncio.Task[pb.GenerateResponse]:
    async def one() -> pb.GenerateResponse:
        request = pb.GenerateRequest(prompt="?", model=model)
        return await fleet.generation.Generate(request, timeout=30)

    return asyncio.create_task(one())


async def give_seats(fleet: FakeFleet, worker: FakeDecode, max_num_seqs: int) -> None:
    worker.record = resized(worker.record, max_num_seqs)
    await fleet.announce()
    await until(lambda: fleet.router.admission.max_running == max_num_seqs)


@pytest.mark.parametrize(
    ("seats", "most", "fitting"), [([3, 4], 100, 7), ([3, 4], 5, 5), ([], 9, 0)]
)
def test_seats_add_up_within_the_limit(seats: list[int], most: int, fitting: int) -> None:
    admission = Admission(most, 0)
    admission.fit_seats({"m": seats})
    assert admission.slots_of("m").max_running == fitting


def test_models_are_those_of_the_workers_now() -> None:
    view = FleetView(cast(Store, None))
    catalogue = Catalogue(RoutedFleet(view, "auto", time.monotonic))
    for present in ("ab", "ab", "b", "", "a"):
        records = [worker_record(f"d-{name}", "decode", model=name) for name in present]
        seen = [(StoredWorker.of(record), 60.0) for record in records]
        now = time.monotonic()
        view._snapshot = merge(Snapshot({}, False), seen, now, now)
        assert sorted(catalogue.live()) == sorted(present)
        assert catalogue.live() is catalogue.live(), "read once for each view"


def test_a_model_has_the_longest_context_of_its_workers() -> None:
    view = FleetView(cast(Store, None))
    catalogue = Catalogue(RoutedFleet(view, "auto", time.monotonic))
    seen = []
    for name, length in (("d-a", 128), ("d-b", 512), ("d-c", 256)):
        record = worker_record(name, "decode")
        model = msgspec.structs.replace(record.model, max_model_len=length)
        seen.append((StoredWorker.of(msgspec.structs.replace(record, model=model)), 60.0))
    now = time.monotonic()
    view._snapshot = merge(Snapshot({}, False), seen, now, now)
    assert catalogue.live()["fake"].max_model_len == 512


def test_a_worker_is_never_asked_for_more_than_its_seats() -> None:
    async def body(fleet: FakeFleet) -> None:
        worker = fleet.decode[0]
        await give_seats(fleet, worker, 2)
        most = 0

        async def count() -> None:
            nonlocal most
            most = max(most, len(worker.running))
            await asyncio.sleep(0)

        worker.at["start"] = worker.at["commit 2"] = count
        answers = await asyncio.gather(*(ask(fleet) for _ in range(12)))
        assert {answer.text for answer in answers} == {"the answer is three"}
        assert most == 2

    run(body)


def test_a_freed_seat_has_one_prompt_looked_up_for_all_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look-up of a long prompt takes a millisecond, and hundreds may wait."""

    async def body(fleet: FakeFleet) -> None:
        routed, record = fleet.router.fleet, fleet.decode[0].record
        full = InFlight(requests=record.capacity.max_num_seqs)
        routed.count_in_flight(record, IDLE, full)
        asking = [ask(fleet) for _ in range(8)]
        await until(
            lambda: fleet.metric("effuse_num_requests_stalled", reason="seat") == len(asking)
        )
        needs = Mock(wraps=routed.need)
        cached = Mock(wraps=routed.prompts.cached)
        monkeypatch.setattr(routed, "need", needs)
        monkeypatch.setattr(routed.prompts, "cached", cached)
        routed.announce_change()
        await until(lambda: needs.call_count == len(asking))
        assert cached.call_count == 1
        routed.count_in_flight(record, full, IDLE)
        routed.announce_change()
        await asyncio.gather(*asking)

    run(body)


def test_what_finds_neither_a_seat_nor_room_to_wait_is_refused() -> None:
    async def body(fleet: FakeFleet) -> None:
        await give_seats(fleet, fleet.decode[0], 1)
        go = asyncio.Event()
        fleet.decode[0].at["start"] = holds(go)
        asking = [ask(fleet), ask(fleet)]
        await until(lambda: fleet.router.admission.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(fleet)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = errors.from_rpc_error(caught.value, "router")
        assert "1 request is running and 1 is waiting" in error.message
        assert error.retry_after_s
        go.set()
        await asyncio.gather(*asking)

    run(body, max_queue=1)


def test_one_that_cannot_be_answered_in_time_is_refused_before_a_worker_is_asked() -> None:
    async def body(fleet: FakeFleet) -> None:
        worker, admission = fleet.decode[0], fleet.router.admission
        await give_seats(fleet, worker, 1)
        for _ in range(LEAST_HOLDS):
            admission.slots_of("fake").holds.add(5.0, 256, is_answered=True)
        go = asyncio.Event()
        worker.at["start"] = holds(go)
        running = ask(fleet)
        await until(lambda: len(worker.running) == 1)
        waiting = ask(fleet)  # has 30 s, of which it needs 10
        await until(lambda: admission.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.generation.Generate(pb.GenerateRequest(prompt="?"), timeout=9)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = errors.from_rpc_error(caught.value, "router")
        assert "after its deadline" in error.message
        assert (
            error.retry_after_s is not None and 5 < error.retry_after_s < 9
        )  # of 15, less what is left of 9
        assert (admission.num_running, admission.num_waiting, admission.num_shed) == (1, 1, 1)
        go.set()
        await asyncio.gather(running, waiting)
        assert len(worker.served) == 2

    run(body)


def test_seats_that_come_are_given_to_those_who_wait() -> None:
    async def body(fleet: FakeFleet) -> None:
        worker = fleet.decode[0]
        await give_seats(fleet, worker, 1)
        go = asyncio.Event()
        worker.at["start"] = holds(go)
        asking = [ask(fleet) for _ in range(3)]
        await until(lambda: fleet.router.admission.num_waiting == 2)
        await give_seats(fleet, worker, 3)
        await until(lambda: len(worker.running) == 3)
        go.set()
        await asyncio.gather(*asking)

    run(body)


def test_a_busy_model_takes_nothing_from_another_one() -> None:
    """Its requests wait for its own workers, and the other one's go to theirs at once."""

    async def body(fleet: FakeFleet) -> None:
        admission = fleet.router.admission
        for worker in (fleet.decode[1], fleet.prefill[1]):
            info = msgspec.structs.replace(worker.record.model, name="other")
            worker.record = msgspec.structs.replace(worker.record, model=info)
        fleet.decode[0].record = resized(fleet.decode[0].record, 2)
        fleet.decode[1].record = resized(fleet.decode[1].record, 2)
        await fleet.announce()
        await until(lambda: admission.max_running == 4)
        go = asyncio.Event()
        fleet.decode[0].at["start"] = holds(go)
        asking = [ask(fleet, "fake") for _ in range(12)]
        await until(lambda: admission.num_waiting == 10)
        answers = await asyncio.gather(*(ask(fleet, "other") for _ in range(5)))
        assert {answer.text for answer in answers} == {"the answer is three"}
        assert admission.waiting_by_model() == {"fake": 10, "other": 0}
        waiting = "effuse_num_requests_waiting"
        assert fleet.metric(waiting, model_name="fake") == 10
        assert fleet.metric(waiting, model_name="other") == 0
        go.set()
        await asyncio.gather(*asking)
        assert (len(fleet.decode[0].served), len(fleet.decode[1].served)) == (12, 5)

    run(body, num_prefill=2, num_decode=2)
