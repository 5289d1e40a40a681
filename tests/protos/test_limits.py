"""A server's limits for one peer: metadata up to a bound, and connections that are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.protos import rpc
from effuse.protos.channels import OPEN

ASK = health_pb2.HealthCheckRequest()


@asynccontextmanager
async def asked(limits: rpc.MessageLimits) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.RpcServer(limits)
    port = await server.start("127.0.0.1:0", [])
    async with OPEN.connect(f"127.0.0.1:{port}", keepalive=None) as channel:
        yield channel
    await server.stop(0)


def test_large_metadata_is_refused_every_time() -> None:
    async def main() -> None:
        async with asked(rpc.PUBLIC_LIMITS) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for size in (1000, 9000, 9000, 15000, 100_000):
                call = health.Check(ASK, timeout=20, metadata=(("x-filler", "x" * size),))
                if size == 1000:
                    await call
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


def test_a_connection_without_calls_is_closed() -> None:
    async def main() -> None:
        async with asked(replace(rpc.PUBLIC_LIMITS, max_idle_s=0.1)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(ASK, timeout=20)
            async with asyncio.timeout(30):
                while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
            await health.Check(ASK, timeout=20)  # over another one

    asyncio.run(main())
