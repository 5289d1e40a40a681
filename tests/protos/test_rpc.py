"""A server's border: invalid, failing and too large messages, and its end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.protos import errors, rpc
from effuse.protos.channels import OPEN, decode_stub, worker_stub
from effuse.v1 import generation_pb2_grpc
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc

SERVICE = "effuse.v1.WorkerService"
LACKING = "effuse.v1.GenerationService"  # none of its methods is there
SECRET = "the password is swordfish"


class Worker(pb_grpc.WorkerServiceServicer):
    """Fails in one way for each method."""

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.AbortResponse:
        raise KeyError(SECRET)

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(role="decode")

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DrainResponse:
        raise errors.Overloaded("64 requests wait already", retry_after_s=2.0)

    async def Undrain(
        self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.UndrainResponse:
        raise NotImplementedError

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.SetRoleResponse:
        raise NotImplementedError


class Streams(pb_grpc.DecodeServiceServicer, pb_grpc.PrefillServiceServicer):
    """Streams that break in the middle."""

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        yield pb.DecodeResponse(commit=pb.DecodeCommit(token_offset=3))
        raise ZeroDivisionError(SECRET)

    async def Rehearse(  # type: ignore[override]
        self, request: pb.RehearseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        large = pb.RehearseResponse(reservation=pb.Reservation(connector="a" * rpc.MIB))
        try:
            async with asyncio.timeout(0.2):
                while True:
                    await context.write(large)
        except TimeoutError:
            raise errors.DeadlineExceeded("the caller reads nothing") from None

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[pb.PrefillResponse]:
        async for _ in request_iterator:
            yield pb.PrefillResponse(computed=pb.PrefillComputed())


@asynccontextmanager
async def running() -> AsyncIterator[tuple[rpc.RpcServer, grpc.aio.Channel]]:
    server = rpc.RpcServer(rpc.PUBLIC_LIMITS)
    streams = Streams()
    pb_grpc.add_WorkerServiceServicer_to_server(Worker(), server.server)
    pb_grpc.add_DecodeServiceServicer_to_server(streams, server.server)
    pb_grpc.add_PrefillServiceServicer_to_server(streams, server.server)
    lacking = generation_pb2_grpc.GenerationServiceServicer()  # type: ignore[abstract]
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(lacking, server.server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    try:
        async with OPEN.connect(f"127.0.0.1:{port}", keepalive=None) as channel:
            yield server, channel
    finally:
        await server.stop(0)


def run(body: Callable[[rpc.RpcServer, grpc.aio.Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), running() as (server, channel):
            await body(server, channel)

    asyncio.run(main())


def raw(channel: grpc.aio.Channel, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    """Calls `method` with bytes as they are."""
    return channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


MALFORMED = {
    "random bytes": b"\xde\xad\xbe\xef" * 8,
    "truncated": pb.AbortRequest(reason="a" * 50).SerializeToString()[:-7],
    "invalid utf-8": b"\x12\x02\xff\xfe",
    "surrogate": b"\x12\x03\xed\xa0\x80",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_invalid_argument(data: bytes) -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, f"/{SERVICE}/Abort")(data))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a valid protobuf message" in (error.details() or "")
        assert type(errors.from_rpc_error(error, "w")) is errors.InvalidRequest
        assert (await worker_stub(channel).GetLoad(pb.GetLoadRequest())).role

    run(body)


def test_malformed_bytes_on_streams_are_invalid_argument() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        one = channel.unary_stream(
            "/effuse.v1.DecodeService/Decode", bytes, pb.DecodeResponse.FromString
        )(b"\xff\xff")
        assert (await failure(one.read())).code() is grpc.StatusCode.INVALID_ARGUMENT
        good = pb.PrefillRequest().SerializeToString()
        both = channel.stream_stream(
            "/effuse.v1.PrefillService/Prefill", bytes, pb.PrefillResponse.FromString
        )(iter([good, b"\xff\xff"]))
        await both.read()
        assert (await failure(both.read())).code() is grpc.StatusCode.INVALID_ARGUMENT

    run(body)


def test_an_exception_never_shows_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        unary = await failure(worker_stub(channel).Abort(pb.AbortRequest()))
        stream = decode_stub(channel).Decode(pb.DecodeRequest())
        first = await stream.read()
        assert isinstance(first, pb.DecodeResponse)
        assert first.commit.token_offset == 3
        for error in (unary, await failure(stream.read())):
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "swordfish" not in str(error) + str(error.trailing_metadata())
            correlation_id = errors.from_rpc_error(error, "w").labels["correlation_id"]
            assert correlation_id in (error.details() or "")
            assert correlation_id in caplog.text
            assert (errors.REQUEST_ID_KEY, correlation_id) in tuple(error.trailing_metadata() or ())

    run(body)
    assert "swordfish" in caplog.text


def test_an_error_of_the_tree_arrives_with_its_details() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        error = await failure(worker_stub(channel).Drain(pb.DrainRequest()))
        back = errors.from_rpc_error(error, "w")
        assert type(back) is errors.Overloaded
        assert (back.message, back.retry_after_s) == ("64 requests wait already", 2.0)

    run(body)


def test_a_call_whose_status_cannot_be_sent_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        unread = decode_stub(channel).Rehearse(pb.RehearseRequest(), timeout=0.5)
        assert await unread.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(body)
    assert not caplog.records


def test_a_message_over_the_limit_is_resource_exhausted() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        big = pb.AbortRequest(reason="a" * (5 * rpc.MIB))
        error = await failure(worker_stub(channel).Abort(big))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(body)


def test_unknown_method_and_unknown_fields() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        method = f"/{SERVICE}/NoSuchMethod"
        unary, stream = raw(channel, method), channel.unary_stream(method, bytes, bytes)
        for error in (await failure(unary(b"")), await failure(stream(b"").read())):
            assert type(errors.from_rpc_error(error, "w")) is errors.NotSupported
            assert error.details() == f"this server has no method {method}"
        unknown = b"\xfa\x7f" + b"\xa0\x8d\x06" + b"z" * 100_000  # field 2047, length-delimited
        assert await raw(channel, f"/{SERVICE}/GetLoad")(unknown)

    run(body)


def test_a_method_that_a_servicer_lacks_is_unimplemented(caplog: pytest.LogCaptureFixture) -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        error = await failure(raw(channel, f"/{LACKING}/Generate")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.details() == f"this server has no method /{LACKING}/Generate"

    run(body)
    assert not caplog.records


def test_health_follows_what_is_set_and_the_drain() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return int((await stub.Check(request)).status)

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await status("") == serving
        assert await status(SERVICE) != serving
        server.health.set(SERVICE, serving=True)
        assert await status(SERVICE) == serving
        server.health.drain()
        server.health.set(SERVICE, serving=True)
        assert await status(SERVICE) != serving

    run(body)


def test_health_lists_every_service() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        server.health.set(SERVICE, serving=True)
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        told = health_pb2.HealthCheckResponse
        assert {name: one.status for name, one in listed.statuses.items()} == {
            "": told.SERVING, SERVICE: told.SERVING,
        }  # fmt: skip
        server.health.drain()
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert {one.status for one in listed.statuses.values()} == {told.NOT_SERVING}

    run(body)


def test_a_port_for_health_alone_answers_and_refuses_as_the_other_one_does() -> None:
    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        port = await server.start_health("127.0.0.1:0")
        async with OPEN.connect(f"127.0.0.1:{port}", keepalive=None) as probed:
            check = health_pb2_grpc.HealthStub(probed).Check
            told = await check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
            nobody = await failure(check(health_pb2.HealthCheckRequest(service="nobody")))
            broken = await failure(raw(probed, "/grpc.health.v1.Health/Check")(b"\xff"))
            other = await failure(worker_stub(probed).GetLoad(pb.GetLoadRequest()))
        assert (nobody.code(), nobody.details()) == (
            grpc.StatusCode.NOT_FOUND,
            "this server has no service 'nobody'",
        )
        assert broken.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert other.code() is grpc.StatusCode.UNIMPLEMENTED

    run(body)


def test_a_drain_ends_watches_with_its_word() -> None:
    """One that stays open would keep the server from stopping."""

    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        stub, told = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert (await watch.read()).status == told.NOT_SERVING
        server.health.set(SERVICE, serving=True)
        assert (await watch.read()).status == told.SERVING
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=30)
        assert (await unknown.read()).status == told.SERVICE_UNKNOWN
        server.health.drain()
        assert (await watch.read()).status == told.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await unknown.read() is grpc.aio.EOF

    run(body)


def test_methods_are_found_by_their_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []

    def register(_self: object, service: str, _handlers: object) -> None:
        registered.append(service)

    async def body(server: rpc.RpcServer, channel: grpc.aio.Channel) -> None:
        assert (await worker_stub(channel).GetLoad(pb.GetLoadRequest())).role == "decode"
        assert not registered
        del server.server.add_registered_method_handlers  # as grpcio has it
        pb_grpc.add_WorkerServiceServicer_to_server(Worker(), server.server)
        assert registered == [SERVICE]

    monkeypatch.setattr("grpc.aio._server.Server.add_registered_method_handlers", register)
    run(body)


def test_only_a_proxy_in_grpcs_own_variable_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("grpc_proxy", raising=False)
    assert rpc.near_options() == [("grpc.enable_http_proxy", 0)]
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    assert not rpc.near_options()


def test_servers_that_share_a_port_take_turns() -> None:
    async def main() -> None:
        first, second, third = (
            rpc.RpcServer(rpc.PUBLIC_LIMITS, shares_port=shares) for shares in (True, True, False)
        )
        port = await first.start("127.0.0.1:0", [])
        assert await second.start(f"127.0.0.1:{port}", []) == port
        with pytest.raises(OSError, match="port is in use"):
            await third.start(f"127.0.0.1:{port}", [])
        health_port = await first.start_health("127.0.0.1:0")
        assert await second.start_health(f"127.0.0.1:{health_port}") == health_port
        with pytest.raises(OSError, match="port is in use"):
            await third.start_health(f"127.0.0.1:{health_port}")
        await first.stop(0)
        async with OPEN.connect(f"127.0.0.1:{port}", keepalive=None) as channel:
            assert await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=30
            )
        await second.stop(0)

    asyncio.run(main())


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        first, second = rpc.RpcServer(rpc.PUBLIC_LIMITS), rpc.RpcServer(rpc.PUBLIC_LIMITS)
        port = await first.start("127.0.0.1:0", [])
        with pytest.raises(OSError, match="port is in use"):
            await second.start(f"127.0.0.1:{port}", [])
        await first.stop(0)

    asyncio.run(main())


def test_ready_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    rpc.write_ready_file(path, "127.0.0.1:50051")
    assert json.loads(path.read_text()) == {"address": "127.0.0.1:50051", "pid": os.getpid()}
    assert [p.name for p in tmp_path.iterdir()] == ["ready"]


def test_a_connection_is_renewed_and_what_runs_over_it_ends_first() -> None:
    async def body() -> None:
        peers: set[str] = set()

        class Counting(Worker):
            async def GetLoad(
                self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
            ) -> pb.GetLoadResponse:
                peers.add(context.peer())
                return pb.GetLoadResponse()

        server = rpc.RpcServer(replace(rpc.PUBLIC_LIMITS, max_age_s=0.3))
        pb_grpc.add_WorkerServiceServicer_to_server(Counting(), server.server)
        port = await server.start("127.0.0.1:0", [SERVICE])
        told = health_pb2.HealthCheckResponse
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
            assert (await watch.read()).status == told.NOT_SERVING
            while len(peers) < 3:
                await worker_stub(channel).GetLoad(pb.GetLoadRequest())
                await asyncio.sleep(0.01)
            server.health.set(SERVICE, serving=True)
            assert (await watch.read()).status == told.SERVING, "over the first connection"
            watch.cancel()
        await server.stop(0.0)

    async def main() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(main())
