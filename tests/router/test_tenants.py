"""A router with keys in front of fake workers: access, and that a flood starves no tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from router.asking import failure, request
from router.fake_model import ids_of
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until
from router.test_kserve import asked as kserve_request

from effuse.client.credentials import Credentials
from effuse.compat import kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2_grpc
from effuse.compat import vllm_engine_pb2 as engine
from effuse.protos.channels import MetadataChannel, generation_stub, model_stub
from effuse.protos.errors import EndedById, NotFound, Overloaded, PeerLost, Unauthenticated
from effuse.router.tenants import Tenant, line_of, make_token
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc, model_pb2

TOKENS = {name: make_token() for name in ("flood", "quiet")}
Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"


def stub_of(fleet: FakeFleet, tenant: str) -> Stub:
    shown = Credentials(token=TOKENS[tenant]).metadata()
    return generation_stub(MetadataChannel(fleet.channel, shown))


def served(
    path: Path, body: Callable[[FakeFleet], Awaitable[None]], *, requests: int | None = None,
    **settings: object,
) -> None:  # fmt: skip
    """Runs a router that knows both tokens, with a limit for each."""
    keys = path / "keys"
    lines = [line_of(token, Tenant(name, requests)) for name, token in TOKENS.items()]
    keys.write_text("\n".join(lines))
    run(body, keys=keys, **settings)  # type: ignore[arg-type]


def test_before_any_model_is_known_a_tenant_is_limited_too(tmp_path: Path) -> None:
    async def body(fleet: FakeFleet) -> None:
        flood, quiet = stub_of(fleet, "flood"), stub_of(fleet, "quiet")
        first = asyncio.ensure_future(flood.Generate(request(), timeout=30))
        await until(lambda: fleet.router.admission.num_waiting == 1)
        refused = await failure(flood.Generate(request(), timeout=30))
        assert isinstance(refused, Overloaded) and "its limit is 1" in refused.message
        other = asyncio.ensure_future(quiet.Generate(request(), timeout=30))
        await until(lambda: fleet.router.admission.num_waiting == 2)
        for call in (first, other):
            call.cancel()
        await until(lambda: fleet.router.admission.num_waiting == 0)
        again = asyncio.ensure_future(flood.Generate(request(), timeout=30))
        await until(lambda: fleet.router.admission.num_waiting == 1)
        again.cancel()

    served(tmp_path, body, requests=1, state="released")


def test_without_a_token_nothing_is_told(tmp_path: Path) -> None:
    async def body(fleet: FakeFleet) -> None:
        error = await failure(fleet.generation.Generate(request(), timeout=30))
        assert isinstance(error, Unauthenticated) and error.labels == {}
        channel: Any = fleet.channel
        calls: list[Awaitable[object]] = [
            fleet.models.ListWorkers(model_pb2.ListWorkersRequest(), timeout=30),
            fleet.generation.GetRequest(pb.GetRequestRequest(request_id="x"), timeout=30),
            channel.unary_unary("/no.such.Service/Method")(b"", timeout=30),
            channel.unary_unary(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")(
                b"", timeout=30
            ),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert caught.value.details() == error.message
        health = health_pb2_grpc.HealthStub(fleet.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert not fleet.decode[0].served

    served(tmp_path, body)


def test_with_a_token_all_is_served_and_counted(tmp_path: Path) -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await stub_of(fleet, "quiet").Generate(request(), timeout=30)
        assert answer.text == "the answer is three"
        models = model_stub(MetadataChannel(fleet.channel, [
            ("authorization", f"Bearer {TOKENS['quiet']}")
        ]))  # fmt: skip
        assert (await models.ListModels(model_pb2.ListModelsRequest(), timeout=30)).models
        await until(lambda: ended(fleet, "quiet", "OK") == 1)
        spent = fleet.metric("effuse_tenant_tokens_total", tenant="quiet")
        assert spent == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert ended(fleet, "flood", "OK") is None

    served(tmp_path, body)


@pytest.mark.parametrize("service", ["vllm", "kserve", "kserve stream"])
def test_other_peoples_services_ask_for_keys_too(service: str, tmp_path: Path) -> None:
    """Without a key there is no information; with one the answer is right, and its tenant pays for
    it.
    """

    async def body(fleet: FakeFleet) -> None:
        shown = Credentials(token=TOKENS["quiet"]).metadata()
        # If a stream ends while its client still writes, gRPC reports INTERNAL at times.
        refused = [await failure(_ask_as(fleet, service, ())) for _ in range(3)]
        assert {Unauthenticated} <= {type(one) for one in refused} <= {Unauthenticated, PeerLost}
        assert not fleet.decode[0].served
        assert await _ask_as(fleet, service, shown) == "the answer is three"
        await until(lambda: ended(fleet, "quiet", "OK") == 1)
        assert ended(fleet, "flood", "OK") is None
        spent = fleet.metric("effuse_tenant_tokens_total", tenant="quiet")
        assert spent == len(fleet.prefill[0].prompts[0]) + len(ids_of("the answer is three"))

    served(tmp_path, body)


async def _ask_as(fleet: FakeFleet, service: str, shown: tuple[tuple[str, str], ...]) -> str:
    """A service's answer to a client with that key."""
    call: Any
    if service == "vllm":
        call = vllm_engine_pb2_grpc.VllmEngineStub(fleet.channel).Generate(
            engine.GenerateRequest(text="how many?"), timeout=30, metadata=shown
        )
        (last,) = [one async for one in call]
        return fleet.router.tokenizer.decode(last.complete.output_ids)
    stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(fleet.channel)
    asked = kserve_request()
    if service == "kserve":
        answer = await stub.ModelInfer(asked, timeout=30, metadata=shown)
        return _text_of(answer)
    call = stub.ModelStreamInfer(iter([asked]), timeout=30, metadata=shown)
    return "".join([_text_of(one.infer_response) async for one in call])


def _text_of(answer: kserve_pb2.ModelInferResponse) -> str:
    (told,) = answer.outputs[0].contents.bytes_contents
    return told.decode() if answer.outputs[0].name == "text_output" else ""


def ended(fleet: FakeFleet, tenant: str, status: str) -> float | None:
    return fleet.metric("effuse_tenant_requests_total", tenant=tenant, status=status)


def test_nobody_reads_anothers_answer(tmp_path: Path) -> None:
    async def body(fleet: FakeFleet) -> None:
        await stub_of(fleet, "quiet").Generate(request(request_id="mine"), timeout=30)
        await fleet.idle()
        look = pb.GetRequestRequest(request_id="mine")
        found = await stub_of(fleet, "quiet").GetRequest(look, timeout=30)
        assert found.answer.text == "the answer is three"
        with_other = stub_of(fleet, "flood").GetRequest(look, timeout=30)
        assert isinstance(await failure(with_other), NotFound)
        # Nor by sending the same request under the same id: that runs once more, for its sender.
        before = len(fleet.decode[0].served)
        await stub_of(fleet, "flood").Generate(request(request_id="mine"), timeout=30)
        assert len(fleet.decode[0].served) == before + 1
        assert isinstance(
            await failure(stub_of(fleet, "quiet").GetRequest(look, timeout=30)), NotFound
        )

    served(tmp_path, body)


def test_nobody_reads_what_another_asked_of_another_router_under_the_same_id(
    tmp_path: Path,
) -> None:
    async def body(fleet: FakeFleet) -> None:
        await stub_of(fleet, "quiet").Generate(request(request_id="mine"), timeout=30)
        await fleet.idle()
        theirs = pb.GenerateResponse(text="for nobody else")
        await fleet.store.keep_answer("mine", "theirs", theirs.SerializeToString(), 60)
        look = pb.GetRequestRequest(request_id="mine")
        found = await stub_of(fleet, "quiet").GetRequest(look, timeout=30)
        assert (found.status, found.answer.text) == ("OK", "")

    served(tmp_path, body)


def test_a_tenant_beyond_its_limit_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async def body(fleet: FakeFleet) -> None:
        held, release = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(release, held)
        flood, quiet = stub_of(fleet, "flood"), stub_of(fleet, "quiet")
        first = asyncio.create_task(_generate(flood))
        await held.wait()
        error = await failure(flood.Generate(request(), timeout=30))
        assert isinstance(error, Overloaded) and error.retry_after_s
        assert ended(fleet, "flood", "RESOURCE_EXHAUSTED") == 1
        refused = {"status": "RESOURCE_EXHAUSTED"}
        assert fleet.metric("effuse_refused_total", quota="true", **refused) == 1
        assert fleet.metric("effuse_refused_total", quota="false", **refused) is None
        release.set()
        assert (await quiet.Generate(request(), timeout=30)).text
        assert (await first).text

    served(tmp_path, body, requests=1)


async def _generate(stub: Stub) -> pb.GenerateResponse:
    return await stub.Generate(request(), timeout=30)


def test_who_floods_the_queue_gives_way(tmp_path: Path) -> None:
    """The queue is full of one tenant's requests: another one's gets in, and soon has its turn."""

    async def body(fleet: FakeFleet) -> None:
        held, release = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(release, held)
        flood, quiet = stub_of(fleet, "flood"), stub_of(fleet, "quiet")
        order: list[str] = []

        async def one(stub: Stub, name: str) -> None:
            await stub.Generate(request(), timeout=30)
            order.append(name)

        floods = [asyncio.create_task(one(flood, "flood")) for _ in range(9)]
        await held.wait()
        await until(lambda: fleet.router.admission.num_waiting == 8)
        late = asyncio.create_task(one(quiet, "quiet"))
        (refused,), _ = await asyncio.wait(floods, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(await failure(refused), Overloaded)
        release.set()
        await late
        assert len(order) <= 4, order
        floods.remove(refused)
        await asyncio.gather(*floods)

    served(tmp_path, body, max_concurrent_requests=1, max_queue=8)


def test_a_gateway_ends_its_own_tenants_requests_alone(tmp_path: Path) -> None:
    def engine_of(fleet: FakeFleet, tenant: str) -> Any:
        shown = Credentials(token=TOKENS[tenant]).metadata()
        channel: Any = MetadataChannel(fleet.channel, shown)
        return vllm_engine_pb2_grpc.VllmEngineStub(channel)

    async def body(fleet: FakeFleet) -> None:
        reached = asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event(), reached)
        asked = engine.GenerateRequest(request_id="mine", text="how many?", stream=True)
        call = engine_of(fleet, "quiet").Generate(asked, timeout=30)
        assert await call.read() is not grpc.aio.EOF
        await reached.wait()
        abort = engine.AbortRequest(request_ids=["mine"])
        await engine_of(fleet, "flood").Abort(abort, timeout=30)
        assert fleet.router.requests.num_running == 1 and not call.done()
        await engine_of(fleet, "quiet").Abort(abort, timeout=30)
        assert isinstance(await failure(call.read()), EndedById)

    served(tmp_path, body)
