"""A request between a client and fake workers: the messages to each side."""

from __future__ import annotations

import asyncio
import gc
from array import array
from functools import partial

import grpc.aio
import pytest
from router.fake_model import ANSWER, EOS, PROMPT, byte_tokenizer, ids_of
from router.fake_workers import holds
from router.fakes import FakeFleet, run

from effuse.protos import errors
from effuse.router.handler import Serving
from effuse.router.tenants import Tenant
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

TEXT = "the answer is three"


def decode(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids))


async def ask(fleet: FakeFleet, **fields: object) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    return await fleet.generation.Generate(request, timeout=30)


async def failure(fleet: FakeFleet, **fields: object) -> errors.EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, **fields)
    return errors.from_rpc_error(caught.value, "router")


async def stream(fleet: FakeFleet, **fields: object) -> list[pb.GenerateStreamResponse]:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    asked = pb.GenerateStreamRequest(request=request)
    return [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]


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
        assert (stats.kv_bytes, stats.kv_pages, stats.cached_prompt_tokens) == (64, 1, 2)
        assert stats.forward_passes == answer.usage.completion_tokens
        assert stats.tokens_per_forward == 1.0
        assert stats.handoff_duration.ToMilliseconds() == 10
        times = (stats.prefill_duration, stats.time_to_first_block, stats.total_duration)
        prefilled, first, whole = (one.ToMicroseconds() for one in times)
        assert 0 < prefilled <= first <= whole
        assert fleet.prefill[0].prompts == [[PROMPT, *ids_of("how many?"), ANSWER]]
        assert fleet.prefill[0].salts == [""]
        assert not fleet.prefill[0].aborted + fleet.decode[0].aborted

    run(body)


def test_a_prefill_worker_learns_whose_prompt_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no tenant can detect others' prompts by the time of its own."""

    async def body(fleet: FakeFleet) -> None:
        monkeypatch.setattr(Serving, "tenant", lambda _: Tenant("acme"))
        await ask(fleet)
        assert fleet.prefill[0].salts == ["acme"]

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


def test_events_that_come_in_one_message_are_taken_in_order() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at_once = True
        events = await stream(fleet, output=pb.OutputOptions(drafts=True))
        kinds = [str(event.WhichOneof("event")) for event in events]
        assert kinds == ["draft", "commit"] * (len(kinds) // 2) + ["finished"]
        assert text_of(events) == TEXT
        assert (await ask(fleet, stopping=pb.StoppingParams(stop=[" is"]))).text == "the answer"

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


def test_parts_of_the_prompt_are_shown_as_they_are_computed_where_asked_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        # The parts after the first one take their time.
        fleet.prefill[0].at["progress"] = partial(asyncio.sleep, 0.05)
        events = await stream(fleet, output=pb.OutputOptions(prompt_progress=True))
        shown = [event for event in events if event.HasField("progress")]
        counts = [(one.progress.computed_tokens, one.progress.prompt_tokens) for one in shown]
        assert counts == [(4, 11), (8, 11)]
        assert events.index(shown[-1]) < min(
            at for at, event in enumerate(events) if event.HasField("commit")
        )
        assert not any(event.HasField("progress") for event in await stream(fleet))

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
        await fleet.router.fleet.view.poll()
        assert (await ask(fleet)).text == TEXT

    run(body)


def test_placements_are_recorded_beside_the_request() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet, request_id="here"))
        await reached.wait()
        await fleet.store.until(lambda placements: placements["here"].decode is not None)
        record = fleet.store.placements["here"]
        assert record.decode is not None
        assert (record.state, record.attempt, record.decode.worker_id) == ("running", 1, "d0")
        assert record.prefill is not None and record.prefill.incarnation == "1"
        assert record.transfer_id == fleet.decode[0].requests[0].attempt.transfer_id
        go.set()
        await asking
        await fleet.store.until(lambda placements: placements["here"].state == "finished")
        assert fleet.store.placements["here"].num_tokens == len(ids_of(TEXT))

    run(body)


def test_an_open_request_holds_no_prompt_but_its_ids() -> None:
    """Ten thousand of them may be open for minutes, and prompts are long."""

    async def body(fleet: FakeFleet) -> None:
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        own = "a prompt that no other test sends, because requests of theirs may still be garbage"
        asked = pb.GenerateRequest(prompt=own, stopping=pb.StoppingParams(min_tokens=1))
        asking = fleet.generation.Generate(asked, timeout=30)
        await reached.wait()
        (running,) = fleet.router.requests.running_now()
        assert running.asked.sent.prompt == "" and running.asked.chat is None
        assert running.asked.sent.HasField("stopping"), "what is still asked for stays"
        assert isinstance(running.prompt.token_ids, array)
        messages = [one for one in gc.get_objects() if isinstance(one, pb.GenerateRequest)]
        assert sum(one.prompt == own for one in messages) <= 1, "only the client has it"
        go.set()
        assert (await asking).text == TEXT

    run(body)
