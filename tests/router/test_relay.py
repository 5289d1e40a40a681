"""The relay between a client and fake workers: one good answer, whatever dies below."""

from __future__ import annotations

import asyncio

import grpc.aio
import msgspec
import pytest
from router.fakes import (
    ANSWER,
    BLOCK_SIZE,
    EOS,
    PROMPT,
    FakeFleet,
    byte_tokenizer,
    holds,
    ids_of,
    once,
    raises,
    run,
)

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

TEXT = "the answer is three"


def decode(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids))


async def ask(fleet: FakeFleet, **fields: object) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    return await fleet.generation.Generate(request, timeout=10)


async def failure(fleet: FakeFleet, **fields: object) -> errors.EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, **fields)
    return errors.from_rpc_error(caught.value, "router")


async def stream(fleet: FakeFleet, **fields: object) -> list[pb.GenerateStreamResponse]:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    return [event async for event in fleet.generation.GenerateStream(request, timeout=10)]


def text_of(events: list[pb.GenerateStreamResponse]) -> str:
    return "".join(event.commit.text for event in events)


def test_an_answer_comes_through_both_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet, output=pb.OutputOptions(token_ids=True))
        assert answer.text == TEXT
        assert answer.finish_reason == pb.FINISH_REASON_STOP
        assert list(answer.token_ids) == ids_of(TEXT)
        assert (answer.model, answer.usage.prompt_tokens) == ("fake", len("how many?") + 2)
        assert answer.usage.completion_tokens == len(ids_of(TEXT))
        stats = answer.stats
        assert (stats.prefill_worker, stats.decode_worker, stats.connector) == ("p0", "d0", "zmq")
        assert (stats.kv_bytes, stats.kv_pages) == (64, 1)
        assert stats.forward_passes == answer.usage.completion_tokens
        assert stats.tokens_per_forward == 1.0
        assert stats.handoff_s == pytest.approx(0.01)
        assert 0 < stats.prefill_s <= stats.first_block_s <= stats.total_s
        assert fleet.prefill[0].prompts == [[PROMPT, *ids_of("how many?"), ANSWER]]
        assert not fleet.prefill[0].aborted + fleet.decode[0].aborted

    run(body)


def test_settings_reach_the_decode_worker_resolved() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(
            fleet,
            request_id="r-1",
            sampling=pb.SamplingParams(temperature=0.5, seed=2**64 - 1),
            stopping=pb.StoppingParams(max_tokens=9, stop_token_ids=[3]),
            decoding=pb.DecodingParams(window=2),
        )
        (request,) = fleet.decode[0].requests
        assert (request.attempt.request_id, request.attempt.attempt) == ("r-1", 1)
        assert (request.max_tokens, list(request.stop_token_ids)) == (9, [3, EOS])
        assert (request.sampling.temperature, request.sampling.seed) == (0.5, 2**64 - 1)
        assert (request.settings.algorithm, request.settings.window) == ("d2f", 2)
        assert request.remote.worker_id == "p0"
        assert not request.HasField("resume")

    run(body)


def test_a_fleet_without_prefill_workers_prefills_locally() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert fleet.decode[0].requests[0].HasField("local")
        stats = answer.stats
        assert (stats.prefill_worker, stats.connector, stats.kv_bytes) == ("", "", 0)

    run(body, num_prefill=0)


def test_a_stream_is_append_only_with_one_end() -> None:
    async def body(fleet: FakeFleet) -> None:
        events = await stream(fleet)
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["commit"] * (len(kinds) - 1) + ["finished"]
        assert text_of(events) == TEXT
        offset = 0
        for event in events[:-1]:
            assert event.commit.token_offset == offset
            assert not event.commit.token_ids
            offset += event.commit.num_tokens
        assert events[-1].finished.usage.completion_tokens == offset
        assert {event.request_id for event in events} == {events[0].request_id}

    run(body)


def test_drafts_are_relayed_where_asked_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        events = await stream(fleet, output=pb.OutputOptions(drafts=True))
        drafts = [event.draft for event in events if event.HasField("draft")]
        assert drafts[0].text == "t░e "
        assert (drafts[0].token_offset, drafts[0].num_masks) == (0, 1)
        assert drafts[-1].text.count("░") == drafts[-1].num_masks
        assert text_of(events) == TEXT

    run(body)


def test_a_drafts_prompt_tail_is_not_shown() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.HasField("draft"):
                response.draft.token_offset = -2
            return response

        fleet.decode[0].twist = twist
        events = await stream(fleet, output=pb.OutputOptions(drafts=True))
        draft = next(event.draft for event in events if event.HasField("draft"))
        assert (draft.text, draft.token_offset) == ("e ", -2)

    run(body, num_prefill=0)


def test_length_is_told_apart_from_stop() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].stopped = False
        answer = await ask(fleet, stopping=pb.StoppingParams(max_tokens=6))
        assert (answer.text, answer.finish_reason) == (TEXT[:6], pb.FINISH_REASON_LENGTH)

    run(body)


@pytest.mark.parametrize("stop", [" is", "is", "wer is th"])
def test_a_stop_string_across_commits_ends_both_workers(stop: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        held = asyncio.Event()
        fleet.decode[0].at["commit 4"] = holds(held)
        events = await stream(fleet, stopping=pb.StoppingParams(stop=[stop, "nothing"]))
        assert text_of(events) == TEXT[: TEXT.index(stop)]
        finished = events[-1].finished
        assert finished.finish_reason == pb.FINISH_REASON_STOP
        counted = sum(event.commit.num_tokens for event in events)
        end = TEXT.index(stop) + len(stop)
        tokens = next(n for n in range(99) if len(decode(ids_of(TEXT)[:n])) >= end)
        assert finished.usage.completion_tokens == counted == tokens
        await fleet.idle()
        await fleet.decode[0].abort_came.wait()
        assert len(fleet.decode[0].requests) == 1

    run(body)


# What breaks, and the rung that follows.


def test_another_prefill_worker_takes_over() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["start"] = raises(errors.Overloaded("the queue is full"))
        fleet.prefill[1].at["start"] = fleet.prefill[0].at["start"]
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert answer.stats.prefill_worker == ""  # both refused: decode did it itself
        # An attempt that failed soon may never have reached the decode worker.
        attempts = {r.attempt.attempt: r.WhichOneof("prefill") for r in fleet.decode[0].requests}
        assert attempts.pop(3) == "local"
        assert set(attempts.values()) <= {"remote"}
        transfers = {r.attempt.transfer_id for r in fleet.decode[0].requests}
        assert len(transfers) == len(fleet.decode[0].requests)

    run(body, num_prefill=2)


@pytest.mark.parametrize("point", ["start", "computed", "reservation"])
def test_a_prefill_worker_that_dies_is_replaced(point: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        victim = fleet.prefill[0]
        victim.at[point] = victim.crash
        answer = await ask(fleet)
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, "p1")
        await fleet.decode[0].idle.wait()
        await fleet.decode[0].abort_came.wait()
        first = fleet.decode[0].requests[0].attempt
        assert fleet.decode[0].aborted == [first.transfer_id]

    run(body, num_prefill=2)


def test_without_another_prefill_worker_and_local_forbidden_it_is_unavailable() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["computed"] = raises(errors.TransferFailed("no route to the pool"))
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert "no route to the pool" in error.message
        assert error.retry_after_s
        assert len(fleet.decode[0].requests) == 1

    run(body, prefill="remote")


def test_a_prefill_worker_that_dies_after_its_push_is_not_missed() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["pushed"] = raises(errors.Unavailable("shutting down"))
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 0"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet))
        await reached.wait()
        await fleet.prefill[0].idle.wait()
        go.set()
        assert (await asking).text == TEXT
        assert len(fleet.decode[0].requests) == 1

    run(body)


def test_a_prefill_worker_that_never_ends_its_call_holds_nobody_up() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["pushed"] = holds(asyncio.Event())
        assert (await ask(fleet)).text == TEXT
        await fleet.idle()
        assert not fleet.prefill[0].aborted

    run(body)


def test_a_resumption_that_is_refused_is_not_the_callers_fault() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 2"] = fleet.decode[0].crash
        fleet.decode[1].at["start"] = raises(errors.InvalidRequest.of("resume", "no such frontier"))
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert "could not be resumed" in error.message

    run(body, num_decode=2)


def test_channels_of_workers_that_are_gone_are_closed() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet)
        victim = fleet.decode[0].record.address
        peer = fleet.router.fleet.peer(victim)
        fleet.decode[0].record = msgspec.structs.replace(fleet.decode[0].record, state="released")
        await fleet.announce()
        await fleet.router.fleet.forget_gone()
        assert fleet.router.fleet.peer(victim) is not peer

    run(body)


@pytest.mark.parametrize("commits", [0, 1, 3])
def test_a_decode_worker_that_dies_is_resumed_by_another_exactly(commits: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        first, second = fleet.decode
        first.at[f"commit {commits}"] = first.crash
        events = await stream(fleet, output=pb.OutputOptions(token_ids=True))
        assert text_of(events) == TEXT
        ids = [one for event in events for one in event.commit.token_ids]
        assert ids == ids_of(TEXT)
        (request,) = second.requests
        assert request.attempt.attempt == 2
        done = commits * BLOCK_SIZE
        assert list(request.resume.committed_token_ids) == ids_of(TEXT)[:done]
        assert request.HasField("resume") == (commits > 0)
        if commits:
            assert request.resume.frontier[0].denoise_count == done
        stats = events[-1].finished.stats
        assert (stats.decode_worker, stats.forward_passes) == ("d1", len(ids) + done)

    run(body, num_decode=2)


def test_the_only_decode_worker_lost_is_unavailable_with_a_reason() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 2"] = fleet.decode[0].crash
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert "d0" in error.message and "no other worker can go on" in error.message
        assert error.retry_after_s

    run(body)


def test_the_budget_of_attempts_is_bounded() -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["reserved"] = raises(errors.Unavailable("engine restarts"))
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert "gave up after 3 attempts: engine restarts" in error.message
        assert sum(len(worker.requests) for worker in fleet.decode) == 3

    run(body, num_prefill=0, num_decode=5)


def test_full_everywhere_is_resource_exhausted() -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["start"] = raises(errors.Overloaded("no free pages", retry_after_s=3.0))
        error = await failure(fleet)
        assert (type(error), error.message) == (errors.Overloaded, "no free pages")
        assert error.retry_after_s == 3.0

    run(body, num_prefill=0, num_decode=2)


@pytest.mark.parametrize(
    "told",
    [
        errors.InvalidRequest.of("stopping.max_tokens", "needs 900 pages, the pool has 256"),
        errors.Overloaded("needs 900 pages, the pool has 256", retryable=False),
        errors.Bug.told("abc"),
    ],
    ids=["caller", "never fits", "bug"],
)
def test_what_no_worker_can_do_is_told_atonce(told: errors.EffuseError) -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["start"] = raises(told)
        error = await failure(fleet)
        assert type(error) is type(told)
        assert "pages" in error.message or "internal error" in error.message
        assert sum(len(worker.requests) for worker in fleet.decode) == 1

    run(body, num_prefill=0, num_decode=2)


def test_a_handoff_that_failed_at_decode_blames_prefill() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["reservation"] = holds(asyncio.Event())
        fleet.decode[0].at["reserved"] = once(raises(errors.TransferFailed("digest of page 3")))
        answer = await ask(fleet)
        assert (answer.text, answer.stats.decode_worker) == (TEXT, "d0")
        assert answer.stats.prefill_worker == "p1"

    run(body, num_prefill=2)


# A worker that breaks the protocol.


def gap(response: worker_pb2.DecodeResponse) -> None:
    response.commit.token_offset += 1


def change(response: worker_pb2.DecodeResponse) -> None:
    response.commit.token_offset = 0


def early_end(response: worker_pb2.DecodeResponse) -> None:
    num_tokens = response.commit.token_offset + 40
    response.finished.CopyFrom(worker_pb2.DecodeFinished(stopped=True, num_tokens=num_tokens))


def foreign(response: worker_pb2.DecodeResponse) -> None:
    response.reservation.incarnation = "another life"


def second_reservation(response: worker_pb2.DecodeResponse) -> None:
    response.reservation.SetInParent()


@pytest.mark.parametrize("breaking", [gap, change, early_end, second_reservation])
def test_commits_that_do_not_continue_end_the_attempt(breaking: object) -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.commit.token_offset == BLOCK_SIZE:
                breaking(response)  # type: ignore[operator]
            return response

        fleet.decode[0].twist = twist
        events = await stream(fleet)
        assert text_of(events) == TEXT
        assert events[-1].finished.stats.decode_worker == "d1"

    run(body, num_decode=2)


def test_a_reservation_of_another_life_is_refused() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.HasField("reservation"):
                foreign(response)
            return response

        fleet.decode[0].twist = twist
        assert (await ask(fleet)).stats.decode_worker == "d1"

    run(body, num_decode=2)


def test_repeated_commits_are_trimmed() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.commit.token_offset == 2 * BLOCK_SIZE:
                ids = ids_of(TEXT)[: 3 * BLOCK_SIZE]
                response.commit.token_offset = 0
                response.commit.token_ids[:] = ids
            return response

        fleet.decode[0].twist = twist
        events = await stream(fleet)
        assert text_of(events) == TEXT
        assert len({worker.worker_id for worker in fleet.decode if worker.requests}) == 1

    run(body, num_prefill=0, num_decode=1)


def test_64_requests_are_shared_by_two_of_each() -> None:
    async def body(fleet: FakeFleet) -> None:
        together = asyncio.Barrier(64)

        async def meet() -> None:
            await together.wait()

        for decode in fleet.decode:
            decode.at["verified"] = meet
        answers = await asyncio.gather(*(ask(fleet) for _ in range(64)))
        assert {answer.text for answer in answers} == {TEXT}
        assert all(len(worker.served) >= 16 for worker in fleet.workers), [
            (worker.worker_id, len(worker.served)) for worker in fleet.workers
        ]

    run(body, num_prefill=2, num_decode=2)


def test_redis_gone_changes_nothing_for_requests() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.store.is_down = True
        await fleet.router.view.poll()
        assert (await ask(fleet)).text == TEXT

    run(body)


def test_placements_are_recorded_beside_the_request() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet, request_id="here"))
        await reached.wait()
        await fleet.store.until(lambda placements: "here" in placements)
        record = fleet.store.placements["here"]
        assert (record.state, record.attempt, record.decode.worker_id) == ("running", 1, "d0")
        assert record.prefill is not None and record.prefill.incarnation == "1"
        assert record.transfer_id == fleet.decode[0].requests[0].attempt.transfer_id
        go.set()
        await asking
        await fleet.store.until(lambda placements: placements["here"].state == "finished")
        assert fleet.store.placements["here"].num_tokens == len(ids_of(TEXT))

    run(body)
