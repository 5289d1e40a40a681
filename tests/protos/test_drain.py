"""A server's end: running calls, waiting calls, endless calls, and where callers go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from effuse.protos import rpc
from effuse.protos.channels import OPEN

Call = Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def serving(
    behaviour: Callable[[bytes, object], Awaitable[object]],
) -> AsyncIterator[tuple[rpc.RpcServer, str, Call]]:
    """A server with one method, its address, and how to call it."""
    server = rpc.RpcServer(rpc.PUBLIC_LIMITS)
    methods = {"M": grpc.unary_unary_rpc_method_handler(behaviour, bytes, bytes)}
    handler = grpc.method_handlers_generic_handler("t.T", methods)
    server.server.add_generic_rpc_handlers((handler,))
    address = f"127.0.0.1:{await server.start('127.0.0.1:0', [])}"
    async with asyncio.timeout(60), OPEN.connect(address, keepalive=None) as channel:
        method = channel.unary_unary("/t.T/M", bytes, bytes)
        yield server, address, lambda: asyncio.ensure_future(method(b""))
    await server.stop(0)


def test_a_server_that_closes_first_ends_what_it_has_and_takes_no_more() -> None:
    async def main() -> None:
        stop, go, drained = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(request: bytes, context: object) -> bytes:
            stop.set()
            await go.wait()
            return b"whole"

        async with serving(slow) as (server, address, call):

            async def on_drain() -> None:
                drained.set()
                with pytest.raises(OSError):
                    while True:  # it closes its port beside this
                        (await asyncio.open_connection(*address.split(":")))[1].close()
                go.set()

            answer = call()
            await rpc.serve(server, stop, drain_s=30, on_drain=on_drain, closes_first=True)
            assert (await answer, drained.is_set()) == (b"whole", True)

    asyncio.run(main())


@pytest.mark.parametrize("closes_first", [True, False])
def test_calls_that_wait_to_be_taken_in_as_a_server_stops_are_answered(closes_first: bool) -> None:
    async def main() -> None:
        stop = asyncio.Event()

        async def quick(request: bytes, context: object) -> bytes:
            return b"whole"

        async with serving(quick) as (server, _, call):
            await call()
            answers = [call() for _ in range(8)]
            await asyncio.sleep(0)  # they are on their way
            time.sleep(0.2)  # noqa: ASYNC251 - the library's threads take them in meanwhile
            stop.set()
            await rpc.serve(server, stop, drain_s=30, closes_first=closes_first)
            assert await asyncio.gather(*answers) == [b"whole"] * 8

    asyncio.run(main())


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_call_that_never_ends_does_not_outlast_the_drain(
    closes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "LAST_S", 0.1)

    async def main() -> None:
        stop, never = asyncio.Event(), asyncio.Event()

        async def hang(request: bytes, context: object) -> None:
            stop.set()
            await never.wait()

        async def on_drain() -> None:
            """There is nothing to end."""

        async with serving(hang) as (server, _, call):
            answer = call()
            await rpc.serve(server, stop, drain_s=300, on_drain=on_drain, closes_first=closes_first)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_sigterm_drains() -> None:
    async def main() -> None:
        drained = asyncio.Event()

        async def on_drain() -> None:
            drained.set()

        async def quick(request: bytes, context: object) -> bytes:
            return b"whole"

        async with serving(quick) as (server, _, call), rpc.shutdown_signal() as stop:
            assert await call() == b"whole"
            until_end = asyncio.create_task(rpc.serve(server, stop, drain_s=5, on_drain=on_drain))
            os.kill(os.getpid(), signal.SIGTERM)
            await until_end
            assert drained.is_set()

    asyncio.run(main())
