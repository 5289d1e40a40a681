"""Every call of a router has a place in reflection, and its request's id in the trailers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from router.asking import request
from router.fakes import FakeFleet, run

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_public_services_and_describes_each(version: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        ask_for = reflection_pb2.ServerReflectionRequest
        call: Any = fleet.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            ask_for.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=30)
        await call.write(ask_for(list_services=""))
        listed = (await call.read()).list_services_response
        names = {service.name for service in listed.service}
        assert names == {
            "effuse.v1.GenerationService", "effuse.v1.ModelService",
            "effuse.v1.MonitorService", "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
            "vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService",
        }  # fmt: skip
        for name in names:
            await call.write(ask_for(file_containing_symbol=name))
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            assert name in _services_of(files)
        await call.done_writing()

    run(body)


def _services_of(files: Iterable[bytes]) -> set[str]:
    """Full names of the services of `files`, which have to be whole, whatever their order."""
    pool, waiting = descriptor_pool.DescriptorPool(), list(files)
    found: set[str] = set()
    for _ in range(len(waiting)):  # each turn adds at least one whose imports are there
        for data in waiting.copy():
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            with contextlib.suppress(TypeError):
                pool.AddSerializedFile(data)
                waiting.remove(data)
                found |= {f"{file.package}.{service.name}" for service in file.service}
    assert not waiting
    return found


@pytest.mark.parametrize("request_id", ["mine", None, "bad", "no id"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_every_answer_and_every_error_names_the_request(
    request_id: str | None, is_stream: bool
) -> None:
    stopping = pb.StoppingParams(max_tokens=0) if request_id == "bad" else None

    async def body(fleet: FakeFleet) -> None:
        stub = fleet.generation
        asked = request(request_id=request_id, stopping=stopping)
        call: Any
        if is_stream:
            call = stub.GenerateStream(pb.GenerateStreamRequest(request=asked), timeout=30)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [event async for event in call]
        else:
            call = stub.Generate(asked, timeout=30)
        assert (await call.code() is grpc.StatusCode.OK) == (request_id in ("mine", None))
        named = dict(await call.trailing_metadata())[errors.REQUEST_ID_KEY]
        assert named and named != "no id"
        if request_id in ("mine", "bad"):
            assert named == request_id

    run(body)
