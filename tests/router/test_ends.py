"""Facts of an answer's making: its seed, and its end."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from router.asking import ask, request
from router.fake_model import EOS, ids_of
from router.fake_workers import FakeWorker, ends_its_engine
from router.fakes import FakeFleet, run
from router.http_calls import CHAT, client_of
from router.http_calls import run as run_with_http

from effuse.placement.records import PlacementRecord
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

DEAD = PlacementRecord(
    request_id="mine", attempt=1, transfer_id="t", router_id="router-x", state="running",
    model="fake", seed=2**64 - 1,
)  # fmt: skip


def seeds(fleet: FakeFleet) -> list[int]:
    """Of all attempts, in the order of the workers."""
    return [one.sampling.seed for worker in fleet.decode for one in worker.requests]


def test_a_seed_that_is_not_set_is_drawn_anew_and_told() -> None:
    async def body(fleet: FakeFleet) -> None:
        told = [(await ask(fleet)).seed for _ in range(2)]
        asked = pb.GenerateStreamRequest(request=request())
        events = [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]
        told.append(events[-1].finished.seed)
        assert seeds(fleet) == told
        assert len(set(told)) == 3

    run(body)


async def promise(fleet: FakeFleet, *workers: FakeWorker) -> None:
    """Announces these workers as deterministic, and no others."""
    for worker in fleet.workers:
        model = replace(worker.record.model, deterministic=worker in workers)
        told = (("weights", "w"), ("deterministic", str(worker in workers).lower()))
        worker.record = replace(worker.record, model=model, fingerprint=told)
    await fleet.announce()


def test_an_answer_tells_whether_its_workers_are_deterministic() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of("two")]

        async def told(request_id: str) -> set[bool]:
            asked = pb.GenerateStreamRequest(request=request(request_id=request_id, n=2))
            events = [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]
            ends = [one.finished for one in events if one.HasField("finished")]
            await fleet.idle()
            assert len(ends) == 2
            return {one.deterministic for one in ends}

        # the second time as it was kept
        assert [await told("older"), await told("older")] == [{False}, {False}]
        await promise(fleet)
        assert await told("plain") == {False}
        await promise(fleet, *fleet.workers)
        assert [await told("same"), await told("same")] == [{True}, {True}]
        answer = await ask(fleet, n=2)
        assert [one.deterministic for one in (answer, *answer.others)] == [True, True]
        kept = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="same"))
        assert kept.answer.deterministic

    run(body)


def test_a_model_is_deterministic_if_all_workers_that_serve_it_are() -> None:
    async def body(fleet: FakeFleet) -> None:
        async def told() -> bool:
            found = await fleet.models.GetModel(model_pb2.GetModelRequest(name="fake"))
            return found.model.deterministic

        assert not await told()
        for some in (fleet.decode, fleet.prefill, fleet.workers):
            await promise(fleet, *some)
            assert await told() == (len(some) == len(fleet.workers))

    run(body, num_decode=2)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_seed_that_is_set_is_used_and_told(seed: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet, sampling=pb.SamplingParams(seed=seed))
        assert [answer.seed, *seeds(fleet)] == [seed, seed]

    run(body)


def test_a_stream_tells_the_seed_with_the_first_tokens_of_each_answer() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of("two")]
        for _ in range(2):  # the second time as it was kept
            asked = pb.GenerateStreamRequest(request=request(request_id="mine", n=2))
            events = [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]
            first = [one for one in events if one.commit.num_tokens and not one.commit.token_offset]
            assert {one.answer_index for one in first} == {0, 1}
            assert {one.seed for one in first} == {seeds(fleet)[0]} == {events[-1].finished.seed}
            assert [one for one in events if one.HasField("seed")] == first
            await fleet.idle()
        assert len(seeds(fleet)) == 2

    run(body)


def test_a_drawn_seed_outlives_the_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        first, second = fleet.decode
        second.at["commit 1"] = ends_its_engine(second)
        for _ in range(2):  # one of them begins on the worker that dies
            answer = await ask(fleet)
            if second.requests:
                break
        assert [one.sampling.seed for one in second.requests] == [answer.seed]
        assert first.requests[-1].sampling.seed == answer.seed
        assert first.requests[-1].HasField("resume")

    run(body, num_decode=2)


def test_who_takes_a_request_over_draws_as_its_first_router_did() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.store.placements["mine"] = DEAD
        answer = await ask(fleet, request_id="mine")
        assert [answer.seed, *seeds(fleet)] == [DEAD.seed, DEAD.seed]
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        assert fleet.store.placements["mine"].seed == DEAD.seed
        own = msgspec.structs.replace(DEAD, request_id="own")
        fleet.store.placements["own"] = own
        answer = await ask(fleet, request_id="own", sampling=pb.SamplingParams(seed=5))
        assert answer.seed == 5

    run(body)


@pytest.mark.parametrize(
    ("stopping", "end_token_id", "stop_string"),
    [
        (pb.StoppingParams(), EOS, None),
        (pb.StoppingParams(stop=["nothing", "is"]), None, "is"),
        (pb.StoppingParams(max_tokens=6), None, None),
    ],
    ids=["an end id", "a stop string", "its length"],
)
def test_an_answer_tells_what_ended_it(
    stopping: pb.StoppingParams, end_token_id: int | None, stop_string: str | None
) -> None:
    async def body(fleet: FakeFleet) -> None:
        asked = request(request_id="mine", stopping=stopping)
        answer = await fleet.generation.Generate(asked, timeout=30)
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        again = pb.GenerateStreamRequest(request=asked)
        kept = [event async for event in fleet.generation.GenerateStream(again, timeout=30)]
        fresh = pb.GenerateStreamRequest(request=request(stopping=stopping))
        new = [event async for event in fleet.generation.GenerateStream(fresh, timeout=30)]
        is_stop = end_token_id is not None or stop_string is not None
        reason = pb.FINISH_REASON_STOP if is_stop else pb.FINISH_REASON_LENGTH
        for told in (answer, kept[-1].finished, new[-1].finished):
            assert told.finish_reason == reason
            assert (told.end_token_id if told.HasField("end_token_id") else None) == end_token_id
            assert (told.stop_string if told.HasField("stop_string") else None) == stop_string

    run(body)


def test_a_stop_string_in_what_was_held_back_counts_though_the_engine_is_lost_then() -> None:
    """The last token leaves a character open, which nothing completes any more."""

    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.answer = ids_of("a🙂")[:-1]
        worker.at["finish"] = ends_its_engine(worker)
        stop = "\N{REPLACEMENT CHARACTER}"
        stopping = pb.StoppingParams(max_tokens=len(worker.answer), stop=[stop])
        answer = await ask(fleet, stopping=stopping)
        assert (answer.text, answer.stop_string) == ("a", stop)
        assert answer.finish_reason == pb.FINISH_REASON_STOP

    run(body)


@pytest.mark.parametrize("value", ["true", "false", None])
def test_an_answer_over_http_shows_whether_it_is_deterministic(value: str | None) -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.workers:
            told = () if value is None else (("deterministic", value),)
            worker.record = replace(worker.record, fingerprint=told)
        await fleet.announce()
        client = client_of(fleet)
        whole = await client.chat.completions.create(model="fake", messages=CHAT)
        expected = {"deterministic": value == "true"}
        assert whole.model_extra == expected
        stream = await client.completions.create(model="fake", prompt="how many?", stream=True)
        extras = [chunk.model_extra async for chunk in stream]
        assert extras[-1] == expected and not any(extras[:-1])

    run_with_http(body)
