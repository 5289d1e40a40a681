"""A peer that stands still raises nothing by itself: pings find it out, from either end."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import psutil
import pytest
from eventually import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slowness import patient

import effuse
from effuse.protos import rpc
from effuse.protos.channels import OPEN
from effuse.protos.errors import PeerLost
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc

# A busy machine has long to answer a ping.
QUICK = rpc.Keepalive(time_s=0.5, timeout_s=patient(2.0), ping_timeout_s=patient(2.0))
SEVERAL_PINGS_S = 1.0 + patient(2.0)  # and the first of them has timed out, if nothing answers
PING, ACK = 6, 1  # a type and a flag of HTTP/2
CALLER = """
import sys, grpc
from effuse.v1 import worker_pb2, worker_pb2_grpc
stub = worker_pb2_grpc.DecodeServiceStub(grpc.insecure_channel(sys.argv[1]))
for _ in stub.Decode(worker_pb2.DecodeRequest()):
    print("begun", flush=True)
"""
SERVER = """
import asyncio
from effuse.protos import rpc
from effuse.protos.channels import OPEN
async def main():
    server = rpc.RpcServer(rpc.FLEET_LIMITS)
    print(await server.start("127.0.0.1:0", []), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""

ROUTER = """
import asyncio
from effuse.protos import rpc
from effuse.protos.channels import OPEN
from effuse.v1 import generation_pb2 as pb, generation_pb2_grpc as pb_grpc
class Router(pb_grpc.GenerationServiceServicer):
    async def GenerateStream(self, request, context):
        yield pb.GenerateStreamResponse(commit=pb.BlockCommit(text="begun"))
        await asyncio.sleep(1000)
async def main():
    server = rpc.RpcServer(rpc.PUBLIC_LIMITS)
    pb_grpc.add_GenerationServiceServicer_to_server(Router(), server.server)
    print(await server.start("127.0.0.1:0", []), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


class Endless(pb_grpc.DecodeServiceServicer):
    """Answers that never end, and how many run."""

    def __init__(self) -> None:
        self.running = 0

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        self.running += 1
        try:
            yield pb.DecodeResponse()
            await asyncio.sleep(1000)
        finally:
            self.running -= 1

    async def Rehearse(
        self, request: pb.RehearseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.RehearseResponse]:
        yield pb.RehearseResponse()


@asynccontextmanager
async def child(code: str, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A process and its first line of output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code, *arguments), stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            said = await process.stdout.readline()
        yield process, said.decode().strip()
    finally:
        process.kill()
        async with asyncio.timeout(30):
            await process.wait()


async def stop(process: Process) -> None:
    """Has the process stand still."""
    process.send_signal(signal.SIGSTOP)
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def test_the_calls_of_a_caller_that_stands_still_are_ended() -> None:
    async def go() -> None:
        endless, server = Endless(), rpc.RpcServer(rpc.FLEET_LIMITS, QUICK)
        pb_grpc.add_DecodeServiceServicer_to_server(endless, server.server)
        port = await server.start("127.0.0.1:0", [])
        try:
            async with child(CALLER, f"127.0.0.1:{port}") as (caller, said):
                assert (said, endless.running) == ("begun", 1)
                await asyncio.sleep(SEVERAL_PINGS_S)
                assert endless.running == 1, "a caller that answers pings was cut off"
                await stop(caller)
                await eventually(lambda: endless.running == 0)
        finally:
            await server.stop(0)

    asyncio.run(go())


def test_a_server_that_stands_still_fails_the_calls_to_it() -> None:
    async def go() -> None:
        async with (
            child(SERVER) as (server, port),
            OPEN.connect(f"127.0.0.1:{port}") as channel,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=""), timeout=60
            )
            async with asyncio.timeout(60):
                assert await watch.read() is not grpc.aio.EOF
                await stop(server)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await watch.read()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(go())


def test_a_router_that_stands_still_fails_the_calls_of_its_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "CALLER_KEEPALIVE", QUICK)

    async def go() -> None:
        async with (
            child(ROUTER) as (router, port),
            effuse.AsyncClient(f"127.0.0.1:{port}", timeout_s=60.0, max_attempts=1) as client,
        ):
            pieces = client.stream("hello")
            assert await anext(pieces) == "begun"
            await asyncio.sleep(SEVERAL_PINGS_S)
            await stop(router)
            with pytest.raises(PeerLost):
                await anext(pieces)

    asyncio.run(go())


def test_a_caller_in_the_fleet_pings_only_while_calls_run() -> None:
    """A router has a thousand connections; a server frees those of lost callers."""
    name = "grpc.keepalive_permit_without_calls"
    caller = dict(rpc.channel_options(rpc.FLEET_KEEPALIVE))
    server = dict(rpc.server_options(rpc.FLEET_LIMITS, rpc.CALLER_KEEPALIVE))
    assert (caller[name], server[name]) == (0, 1)


def test_a_caller_in_the_fleet_does_not_probe_the_bandwidth() -> None:
    """On a channel that is seldom used each call would be a ping and its answer."""
    sent = bytearray()

    async def go() -> None:
        server, ended = rpc.RpcServer(rpc.FLEET_LIMITS), asyncio.Event()
        port = await server.start("127.0.0.1:0", [])

        async def pass_on(
            source: asyncio.StreamReader, target: asyncio.StreamWriter, seen: bytearray
        ) -> None:
            while data := await source.read(1 << 16):
                seen += data
                target.write(data)
            target.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, outer, sent), pass_on(inner, writer, bytearray()))
            ended.set()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
            address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
            async with OPEN.connect(address, keepalive=None) as channel:
                for _ in range(3):
                    await health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=patient(10.0)
                    )
            await ended.wait()
        await server.stop(0.0)

    asyncio.run(go())
    assert PING not in [kind for kind, flags in frames(bytes(sent)) if not flags & ACK]


def frames(sent: bytes) -> Iterator[tuple[int, int]]:
    """Types and flags of the HTTP/2 frames that a caller has sent."""
    at = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    while at < len(sent):
        yield sent[at + 3], sent[at + 4]
        at += 9 + int.from_bytes(sent[at : at + 3], "big")
