"""Asking a writer to let go: its word, its end, silence; beside us and elsewhere."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import errno
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from effuse.kvtransfer.messages import AttemptId
from effuse.protos import rpc
from effuse.protos.channels import FleetAccess, ProofServicer
from effuse.protos.errors import Unavailable
from effuse.protos.fleet_secret import FleetSecret
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.v1.proof_pb2_grpc import add_ProofServiceServicer_to_server
from effuse.worker import peer
from effuse.worker.engine_process import listen_while_alive
from effuse.worker.peer import Patience

NOBODY = 20011  # no process listens there, and no kernel hands it out
ONE = AttemptId("r", 1, "t1")
QUICK = Patience(call_s=20.0, first_pause_s=0.001, most_pause_s=0.002, elsewhere_s=60.0)
HURRIED = dataclasses.replace(QUICK, call_s=0.05)  # where no call is answered in any case


class Worker(pb_grpc.WorkerServiceServicer):
    """Fails a number of times before it answers."""

    def __init__(self, failures: int = 0, **answer: Any) -> None:
        self.failures = failures
        self.answer = pb.AbortResponse(**{"incarnation": "life", "drained": True, **answer})
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

    async def Undrain(
        self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.UndrainResponse:
        raise NotImplementedError

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.SetRoleResponse:
        raise NotImplementedError


@asynccontextmanager
async def serving(worker: Worker, secret: FleetSecret | None = None) -> AsyncIterator[pb.WorkerRef]:
    """secret: the one that it proves."""
    server = rpc.RpcServer(rpc.FLEET_LIMITS)
    pb_grpc.add_WorkerServiceServicer_to_server(worker, server.server)
    if secret is not None:
        proof = ProofServicer(secret, lambda: f"127.0.0.1:{port}")
        add_ProofServiceServicer_to_server(proof, server.server)
    port = await server.start("127.0.0.1:0", ["effuse.v1.WorkerService"])
    try:
        yield pb.WorkerRef(
            address=f"127.0.0.1:{port}", incarnation="life", engine_port=NOBODY, place=peer.here()
        )
    finally:
        await server.stop(0)


def changed(writer: pb.WorkerRef, **fields: Any) -> pb.WorkerRef:
    made = copy.copy(writer)
    made.MergeFrom(pb.WorkerRef(**fields))
    return made


def elsewhere(writer: pb.WorkerRef) -> pb.WorkerRef:
    """The writer on another machine."""
    return changed(writer, place="another-boot,net:[1],ipc:[1],pid:[1]")


async def within(writer: pb.WorkerRef) -> bool:
    async with asyncio.timeout(20):
        return await peer.until_ended(writer, ONE, "test", patience=QUICK)


async def tries(
    writer: pb.WorkerRef, elapsed_s: float, most: int = 5, patience: Patience = QUICK
) -> int:
    """How often the writer is called before it is given up, each attempt `elapsed_s` after the one
    before; `most` if it is not given up.
    """
    asked = iter(range(most))
    clock = (number * elapsed_s for number in itertools.count())

    def goes_on() -> bool:
        return next(asked, None) is not None

    async with asyncio.timeout(20):
        has_drained = await peer.until_ended(
            writer, ONE, "test", patience=patience, now=lambda: next(clock), goes_on=goes_on
        )
    assert not has_drained
    left = len(list(asked))
    return most - left


@asynccontextmanager
async def silence() -> AsyncIterator[pb.WorkerRef]:
    """A writer that accepts connections and sends nothing; its engine's port is open, too."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield pb.WorkerRef(
            address=f"127.0.0.1:{port}", incarnation="life", engine_port=port, place=peer.here()
        )
        assert connections
        for writer in connections:
            writer.close()


@pytest.mark.parametrize("is_of_the_fleet", [True, False])
def test_the_word_of_who_has_not_shown_that_it_is_of_the_fleet_frees_nothing(
    is_of_the_fleet: bool,
) -> None:
    """A process at a dead writer's port could learn the answer from the question."""
    access = FleetAccess(secret=FleetSecret(b"the fleet's own secret"))

    async def go() -> None:
        worker = Worker()
        async with serving(worker, access.secret if is_of_the_fleet else None) as writer:
            asked = iter(range(2))
            has_drained = await peer.until_ended(
                writer, ONE, "test", access=access, patience=QUICK,
                goes_on=lambda: next(asked, None) is not None,
            )  # fmt: skip
        assert (has_drained, len(worker.asked)) == (is_of_the_fleet, int(is_of_the_fleet))

    asyncio.run(go())


def test_its_own_word_is_enough_wherever_it_is() -> None:
    async def go() -> None:
        worker = Worker()
        async with serving(worker) as writer:
            assert await within(writer)
            assert await within(elsewhere(writer))
        first, _ = worker.asked
        assert first.attempt == pb.AttemptId(request_id="r", attempt=1, transfer_id="t1")
        assert first.incarnation == "life"

    asyncio.run(go())


@pytest.mark.parametrize("incarnation", ["life", "another-life"])
def test_its_front_may_say_that_its_process_has_ended_but_not_that_all_has_arrived(
    incarnation: str,
) -> None:
    async def go() -> None:
        worker = Worker(incarnation=incarnation, drained=incarnation != "life", life_is_over=True)
        async with serving(worker) as writer:
            with listen_while_alive("127.0.0.1") as engine:
                port = engine.getsockname()[1]
                assert not await within(changed(writer, engine_port=port))

    asyncio.run(go())


@pytest.mark.parametrize("incarnation", ["life", "another-life"])
def test_a_front_that_has_not_seen_its_end_proves_nothing(incarnation: str) -> None:
    """For example if an engine does not die, or a front was killed and another one has taken its
    port.
    """

    async def go() -> None:
        worker = Worker(incarnation=incarnation, drained=incarnation != "life")
        async with serving(worker) as writer:
            with listen_while_alive("127.0.0.1") as engine:
                port = engine.getsockname()[1]
                writer = changed(writer, engine_port=port)
                assert await tries(writer, elapsed_s=1e6) == 5
            assert not await within(writer)
            assert await tries(elsewhere(writer), elapsed_s=1.0) == 1

    asyncio.run(go())


def test_it_is_asked_until_it_answers() -> None:
    async def go() -> None:
        worker = Worker(failures=3)
        async with serving(worker) as writer:
            with listen_while_alive("127.0.0.1") as engine:
                port = engine.getsockname()[1]
                assert await within(changed(writer, engine_port=port))
        assert len(worker.asked) == 4

    asyncio.run(go())


def test_an_engine_that_outlives_its_front_is_waited_for() -> None:
    """A front that was killed cannot answer, and its engine may still write."""

    async def go() -> None:
        async with serving(Worker()) as writer:
            pass
        with listen_while_alive("127.0.0.1") as engine:
            port = engine.getsockname()[1]
            writer = changed(writer, engine_port=port)
            assert await tries(writer, elapsed_s=1e6) == 5
        assert not await within(writer)

    asyncio.run(go())


def test_no_silence_is_long_enough_for_one_that_is_beside_us() -> None:
    async def go() -> None:
        async with silence() as writer:
            assert await tries(writer, elapsed_s=1e6, patience=HURRIED) == 5

    asyncio.run(go())


def test_one_elsewhere_is_asked_for_a_while() -> None:
    """Then our end of the connection is closed, and it need not agree."""

    async def go() -> None:
        async with silence() as writer:
            assert await tries(elsewhere(writer), elapsed_s=25.0, patience=HURRIED) == 3

    asyncio.run(go())


def test_a_host_of_two_addresses_has_a_free_port_once_both_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As names do that stand for both an IPv4 and an IPv6 address."""

    async def go() -> None:
        loop = asyncio.get_running_loop()
        with listen_while_alive("127.0.0.2") as engine:
            port = engine.getsockname()[1]
            both = [
                info
                for address in ("127.0.0.2", "127.0.0.3")  # other tests listen on 127.0.0.1
                for info in await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            ]

            async def getaddrinfo(host: str, port: int, **hints: int) -> object:
                return both

            monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
            assert not await peer.is_free(f"two:{port}", 20.0)
        assert await peer.is_free(f"two:{port}", 20.0)

    asyncio.run(go())


def test_a_kernel_without_ipv6_knows_of_a_name_that_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *kind)

    async def go() -> None:
        loop = asyncio.get_running_loop()
        found = [
            info
            for address in ("127.0.0.1", "::1")
            for info in await loop.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        ]

        async def getaddrinfo(host: str, port: int, **hints: int) -> object:
            return found

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(socket, "socket", without_ipv6)
        assert await peer.is_free("both:0", 20.0)
        monkeypatch.setattr(socket, "socket", make)

    asyncio.run(go())


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 70, "a\0b"])
def test_of_a_port_that_is_not_ours_nothing_is_known(host: str) -> None:
    """A refused connection there may come from a firewall."""
    assert not asyncio.run(peer.is_free(f"{host}:50051", 20.0))


def test_a_port_that_somebody_has_connected_to_is_free_again() -> None:
    async def go() -> None:
        with listen_while_alive("127.0.0.1") as engine:
            port = engine.getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            assert not await peer.is_free(f"127.0.0.1:{port}", 20.0)
        assert await peer.is_free(f"127.0.0.1:{port}", 20.0)
        writer.close()

    asyncio.run(go())


@pytest.mark.parametrize("which", [0, 1])
def test_both_signs_of_life_must_be_gone(which: int) -> None:
    """Kernels differ in which descriptor they close first, and a device lies between the two."""

    async def go() -> None:
        first = listen_while_alive("127.0.0.1")
        port = first.getsockname()[1]
        signs = [first, listen_while_alive("127.0.0.1", port)]
        signs.pop(which).close()
        assert not await peer.is_free(f"127.0.0.1:{port}", 20.0)
        signs[0].close()
        assert await peer.is_free(f"127.0.0.1:{port}", 20.0)

    asyncio.run(go())


OWN_KERNEL, *OWN_SPACES = peer.here().split(",")


@pytest.mark.parametrize(
    ("place", "address", "is_beside"),
    [
        (peer.here(), "192.0.2.1:1", True),
        (f"{OWN_KERNEL},net:[1],{OWN_SPACES[1]},pid:[1]", "192.0.2.1:1", True),
        (f"{OWN_KERNEL},net:[1],ipc:[1],pid:[1]", "127.0.0.1:1", False),
        (",".join(["another-boot", *OWN_SPACES]), "127.0.0.1:1", False),
        ("", "127.0.0.1:1", True),
        ("", "192.0.2.1:1", False),
        ("", f"{'a' * 70}:1", False),
    ],
)
def test_who_shares_the_kernel_and_a_namespace_is_beside_us(
    place: str, address: str, is_beside: bool
) -> None:
    writer = pb.WorkerRef(address=address, incarnation="life", engine_port=NOBODY, place=place)
    assert asyncio.run(peer.is_beside_us(writer, 20.0)) is is_beside
