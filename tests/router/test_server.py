"""The public services over the wire: bad input, lookup, models, health, the queue, the end."""

from __future__ import annotations

import asyncio
import urllib.request

import grpc
import grpc.aio
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router.asking import ask, failure, request
from router.fake_model import MASK, MAX_MODEL_LEN
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, run, until

from effuse.protos import errors
from effuse.protos.channels import OPEN
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

TEXT = "the answer is three"
GENERATE = "/effuse.v1.GenerationService/Generate"
STREAM = "/effuse.v1.GenerationService/GenerateStream"


async def is_serving(fleet: FakeFleet, service: str) -> bool:
    stub = health_pb2_grpc.HealthStub(fleet.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


RAW = {
    "1 random bytes": b"\x9c\x01\xff\x17" * 40,
    "2 truncated": request(prompt="a" * 90).SerializeToString()[:-9],
    "3 invalid utf-8": b"\x1a\x02\xc3\x28",
    "4 surrogate": b"\x1a\x03\xed\xa0\x80",
    "5 deep nesting": b"\x33" * 200,
    "6 empty": b"",
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
@pytest.mark.parametrize("method", [GENERATE, STREAM])
def test_bytes_that_are_no_request_are_invalid_argument(method: str, data: bytes) -> None:
    async def body(fleet: FakeFleet) -> None:
        if method == GENERATE:
            unary = fleet.channel.unary_unary(method, bytes, bytes)
            error = await failure(unary(data, timeout=30))
        else:
            stream = fleet.channel.unary_stream(method, bytes, bytes)
            error = await failure(stream(data, timeout=30).read())
        assert type(error) is errors.InvalidRequest
        assert "Exception" not in error.message and "Error" not in error.message
        assert (await ask(fleet)).text == TEXT
        assert len(fleet.decode[0].requests) == 1

    run(body)


def test_7_and_8_unknown_fields_are_ignored_and_the_last_value_counts() -> None:
    async def body(fleet: FakeFleet) -> None:
        call = fleet.channel.unary_unary(GENERATE, bytes, pb.GenerateResponse.FromString)
        unknown = b"\xfa\x7f" + b"\xa0\x8d\x06" + b"z" * 100_000
        assert (await call(request().SerializeToString() + unknown, timeout=30)).text == TEXT
        twice = request(request_id="first").SerializeToString()
        twice += pb.GenerateRequest(request_id="last").SerializeToString()
        assert (await call(twice, timeout=30)).request_id == "last"
        assert type(await failure(call(twice + b"\x0a\x00", timeout=30))) is errors.InvalidRequest

    run(body)


def test_9_an_oversized_message_is_resource_exhausted() -> None:
    async def body(fleet: FakeFleet) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(fleet, prompt="a" * (5 << 20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await ask(fleet)).text == TEXT

    run(body)


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        ({"prompt": ""}, errors.InvalidRequest, "at least one character"),
        ({"model": "other"}, errors.NotFound, "model 'other' does not exist; this fleet"),
        ({"model": "../etc/passwd"}, errors.InvalidRequest, "1 to 256 characters"),
        ({"model": ""}, errors.InvalidRequest, "model"),
        ({"request_id": "a b\n"}, errors.InvalidRequest, r"got 'a b\n'"),
        (
            {"prompt_token_ids": pb.TokenIds(ids=[1, MASK])}, errors.InvalidRequest,
            "prompt_token_ids.ids[1]: expected an id that stands for text, got the mask id 257",
        ),
        (
            {"sampling": pb.SamplingParams(temperature=float("nan"))}, errors.InvalidRequest,
            "sampling.temperature: expected a number from 0.001 to 100, or 0 for greedy, got nan",
        ),
        (
            {"prompt": "a" * MAX_MODEL_LEN}, errors.InvalidRequest,
            f"at most 255 prompt tokens, so that one can be generated, got {MAX_MODEL_LEN + 2}",
        ),
        (
            {"stopping": pb.StoppingParams(max_tokens=250)}, errors.InvalidRequest,
            "at most 245: the prompt has 11 tokens and the model accepts 256 in all, got 250",
        ),
        ({"output": pb.OutputOptions(drafts=True)}, errors.InvalidRequest, "only GenerateStream"),
        (
            {"output": pb.OutputOptions(prompt_progress=True)}, errors.InvalidRequest,
            "output.prompt_progress: expected false for Generate",
        ),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_before_a_worker_sees_them(
    bad: dict[str, object], kind: type[errors.EffuseError], text: str
) -> None:
    async def body(fleet: FakeFleet) -> None:
        fields = {"prompt": None, **bad} if "prompt_token_ids" in bad else bad
        error = await failure(fleet.generation.Generate(request(**fields), timeout=30))
        assert type(error) is kind
        assert text in error.message
        assert not fleet.decode[0].requests
        assert fleet.router.requests.num_running == fleet.router.admission.num_running == 0
        assert (await ask(fleet)).text == TEXT

    run(body)


def test_field_violations_are_in_the_details() -> None:
    async def body(fleet: FakeFleet) -> None:
        bad = request(
            sampling=pb.SamplingParams(top_p=2.0),
            stopping=pb.StoppingParams(stop=[""]),
            request_id="a b",
            n=9,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.generation.Generate(bad, timeout=30)
        metadata = dict(caught.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        found = error_details_pb2.BadRequest()
        assert any(detail.Unpack(found) for detail in status.details)
        assert {v.field for v in found.field_violations} == {
            "sampling.top_p", "stopping.stop[0]", "request_id", "n",
        }  # fmt: skip

    run(body)


def test_an_id_that_is_running_is_refused_and_free_afterwards() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        first = asyncio.create_task(ask(fleet, request_id="twin"))
        await reached.wait()
        error = await failure(ask(fleet, request_id="twin"))
        assert (type(error), "'twin' is already running" in error.message) == (
            errors.AlreadyRunning,
            True,
        )
        assert fleet.metric("effuse_refused_total", status="ALREADY_EXISTS", quota="false") == 1
        go.set()
        assert (await first).text == TEXT
        assert (await ask(fleet, request_id="twin")).text == TEXT

    run(body)


def test_a_request_without_an_id_gets_one() -> None:
    async def body(fleet: FakeFleet) -> None:
        one, two = await ask(fleet), await ask(fleet)
        assert one.request_id != two.request_id
        assert fleet.decode[0].served == [one.request_id, two.request_id]

    run(body)


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(go, reached)
        running = asyncio.create_task(ask(fleet, request_id="runs"))
        await reached.wait()
        waiting = asyncio.create_task(ask(fleet, request_id="waits"))
        await until(lambda: fleet.router.admission.num_waiting == 1)
        error = await failure(ask(fleet))
        assert (type(error), bool(error.retry_after_s)) == (errors.Overloaded, True)
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="waits"))
        assert state.state == pb.REQUEST_STATE_QUEUED
        assert await fleet.models.ListModels(model_pb2.ListModelsRequest())
        go.set()
        assert [a.text for a in await asyncio.gather(running, waiting)] == [TEXT, TEXT]
        assert (await waiting).stats.queue_duration.ToMicroseconds() > 0

    run(body, max_concurrent_requests=1, max_queue=1)


def test_requests_can_be_looked_up() -> None:
    async def body(fleet: FakeFleet) -> None:
        look = fleet.generation.GetRequest
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet, request_id="r1"))
        await reached.wait()
        running = await look(pb.GetRequestRequest(request_id="r1"))
        assert running.state == pb.REQUEST_STATE_RUNNING
        assert (running.attempt, running.prefill_worker, running.decode_worker) == (1, "p0", "d0")
        go.set()
        await asking
        ended = await look(pb.GetRequestRequest(request_id="r1"))
        assert (ended.state, ended.status) == (pb.REQUEST_STATE_FINISHED, "OK")
        fleet.decode[0].at["start"] = raises(errors.Bug("x"))
        await failure(ask(fleet, request_id="r2"))
        failed = await look(pb.GetRequestRequest(request_id="r2"))
        assert (failed.state, failed.status) == (pb.REQUEST_STATE_FAILED, "INTERNAL")

    run(body)


def test_requests_of_other_routers_are_looked_up_in_the_store() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet, request_id="ours")
        await fleet.store.until(lambda held: "ours" in held and held["ours"].state == "finished")
        record = fleet.store.placements["ours"]
        fleet.store.placements["theirs"] = msgspec.structs.replace(record, request_id="theirs")
        look = fleet.generation.GetRequest
        found = await look(pb.GetRequestRequest(request_id="theirs"))
        assert (found.state, found.decode_worker) == (pb.REQUEST_STATE_FINISHED, "d0")
        assert type(await failure(look(pb.GetRequestRequest(request_id="x")))) is errors.NotFound
        bad = await failure(look(pb.GetRequestRequest(request_id="")))
        assert type(bad) is errors.InvalidRequest
        fleet.store.is_down = True
        gone = await failure(look(pb.GetRequestRequest(request_id="theirs")))
        assert type(gone) is errors.Unavailable

    run(body)


def test_models_are_listed_and_described() -> None:
    async def body(fleet: FakeFleet) -> None:
        for decode, name in zip(fleet.decode, "abc", strict=True):
            model = msgspec.structs.replace(decode.record.model, name=name)
            decode.record = msgspec.structs.replace(decode.record, model=model)
        fleet.prefill[0].record = msgspec.structs.replace(
            fleet.prefill[0].record, model=fleet.decode[1].record.model
        )
        await fleet.announce()
        first = await fleet.models.ListModels(model_pb2.ListModelsRequest(page_size=2))
        assert [m.name for m in first.models] == ["a", "b"]
        rest = await fleet.models.ListModels(
            model_pb2.ListModelsRequest(page_size=2, page_token=first.next_page_token)
        )
        assert ([m.name for m in rest.models], rest.next_page_token) == (["c"], "")
        found = (await fleet.models.GetModel(model_pb2.GetModelRequest(name="b"))).model
        assert (found.decode_workers, found.prefill_workers, found.mask_token_id) == (1, 1, MASK)
        assert found.default_algorithm == pb.ALGORITHM_D2F
        defaults = found.defaults
        assert (defaults.decoding.algorithm, defaults.decoding.window) == (pb.ALGORITHM_D2F, 4)
        assert not defaults.decoding.HasField("denoising_steps")  # which is not D2F's
        assert defaults.sampling.HasField("temperature") and defaults.max_tokens == 256
        unknown = fleet.models.GetModel(model_pb2.GetModelRequest(name="d"))
        assert type(await failure(unknown)) is errors.NotFound
        several = await failure(ask(fleet))
        assert "expected one of a, b, c" in several.message
        assert (await ask(fleet, model="c")).stats.decode_worker == "d2"

    run(body, num_decode=3)


def test_no_workers_is_unavailable_and_a_known_model_stays_known() -> None:
    async def body(fleet: FakeFleet) -> None:
        assert (await ask(fleet, model="fake")).text == TEXT
        for worker in fleet.workers:
            worker.record = msgspec.structs.replace(worker.record, state="released")
        await fleet.announce()
        for fields in ({}, {"model": "fake"}, {"model": "other"}):
            error = await failure(ask(fleet, **fields))
            assert type(error) is errors.Unavailable
            assert error.retry_after_s
        assert not (await fleet.models.ListModels(model_pb2.ListModelsRequest())).models

    run(body, recovery_s=0.3)


@pytest.mark.parametrize(("mode", "without_prefill"), [("auto", True), ("remote", False)])
def test_health_follows_the_workers_by_service_and_role(mode: str, without_prefill: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        async def becomes(*expected: bool) -> None:
            names = ("", "effuse.v1.GenerationService", "router", "prefill", "decode")
            while [await is_serving(fleet, name) for name in names] != list(expected):
                pass  # the router looks again five times a second

        await becomes(True, True, True, True, True)
        prefill, decode = fleet.prefill[0], fleet.decode[0]
        prefill.record = msgspec.structs.replace(prefill.record, state="draining")
        await fleet.announce()
        await becomes(True, without_prefill, without_prefill, False, True)
        decode.record = msgspec.structs.replace(decode.record, state="released")
        await fleet.announce()
        await becomes(True, False, False, False, False)
        error = await failure(
            fleet.channel.unary_unary(  # an unknown name
                "/grpc.health.v1.Health/Check", bytes, bytes
            )(b"\x0a\x01x")
        )
        assert error

    run(body, prefill=mode)


def test_draining_finishes_what_runs_and_what_waits_and_takes_no_more() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = [asyncio.create_task(ask(fleet)) for _ in range(2)]
        await reached.wait()
        await until(lambda: fleet.router.admission.num_waiting == 1)
        fleet.stop.set()
        # It closes its port beside the rest; grpcio may lose a call that comes in that moment.
        while True:
            address = f"127.0.0.1:{fleet.router.ports.grpc}"
            async with OPEN.connect(address, keepalive=None) as fresh:
                error = await failure(fresh.unary_unary(GENERATE, bytes, bytes)(b"", timeout=2))
            if isinstance(error, errors.Unavailable):
                break
        go.set()
        assert [(await one).text for one in asking] == [TEXT, TEXT]

    run(body, max_concurrent_requests=1)


def test_what_a_drain_has_no_time_for_is_told_to_ask_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 2"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet, request_id="long"))
        await reached.wait()
        waiting = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.router.admission.num_waiting == 1)
        fleet.stop.set()
        for error in (await failure(asking), await failure(waiting)):
            assert type(error) is errors.Draining
            assert error.retry_after_s
        await fleet.store.until(lambda held: "long" in held and held["long"].state == "failed")

    run(body, max_concurrent_requests=1, drain_s=0.2)


def test_metrics_are_served_as_prometheus_text() -> None:
    async def body(fleet: FakeFleet) -> None:
        asked = pb.GenerateStreamRequest(request=request(prompt="how many?"))
        events = [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]
        gaps = sum(event.HasField("commit") for event in events) - 1
        await failure(ask(fleet, prompt=""))
        port = fleet.router.ports.metrics
        url = f"http://127.0.0.1:{port}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=30) as page:
                return str(page.read().decode())

        text = await asyncio.to_thread(scrape)
        of = 'model_name="fake",role="router"'
        for line in (
            f'effuse_requests_total{{{of},status="OK"}} 1.0',
            'effuse_refused_total{quota="false",role="router",status="INVALID_ARGUMENT"} 1.0',
            f"effuse_prompt_tokens_total{{{of}}} {len('how many?') + 2}.0",
            f"effuse_time_to_first_block_seconds_count{{{of}}} 1.0",
            f"effuse_inter_block_latency_seconds_count{{{of}}} {gaps}.0",
            f"effuse_request_queue_time_seconds_count{{{of}}} 1.0",
            f"effuse_tokens_per_forward_count{{{of}}} 1.0",
            f"effuse_num_requests_running{{{of}}} 0.0",
            'effuse_retries_total{role="router"} 0.0',
        ):
            assert line in text.splitlines(), line

    run(body, metrics=True)


@pytest.mark.parametrize("mode", ["auto", "remote"])
def test_a_canvas_goes_to_a_decode_worker_alone_or_is_refused(mode: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.workers:
            seeing = msgspec.structs.replace(worker.record.model, prompt_attention="bidirectional")
            worker.record = msgspec.structs.replace(worker.record, model=seeing)
        await fleet.announce()
        canvas = pb.DecodingParams(algorithm=pb.ALGORITHM_LLADA)
        if mode == "auto":
            assert (await ask(fleet, decoding=canvas)).stats.prefill_worker == ""
            assert (await ask(fleet)).stats.prefill_worker == "p0"
            return
        error = await failure(ask(fleet, decoding=canvas))
        assert isinstance(error, errors.InvalidRequest) and "--prefill remote" in error.message
        assert not fleet.decode[0].served and not fleet.prefill[0].served

    run(body, prefill=mode)
