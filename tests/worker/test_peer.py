"""Asking a writer to let go: an answer, another life, a refusal, silence, a broken one."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from effuse.kvtransfer.messages import AttemptId
from effuse.protos import rpc
from effuse.protos.errors import Unavailable
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker import peer
from effuse.worker.engine_process import listen_while_alive
from effuse.worker.peer import Patience
from effuse.worker.wire import Writer

NOBODY = 1  # a port of this machine that nobody listens on
ONE = AttemptId("r", 1, "t1")
QUICK = Patience(call_s=20.0, first_pause_s=0.001, most_pause_s=0.002, lost_after_s=60.0)


class Worker(pb_grpc.WorkerServiceServicer):
    """Fails a number of times before it answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.answer = pb.AbortResponse(incarnation="another-life", drained=True)
        self.asked: list[pb.AbortRequest] = []

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.AbortResponse:
        self.asked.append(request)
        if len(self.asked) <= self.failures:
            raise Unavailable("still ending")
        return self.answer

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetLoadResponse:
        raise NotImplementedError

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DrainResponse:
        raise NotImplementedError


@asynccontextmanager
async def serving(worker: Worker) -> AsyncIterator[Writer]:
    server = rpc.RpcServer(rpc.FLEET_LIMITS)
    pb_grpc.add_WorkerServiceServicer_to_server(worker, server.server)
    port = await server.start("127.0.0.1:0", ["effuse.v1.WorkerService"])
    try:
        yield Writer(f"127.0.0.1:{port}", "life", NOBODY)
    finally:
        await server.stop(0)


async def within(writer: Writer, patience: Patience) -> bool:
    async with asyncio.timeout(20):
        return await peer.until_gone(writer, ONE, "test", patience=patience)


@pytest.mark.parametrize(
    ("incarnation", "drained", "said_so"),
    [("life", True, True), ("life", False, False), ("another-life", True, False)],
)
def test_an_answer_of_whatever_life_is_enough_but_only_its_own_says_that_all_has_arrived(
    incarnation: str, drained: bool, said_so: bool
) -> None:
    async def go() -> None:
        worker = Worker(failures=0)
        worker.answer = pb.AbortResponse(incarnation=incarnation, drained=drained)
        async with serving(worker) as writer:
            assert await within(writer, QUICK) is said_so
        (asked,) = worker.asked
        assert asked.attempt == pb.AttemptId(request_id="r", attempt=1, transfer_id="t1")

    asyncio.run(go())


def test_it_is_asked_until_it_answers() -> None:
    async def go() -> None:
        worker = Worker(failures=3)
        async with serving(worker) as writer:
            await within(writer, QUICK)
        assert len(worker.asked) == 4

    asyncio.run(go())


def test_a_refused_connection_proves_that_it_is_gone() -> None:
    async def go() -> None:
        async with serving(Worker(0)) as writer:
            pass
        assert not await within(writer, QUICK)

    asyncio.run(go())


def test_an_engine_that_outlives_its_front_is_waited_for() -> None:
    """A front that was killed cannot answer, and its engine may still write."""

    async def go() -> None:
        async with serving(Worker(0)) as writer:
            pass
        with listen_while_alive("127.0.0.1") as engine:
            port = engine.getsockname()[1]
            asking = asyncio.create_task(
                within(dataclasses.replace(writer, engine_port=port), QUICK)
            )
            await asyncio.sleep(0.3)
            assert not asking.done()
        assert not await asking

    asyncio.run(go())


@pytest.mark.parametrize(("listens", "is_gone"), [(False, True), (True, False)])
def test_a_host_of_two_addresses_is_gone_once_both_refuse(
    listens: bool, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As names do that stand for both an IPv4 and an IPv6 address."""

    async def go() -> None:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.2", 0)
        port = server.sockets[0].getsockname()[1]
        both = [
            info
            for address in ("127.0.0.1", "127.0.0.2")
            for info in await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        ]
        if not listens:
            server.close()
        resolve = loop.getaddrinfo

        async def getaddrinfo(host: str, port: int, **hints: int) -> object:
            return both if host == "two" else await resolve(host, port, **hints)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        clock = iter(float(second) for second in range(1000))
        patience = Patience(call_s=1.0, first_pause_s=0.001, most_pause_s=0.001, lost_after_s=3.0)
        writer = Writer(f"two:{port}", "life", port)
        async with asyncio.timeout(20):
            await peer.until_gone(writer, ONE, "test", patience=patience, now=lambda: next(clock))
        assert (next(clock) < 4.0) is is_gone
        server.close()

    asyncio.run(go())


def test_one_that_accepts_and_says_nothing_is_not_gone_until_patience_ends() -> None:
    async def go() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)

        connections: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        clock = iter(float(second) for second in range(1000))
        async with server:
            patience = Patience(
                call_s=0.05, first_pause_s=0.001, most_pause_s=0.001, lost_after_s=3.0
            )
            async with asyncio.timeout(20):
                await peer.until_gone(
                    Writer(f"127.0.0.1:{port}", "life", NOBODY),
                    ONE,
                    "test",
                    patience=patience,
                    now=lambda: next(clock),
                )
            for writer in connections:
                writer.close()
        assert next(clock) >= 4.0
        assert connections

    asyncio.run(go())


@pytest.mark.parametrize("host", ["a" * 70, "a\0b"])
def test_a_name_that_no_host_can_have_is_no_proof_and_no_harm(host: str) -> None:
    async def go() -> None:
        clock = iter(float(second) for second in range(1000))
        patience = Patience(call_s=0.05, first_pause_s=0.001, most_pause_s=0.001, lost_after_s=3.0)
        writer = Writer(f"{host}:50051", "life", NOBODY)
        async with asyncio.timeout(20):
            await peer.until_gone(writer, ONE, "test", patience=patience, now=lambda: next(clock))
        assert next(clock) >= 4.0

    asyncio.run(go())
