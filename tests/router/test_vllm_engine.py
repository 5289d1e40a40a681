"""vLLM's engine service of a router, with a gateway's calls."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest
import tokenizers
from msgspec.structs import replace
from router.asking import failure
from router.fake_model import ids_of
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, run

from effuse.compat import vllm_engine_pb2 as engine
from effuse.compat import vllm_engine_pb2_grpc
from effuse.protos import errors
from effuse.router.tokenizer import bundled_directory
from effuse.router.vllm_engine import archive
from effuse.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from effuse.compat.vllm_engine_pb2_grpc import VllmEngineAsyncStub

ANSWER = ids_of("the answer is three")
PROMPT = ids_of("how many?")


def stub_of(fleet: FakeFleet) -> VllmEngineAsyncStub:
    return cast("VllmEngineAsyncStub", vllm_engine_pb2_grpc.VllmEngineStub(fleet.channel))


def asked(*, stream: bool = True, **params: object) -> engine.GenerateRequest:
    return engine.GenerateRequest(
        request_id="chatcmpl-1",
        tokenized=engine.TokenizedInput(input_ids=PROMPT),
        sampling_params=engine.SamplingParams(top_p=1.0, n=1, **params),  # type: ignore[arg-type]
        stream=stream,
    )


async def read(
    fleet: FakeFleet, request: engine.GenerateRequest
) -> tuple[list[engine.GenerateStreamChunk], engine.GenerateComplete]:
    call = stub_of(fleet).Generate(request, timeout=30)
    *chunks, last = [response async for response in call]
    assert last.HasField("complete")
    return [one.chunk for one in chunks], last.complete


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_come_as_they_are_final_or_at_the_end(stream: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        chunks, last = await read(fleet, asked(stream=stream))
        assert list(last.output_ids) == ANSWER
        assert (last.finish_reason, last.prompt_tokens) == ("stop", len(PROMPT))
        assert last.completion_tokens == len(ANSWER)
        if stream:
            assert [token for chunk in chunks for token in chunk.token_ids] == ANSWER
            assert {chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
            assert [chunk.completion_tokens for chunk in chunks][-1] == len(ANSWER)
        assert bool(chunks) == stream
        assert fleet.prefill[0].prompts == [PROMPT]

    run(body)


def test_an_answer_that_is_kept_is_told_as_a_new_one() -> None:
    async def body(fleet: FakeFleet) -> None:
        chunks, last = await read(fleet, asked())
        await fleet.idle()
        kept, again = await read(fleet, asked())
        assert len(fleet.decode[0].requests) == 1
        assert {one.prompt_tokens for one in kept} == {one.prompt_tokens for one in chunks}
        assert again == last

    run(body)


@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_are_told_by_their_index(stream: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        texts = ["the answer is three", "four", "none at all"]
        fleet.decode[0].others = [ids_of(text) for text in texts[1:]]
        whole = asked(stream=stream)
        whole.sampling_params.n = 3
        told = [one async for one in stub_of(fleet).Generate(whole, timeout=30)]
        ends = {one.complete.index: one.complete for one in told if one.HasField("complete")}
        assert sorted(ends) == [0, 1, 2] and told[-1].HasField("complete")
        assert [list(ends[at].output_ids) for at in range(3)] == list(map(ids_of, texts))
        assert {one.prompt_tokens for one in ends.values()} == {len(PROMPT)}
        chunks = [one.chunk for one in told if one.HasField("chunk")]
        assert bool(chunks) == stream
        for at in range(3) if stream else ():
            own = [token for one in chunks if one.index == at for token in one.token_ids]
            assert own == ids_of(texts[at])
        assert len(fleet.prefill[0].prompts) == 1

    run(body)


def test_bad_input_is_refused_before_a_worker_sees_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        for request, field in (
            (asked(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
            (asked(max_tokens=0), "sampling_params.max_tokens"),
            (engine.GenerateRequest(), "text"),
        ):
            error = await failure(stub_of(fleet).Generate(request, timeout=30).read())
            assert isinstance(error, errors.InvalidRequest)
            assert [one.field for one in error.violations] == [field]
        assert fleet.metric("effuse_refused_total", status="INVALID_ARGUMENT", quota="false") == 3
        assert not fleet.decode[0].requests and not fleet.router.requests.num_running

    run(body)


def test_a_worker_that_fails_for_good_ends_the_answer_with_its_status() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = raises(errors.Bug("an invariant of the worker's"))
        call = stub_of(fleet).Generate(asked(), timeout=30)
        assert await call.read() is not grpc.aio.EOF
        assert isinstance(await failure(call.read()), errors.Bug)

    run(body)


@pytest.mark.parametrize("way", ["abort", "cancel"])
def test_a_request_that_is_given_up_is_aborted_on_its_workers(way: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        reached = asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event(), reached)
        call = stub_of(fleet).Generate(asked(), timeout=30)
        assert await call.read() is not grpc.aio.EOF
        await reached.wait()
        if way == "abort":
            ids = ["chatcmpl-1", "nobody's"]
            await stub_of(fleet).Abort(engine.AbortRequest(request_ids=ids), timeout=30)
            assert isinstance(await failure(call.read()), errors.EndedById)
        else:
            call.cancel()
        await fleet.idle()
        await fleet.decode[0].abort_came.wait()
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="chatcmpl-1"))
        assert state.state == pb.REQUEST_STATE_CANCELLED

    run(body)


def test_a_gateway_learns_of_model_server_and_load() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        assert (await stub.HealthCheck(engine.HealthCheckRequest(), timeout=30)).healthy
        model = await stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=30)
        assert (model.served_model_name, model.is_generation) == ("fake", True)
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(go, reached)
        reading = asyncio.create_task(read(fleet, asked()))
        await reached.wait()
        server = await stub.GetServerInfo(engine.GetServerInfoRequest(), timeout=30)
        assert server.active_requests == 1
        (load,) = (await stub.GetLoads(engine.GetLoadsRequest(), timeout=30)).loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
        assert (load.max_total_num_tokens, load.token_usage) == (256 * 16, 0.0)
        go.set()
        await reading

    run(body)


def test_a_fleet_of_more_tokens_than_an_int32_has_a_load() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        (record,) = [one for one in fleet.router.fleet.records() if one.does("decode")]
        large = replace(record, capacity=replace(record.capacity, total_pages=2**31))
        fleet.router.fleet.records = lambda: [large]  # type: ignore[method-assign]
        (load,) = (await stub.GetLoads(engine.GetLoadsRequest(), timeout=30)).loads
        assert load.max_total_num_tokens == load.num_used_tokens == 2**31 - 1
        assert 0.9 < load.token_usage < 1.0

    run(body)


def test_a_gateway_waits_for_a_fleet_without_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        health = await failure(stub.HealthCheck(engine.HealthCheckRequest(), timeout=30))
        assert isinstance(health, errors.Unavailable)
        model = await failure(stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=30))
        assert isinstance(model, errors.Unavailable)

    run(body, num_prefill=0, num_decode=0)


def test_the_tokenizer_is_given_whole() -> None:
    async def body(fleet: FakeFleet) -> None:
        call = stub_of(fleet).GetTokenizer(engine.GetTokenizerRequest(), timeout=30)
        pieces = [piece async for piece in call]
        whole = b"".join(piece.data for piece in pieces)
        assert [bool(piece.sha256) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].sha256 == hashlib.sha256(whole).hexdigest()
        files = zipfile.ZipFile(io.BytesIO(whole))
        told = tokenizers.Tokenizer.from_buffer(files.read("tokenizer.json"))
        there = tokenizers.Tokenizer.from_file(str(bundled_directory() / "tokenizer.json"))
        assert told.get_vocab() == there.get_vocab()
        assert "chat_template.jinja" in files.namelist()

    run(body)
    assert archive(bundled_directory()) == archive(bundled_directory())
