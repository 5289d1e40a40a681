"""KServe's inference service of a router, called as its clients call it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import grpc.aio
import pytest
from router.asking import failure
from router.fake_model import ids_of
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, run

from effuse.compat import kserve_pb2 as kserve
from effuse.compat import kserve_pb2_grpc
from effuse.protos import errors

if TYPE_CHECKING:
    from effuse.compat.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub

TEXT = "the answer is three"


def stub_of(fleet: FakeFleet) -> GRPCInferenceServiceAsyncStub:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(fleet.channel)
    return cast("GRPCInferenceServiceAsyncStub", stub)


def asked(request_id: str = "1", **fields: Any) -> kserve.ModelInferRequest:
    contents = kserve.InferTensorContents(bytes_contents=[b"how many?"])
    tensor = kserve.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    return kserve.ModelInferRequest(id=request_id, inputs=[tensor], **fields)


def element(response: kserve.ModelInferResponse, name: str) -> str:
    (tensor,) = (one for one in response.outputs if one.name == name)
    (told,) = tensor.contents.bytes_contents
    return told.decode()


async def stream(
    fleet: FakeFleet, *requests: kserve.ModelInferRequest
) -> list[kserve.ModelStreamInferResponse]:
    call = stub_of(fleet).ModelStreamInfer(iter(requests), timeout=30)
    return [response async for response in call]


def test_text_in_text_out() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await stub_of(fleet).ModelInfer(asked("7", model_name="fake"), timeout=30)
        assert (answer.id, answer.model_name, element(answer, "text_output")) == ("7", "fake", TEXT)
        assert element(answer, "finish_reason") == "stop"

    run(body)


def test_a_stream_answers_one_request_after_the_other() -> None:
    async def body(fleet: FakeFleet) -> None:
        told = await stream(fleet, asked("a"), asked("b"))
        for name in ("a", "b"):
            pieces = [one.infer_response for one in told if one.infer_response.id == name]
            assert "".join(element(one, "text_output") for one in pieces) == TEXT
            flags = [one.parameters["triton_final_response"].bool_param for one in pieces]
            assert flags == [False] * (len(pieces) - 1) + [True]
            assert {one.model_name for one in pieces} == {"fake"}
        assert [one.infer_response.id for one in told] == sorted(
            one.infer_response.id for one in told
        )

    run(body)


def test_a_stream_of_the_reason_only_has_no_pieces_without_tensors() -> None:
    wanted = kserve.ModelInferRequest.InferRequestedOutputTensor(name="finish_reason")

    async def body(fleet: FakeFleet) -> None:
        (only,) = await stream(fleet, asked(outputs=[wanted]))
        assert element(only.infer_response, "finish_reason") == "stop"

    run(body)


def test_several_answers_fill_one_tensor_or_one_stream() -> None:
    texts = [TEXT, "four", "none"]

    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of(text) for text in texts[1:]]
        several = {"n": kserve.InferParameter(int64_param=3)}
        answer = await stub_of(fleet).ModelInfer(asked(parameters=several), timeout=30)
        told = {one.name: list(one.contents.bytes_contents) for one in answer.outputs}
        assert told["text_output"] == [text.encode() for text in texts]
        assert told["finish_reason"] == [b"stop"] * 3
        pieces = [one.infer_response for one in await stream(fleet, asked(parameters=several))]
        for at, text in enumerate(texts):
            own = [one for one in pieces if one.parameters["answer_index"].int64_param == at]
            assert "".join(element(one, "text_output") for one in own) == text
            assert element(own[-1], "finish_reason") == "stop"
        flags = [one.parameters["triton_final_response"].bool_param for one in pieces]
        assert flags == [False] * (len(pieces) - 1) + [True]

    run(body)


def test_a_request_that_fails_leaves_its_stream_open() -> None:
    async def body(fleet: FakeFleet) -> None:
        bad = asked("bad", parameters={"max_tokens": kserve.InferParameter(int64_param=0)})
        told = await stream(fleet, bad, asked("nowhere", model_name="nowhere"), asked("good"))
        assert [one.infer_response.id for one in told if one.error_message] == ["bad", "nowhere"]
        assert told[0].error_message.startswith(
            "INVALID_ARGUMENT: parameters['max_tokens']: expected"
        )
        assert told[1].error_message.startswith("NOT_FOUND: ")
        good = [one.infer_response for one in told[2:]]
        assert "".join(element(one, "text_output") for one in good) == TEXT

    run(body)


def test_a_fault_of_ours_ends_a_stream() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 0"] = raises(errors.Bug("an invariant of the worker's"))
        call = stub_of(fleet).ModelStreamInfer(iter([asked()]), timeout=30)
        assert isinstance(await failure(call.read()), errors.Bug)

    run(body)


def test_bad_input_is_refused_before_a_worker_sees_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        error = await failure(stub.ModelInfer(kserve.ModelInferRequest(), timeout=30))
        assert isinstance(error, errors.InvalidRequest)
        nowhere = await failure(stub.ModelInfer(asked(model_name="nowhere"), timeout=30))
        assert isinstance(nowhere, errors.NotFound)
        await stream(fleet, kserve.ModelInferRequest(id="bad"))
        assert fleet.metric("effuse_refused_total", status="INVALID_ARGUMENT", quota="false") == 2
        assert fleet.metric("effuse_refused_total", status="NOT_FOUND", quota="false") == 1
        assert not fleet.decode[0].requests

    run(body)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 256), ("top_k", 265), ("window", 0), ("n", 99), ("eps", 1)]
)
def test_a_setting_is_named_as_its_parameter_wherever_it_is_refused(name: str, value: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        bad = asked(parameters={name: kserve.InferParameter(int64_param=value)})
        error = await failure(stub_of(fleet).ModelInfer(bad, timeout=30))
        assert isinstance(error, errors.InvalidRequest)
        assert [one.field for one in error.violations] == [f"parameters['{name}']"]
        (piece,) = await stream(fleet, bad)
        assert piece.error_message == f"INVALID_ARGUMENT: {error.message}"

    run(body)


def test_the_prompt_is_named_as_the_input() -> None:
    async def body(fleet: FakeFleet) -> None:
        long = asked()
        long.inputs[0].contents.bytes_contents[0] = b"a" * 300  # only its ids show it
        error = await failure(stub_of(fleet).ModelInfer(long, timeout=30))
        assert isinstance(error, errors.InvalidRequest)
        assert [one.field for one in error.violations] == ["inputs[0]"]

    run(body)


def test_a_stream_that_is_cancelled_aborts_what_runs() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached, hanging = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(hanging, reached)
        call = stub_of(fleet).ModelStreamInfer(iter([asked()]), timeout=30)
        assert await call.read() is not grpc.aio.EOF
        await reached.wait()
        call.cancel()
        await fleet.idle()
        await fleet.decode[0].abort_came.wait()

    run(body)


def test_server_and_models_say_how_they_are() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        assert (await stub.ServerLive(kserve.ServerLiveRequest(), timeout=30)).live
        assert (await stub.ServerReady(kserve.ServerReadyRequest(), timeout=30)).ready
        for name, ready in (("fake", True), ("nowhere", False)):
            told = await stub.ModelReady(kserve.ModelReadyRequest(name=name), timeout=30)
            assert told.ready == ready
        server = await stub.ServerMetadata(kserve.ServerMetadataRequest(), timeout=30)
        assert server.name == "effuse"
        model = await stub.ModelMetadata(kserve.ModelMetadataRequest(name="fake"), timeout=30)
        assert list(_names(model)) == ["text_input", "text_output", "finish_reason"]
        nowhere = kserve.ModelMetadataRequest(name="nowhere")
        error = await failure(stub.ModelMetadata(nowhere, timeout=30))
        assert isinstance(error, errors.NotFound)

    run(body)


def test_a_router_without_workers_is_live_and_not_ready() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = stub_of(fleet)
        assert (await stub.ServerLive(kserve.ServerLiveRequest(), timeout=30)).live
        assert not (await stub.ServerReady(kserve.ServerReadyRequest(), timeout=30)).ready
        assert not (await stub.ModelReady(kserve.ModelReadyRequest(name="fake"), timeout=30)).ready

    run(body, num_prefill=0, num_decode=0)


def _names(model: kserve.ModelMetadataResponse) -> Iterator[str]:
    for tensor in (*model.inputs, *model.outputs):
        yield tensor.name
