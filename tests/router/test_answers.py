"""Several answers to one request: one prompt, lives of their own, one stream, one end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from router.asking import ask, failure, request
from router.fake_model import ids_of, request_of
from router.fake_workers import FakeDecode, Point, ends_its_engine, holds, once, raises
from router.fakes import FakeFleet, pass_time, run, until

from effuse.protos import errors
from effuse.router.client import describe, progress_text, stats_of
from effuse.router.request import Costs
from effuse.router.request_states import Event
from effuse.v1 import generation_pb2 as pb

TEXTS = ["the answer is three", "it is four", "there are seven pens", "none"]
WANTED = pb.OutputOptions(token_ids=True)


def several(body: Callable[[FakeFleet], Awaitable[None]], **settings: Any) -> None:
    """Runs `body` with a fleet whose decode workers have four answers."""

    async def prepared(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.others = [ids_of(text) for text in TEXTS[1:]]
        await body(fleet)

    run(prepared, **settings)


async def stream(fleet: FakeFleet, **fields: object) -> list[pb.GenerateStreamResponse]:
    asked = pb.GenerateStreamRequest(request=request(**fields))
    return [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]


def texts_of(answer: pb.GenerateResponse) -> list[str]:
    return [one.text for one in (answer, *answer.others)]


def test_the_prompt_is_prefilled_once_and_each_answer_comes_from_the_same_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet, n=4, output=WANTED, sampling=pb.SamplingParams(seed=9))
        assert texts_of(answer) == TEXTS
        assert [list(one.token_ids) for one in (answer, *answer.others)] == list(map(ids_of, TEXTS))
        whole = [answer, *answer.others]
        assert [one.usage.completion_tokens for one in whole] == [len(ids_of(t)) for t in TEXTS]
        assert [one.usage.prompt_tokens for one in whole] == [11, 0, 0, 0]
        assert {(one.seed, one.model, one.stats.decode_worker) for one in whole} == {
            (9, "fake", whole[0].stats.decode_worker)
        }
        (prefill,) = [worker for worker in fleet.prefill if worker.prompts]
        assert len(prefill.prompts) == 1
        (decode,) = [worker for worker in fleet.decode if worker.requests]
        asked = decode.requests
        assert [one.WhichOneof("prefill") for one in asked] == ["remote", *["local"] * 3]
        assert sorted(one.sampling.answer_index for one in asked) == [0, 1, 2, 3]
        assert len({one.group for one in asked}) == 1 and asked[0].group
        # A worker knows attempts by the request's id and their number.
        assert sorted(one.attempt.attempt for one in asked) == [1, 2, 3, 4]
        assert len({one.attempt.request_id for one in asked}) == 1

    several(body, num_prefill=2, num_decode=2)


def test_a_request_for_one_answer_is_what_it_was() -> None:
    async def body(fleet: FakeFleet) -> None:
        for fields in ({}, {"n": 1}):
            answer = await ask(fleet, **fields)
            assert texts_of(answer) == TEXTS[:1]
        for asked in fleet.decode[0].requests:
            assert (asked.group, asked.sampling.answer_index, asked.attempt.attempt) == ("", 0, 1)

    several(body)


def test_answers_of_a_canvas_have_nothing_to_share_and_begin_at_once() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        reached = asyncio.Event()

        async def start() -> None:
            if len(worker.running) == 3:
                reached.set()
            await reached.wait()

        worker.at["start"] = start  # before any reservation
        canvas = pb.DecodingParams(algorithm=pb.ALGORITHM_LLADA)
        assert texts_of(await ask(fleet, n=3, decoding=canvas)) == TEXTS[:3]
        assert {(one.group, one.WhichOneof("prefill")) for one in worker.requests} == {
            ("", "local")
        }

    several(body)


def test_a_stream_says_whose_each_event_is_and_ends_with_the_last_answer() -> None:
    async def body(fleet: FakeFleet) -> None:
        output = pb.OutputOptions(token_ids=True, drafts=True, echo=True)
        events = await stream(fleet, n=3, output=output)
        assert events[0].HasField("echo")
        assert sum(event.HasField("echo") for event in events) == 1
        for index in range(3):
            own = [event for event in events if event.answer_index == index]
            commits = [event.commit for event in own if event.HasField("commit")]
            assert "".join(commit.text for commit in commits) == TEXTS[index]
            ids = [token for commit in commits for token in commit.token_ids]
            assert ids == ids_of(TEXTS[index])
            assert own[-1].HasField("finished") and any(e.HasField("draft") for e in own)
            assert sum(event.HasField("finished") for event in own) == 1
        assert events[-1].HasField("finished")
        assert len({event.request_id for event in events}) == 1

    several(body)


def test_an_answer_that_is_lost_goes_on_by_itself() -> None:
    """Its worker's engine ends while it runs only this request, between two of its blocks."""

    async def body(fleet: FakeFleet) -> None:
        lost = once(raises(errors.EngineLost("the engine was lost")))
        for worker in fleet.decode:
            worker.at["1/commit 1"] = lost
        assert texts_of(await ask(fleet, n=3)) == TEXTS[:3]
        asked = [one for worker in fleet.decode for one in worker.requests]
        again = [one for one in asked if one.HasField("resume")]
        assert {one.sampling.answer_index for one in again} == {1}
        assert len(again) == 1 and list(again[0].resume.committed_token_ids) == ids_of("it i")
        assert {one.sampling.answer_index for one in asked} == {0, 1, 2} and len(asked) == 4

    several(body, num_decode=2)


def test_a_decode_worker_that_is_lost_takes_no_answer_along() -> None:
    async def body(fleet: FakeFleet) -> None:
        ended = {worker.worker_id for worker in fleet.decode}

        def dies(worker: FakeDecode) -> Point:
            async def die() -> None:
                if len(ended) == 2:  # the first one that gets there
                    ended.discard(worker.worker_id)
                if worker.worker_id not in ended:
                    await ends_its_engine(worker)()

            return die

        for worker in fleet.decode:
            worker.at["commit 1"] = dies(worker)
        assert texts_of(await ask(fleet, n=3)) == TEXTS[:3]
        (left,) = (worker for worker in fleet.decode if worker.worker_id in ended)
        assert sorted(one.sampling.answer_index for one in left.requests) == [0, 1, 2]
        assert len(ended) == 1

    several(body, num_decode=2)


def test_where_the_first_reservation_is_lost_others_go_where_the_next_one_is() -> None:
    async def body(fleet: FakeFleet) -> None:
        tried: list[str] = []

        def refuses(worker: FakeDecode) -> Point:
            async def refuse() -> None:
                tried.append(worker.worker_id)
                if len(tried) == 1:
                    raise errors.EngineLost("the engine was lost")

            return refuse

        for worker in fleet.decode:
            worker.at["start"] = refuses(worker)
        assert texts_of(await ask(fleet, n=3)) == TEXTS[:3]
        assert len(set(tried[1:])) == 1 and tried[0] != tried[1]
        assert len([p for worker in fleet.prefill for p in worker.prompts]) == 2

    several(body, num_decode=2)


def test_an_answer_that_fails_for_good_fails_the_request_and_ends_the_others() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        reached = [asyncio.Event() for _ in range(2)]
        worker.at["1/commit 1"] = holds(asyncio.Event(), reached[0])
        worker.at["3/commit 0"] = holds(asyncio.Event(), reached[1])

        async def fail() -> None:
            for event in reached:
                await event.wait()
            raise errors.InvalidRequest.of("max_tokens", "planted")

        worker.at["2/commit 0"] = fail
        error = await failure(ask(fleet, n=4, request_id="mine"))
        assert isinstance(error, errors.InvalidRequest) and "planted" in error.message
        await fleet.idle()
        ids = {one.attempt.transfer_id: one.sampling.answer_index for one in worker.requests}
        await until(lambda: {ids[one] for one in worker.aborted} >= {1, 3})
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert found.state == pb.REQUEST_STATE_FAILED
        assert fleet.router.admission.num_running == 0

    several(body)


@pytest.mark.parametrize("how", ["client", "deadline", "id"])
def test_all_end_together(how: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        reached, counted = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            if len(worker.running) == 3:
                reached.set()
            await counted.wait()

        worker.at["commit 1"] = hold
        call = fleet.generation.Generate(request(n=3, request_id="mine"), timeout=30)
        asking = asyncio.ensure_future(call)
        await reached.wait()
        running = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert running.state == pb.REQUEST_STATE_RUNNING
        assert (running.decode_worker, running.prefill_worker) == ("d0", "p0")
        if how == "client":
            call.cancel()
        elif how == "deadline":
            pass_time(30)
        elif how == "id":
            ended = await fleet.generation.CancelRequest(pb.CancelRequestRequest(request_id="mine"))
            assert ended.was_running
        await asyncio.wait({asking})
        await fleet.idle()
        await until(lambda: len(set(worker.aborted)) == 3)  # an abort is a call of its own
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert found.state == pb.REQUEST_STATE_CANCELLED
        assert fleet.router.admission.num_running == 0
        assert all(c.in_flight.requests == 0 for c in fleet.router.fleet.candidates())

    several(body)


def test_all_answers_are_kept_and_given_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        first = await ask(fleet, n=3, request_id="mine", output=WANTED)
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        assert await ask(fleet, n=3, request_id="mine", output=WANTED) == first
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert found.answer == first
        held = fleet.store.placements["mine"]
        assert held.num_tokens == sum(len(ids_of(text)) for text in TEXTS[:3])
        assert len(fleet.decode[0].requests) == 3

    several(body)


def test_a_stream_of_several_answers_is_given_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        await stream(fleet, n=3, request_id="mine")
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        again = await stream(fleet, n=3, request_id="mine")
        kinds = [(event.answer_index, event.WhichOneof("event")) for event in again]
        assert kinds == [(index, kind) for index in range(3) for kind in ("commit", "finished")]
        assert [event.commit.text for event in again[::2]] == TEXTS[:3]
        assert len(fleet.decode[0].requests) == 3

    several(body)


@pytest.mark.parametrize("n", [0, 9, 65])
def test_how_many_are_taken_is_bounded(n: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        error = await failure(ask(fleet, n=n))
        assert isinstance(error, errors.InvalidRequest)
        assert [one.field for one in error.violations] == ["n"]
        assert not fleet.decode[0].requests

    several(body)


async def limit_seats(fleet: FakeFleet, count: int) -> None:
    replace = msgspec.structs.replace
    for worker in fleet.decode:
        capacity = replace(worker.record.capacity, max_num_seqs=count)
        worker.record = replace(worker.record, capacity=capacity)
    await fleet.announce()


def test_who_gets_a_seat_once_the_others_have_ended_has_the_prompt_handed_over_anew() -> None:
    async def body(fleet: FakeFleet) -> None:
        await limit_seats(fleet, 1)
        assert texts_of(await ask(fleet, n=2)) == TEXTS[:2]
        asked = fleet.decode[0].requests
        assert [one.WhichOneof("prefill") for one in asked] == ["remote", "remote"]

    several(body, prefill="remote")


def test_answers_beyond_the_seats_wait_for_one_and_all_are_given() -> None:
    async def body(fleet: FakeFleet) -> None:
        await limit_seats(fleet, 2)
        (worker,), counts = fleet.decode, list[int]()

        async def count() -> None:
            await until(lambda: len(worker.running) == 2 or len(worker.served) == 4)
            counts.append(len(worker.running))

        worker.at["commit 0"] = count
        assert texts_of(await ask(fleet, n=4)) == TEXTS
        assert max(counts) == 2

    several(body)


def test_answers_that_wait_for_seats_are_told_to_other_routers() -> None:
    """Else these would take each seat that becomes free, and such answers would never be given."""

    async def body(fleet: FakeFleet) -> None:
        await limit_seats(fleet, 1)
        router, go = fleet.router, asyncio.Event()

        async def told() -> dict[str, int]:
            await router.seats.exchange(router.id, router.ports.address)
            return fleet.store.routers[router.id].waiting_by_model

        fleet.decode[0].at["commit 0"] = holds(go)
        several_answers = asyncio.create_task(ask(fleet, n=3))
        stalled = "effuse_num_requests_stalled"
        await until(lambda: fleet.metric(stalled, reason="seat") == 2)
        assert await told() == {"fake": 2}
        another = asyncio.create_task(ask(fleet))
        await until(lambda: router.admission.num_waiting == 1)
        assert await told() == {"fake": 3}
        go.set()
        await asyncio.gather(several_answers, another)
        assert await told() == {}

    several(body)


def test_what_a_request_counts_is_its_answers_that_have_not_ended() -> None:
    async def body(fleet: FakeFleet) -> None:
        admission, go, last = fleet.router.admission, asyncio.Event(), asyncio.Event()
        at = fleet.decode[0].at
        at["commit 0"] = holds(go)
        at["2/commit 0"] = holds(last)
        asking = asyncio.create_task(ask(fleet, n=3))
        await until(lambda: len(fleet.decode[0].running) == 3)
        assert admission.num_running == 3
        go.set()
        await until(lambda: admission.num_running == 1)
        assert not asking.done()
        last.set()
        await asking
        assert admission.num_running == 0
        assert fleet.metric("effuse_requests_total", model_name="fake", status="OK") == 1
        assert fleet.metric("effuse_prompt_tokens_total", model_name="fake") == 11
        tokens = sum(len(ids_of(text)) for text in TEXTS[:3])
        assert fleet.metric("effuse_generation_tokens_total", model_name="fake") == tokens

    several(body, metrics=True, metrics_port=0)


def test_the_costs_of_answers_add_up() -> None:
    whole = request_of("a")
    first, second = whole.split([whole.answer.text, request_of().answer.text], "g")
    assert (first.name, second.name, second.index) == ("a", "a/1", 1)
    assert first.holder != second.holder, "each runs alone if it must"
    assert first.digest == second.digest == request_of("b").digest, "engines die of what is asked"
    assert [one.begin_attempt("p", "d", 0.0) for one in (first, second)] == [1, 2]
    first.answer.apply_event(Event.LOST, 0.0)
    assert first.begin_attempt("p", "d", 0.0) == 3
    first.costs = Costs(
        kv_bytes=64, handoff_s=0.5, forwards=3, earlier_forwards=4, commit_times=[3.0, 4.0]
    )
    second.costs = Costs(forwards=2, preemptions=1, commit_times=[2.0])
    whole.add_up()
    stats = stats_of(whole, 5.0)
    assert (stats.kv_bytes, stats.forward_passes, stats.preemptions) == (64, 9, 1)
    assert stats.time_to_first_block.ToSeconds() == 2
    assert (whole.attempts.count, describe(whole).attempt) == (3, 2)
    assert progress_text(whole) == "0 of 2 answers were complete"
    request_of().add_up()  # of one answer nothing is added
