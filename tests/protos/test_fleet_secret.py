"""How processes of a fleet prove their secret to each other, and that it opens nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from fronts import PrefillPeer
from slowness import patient

from effuse.protos import rpc
from effuse.protos.channels import (
    OPEN,
    TOKEN_KEY,
    FleetAccess,
    FleetChannel,
    FleetOnly,
    ProofServicer,
    prefill_stub,
    proof_stub,
    worker_stub,
)
from effuse.protos.errors import PeerLost
from effuse.protos.fleet_secret import FleetSecret
from effuse.v1 import proof_pb2, worker_pb2
from effuse.v1.proof_pb2_grpc import add_ProofServiceServicer_to_server
from effuse.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

OURS, THEIRS = FleetSecret(b"ours" * 8), FleetSecret(b"theirs" * 8)
ABORT = worker_pb2.AbortRequest(attempt=worker_pb2.AttemptId(transfer_id="t"))


@asynccontextmanager
async def serving(
    secret: FleetSecret, announced: str = ""
) -> AsyncIterator[tuple[str, PrefillPeer]]:
    """A worker's server, announced under its listening address or another one."""
    address = [announced]
    server = rpc.RpcServer(rpc.FLEET_LIMITS, doorkeeper=FleetOnly(secret, lambda: address[0]))
    peer = PrefillPeer()
    peer.may_answer.set()
    add_WorkerServiceServicer_to_server(peer, server.server)
    proof = ProofServicer(secret, lambda: address[0])
    add_ProofServiceServicer_to_server(proof, server.server)
    port = await server.start("127.0.0.1:0", [])
    address[0] = announced or f"127.0.0.1:{port}"
    try:
        yield f"127.0.0.1:{port}", peer
    finally:
        await server.stop(0)


async def refusal(channel: grpc.aio.Channel, **shown: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_stub(channel).Abort(ABORT, timeout=20, metadata=tuple(shown.items()))
    return caught.value


def test_who_knows_the_secret_is_let_in_and_nobody_else() -> None:
    async def main() -> None:
        async with serving(OURS) as (address, peer):
            async with FleetAccess(secret=OURS).connect(address) as channel:
                await channel.prove()
                await worker_stub(channel).Abort(ABORT, timeout=20)
                assert peer.asked == ["t"]
            wrong = [{}, {TOKEN_KEY: THEIRS.token(address)}, {TOKEN_KEY: OURS.token("other:1")}]
            for shown in wrong:
                async with OPEN.connect(address) as stray:
                    error = await refusal(stray, **shown)
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert error.details() == "this call needs credentials that this server accepts"
            assert peer.asked == ["t"]

    asyncio.run(main())


def test_streams_are_refused_before_anything_is_read() -> None:
    async def main() -> None:
        async with serving(OURS) as (address, _), OPEN.connect(address) as stray:
            call = prefill_stub(stray).Prefill(timeout=20)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


@pytest.mark.parametrize("secret", [THEIRS, OURS])
def test_a_stranger_cannot_prove_itself(secret: FleetSecret) -> None:
    """Not by a secret of its own, nor by asking a worker of ours at another address."""

    async def main() -> None:
        announced = "" if secret is THEIRS else "127.0.0.1:1"
        async with (
            serving(secret, announced) as (address, _),
            FleetAccess(secret=OURS).connect(address) as channel,
        ):
            with pytest.raises(PeerLost, match="does not belong to the fleet"):
                await channel.prove()

    asyncio.run(main())


def test_a_new_connection_is_proven_anew() -> None:
    """Another process may have the port by then."""

    async def prove_at(channel: FleetChannel, secret: FleetSecret, address: str) -> None:
        server = rpc.RpcServer(rpc.FLEET_LIMITS)
        proof = ProofServicer(secret, lambda: address)
        add_ProofServiceServicer_to_server(proof, server.server)
        await server.start(address, [])
        try:
            await channel.prove()
        finally:
            await server.stop(0)

    async def main() -> None:
        async with serving(OURS) as (address, _):
            channel = FleetAccess(secret=OURS).connect(address)
            await channel.prove()
            assert channel.get_state() is grpc.ChannelConnectivity.READY
        # gRPC's own thread reads that the connection has ended.
        async with asyncio.timeout(patient(10)):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        with pytest.raises(PeerLost):
            await prove_at(channel, THEIRS, address)
        await channel.close()

    asyncio.run(main())


def test_a_nonce_of_another_form_is_refused() -> None:
    async def main() -> None:
        async with serving(OURS) as (address, _), OPEN.connect(address) as stray:
            for nonce in (b"", b"short", bytes(65)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await proof_stub(stray).Prove(proof_pb2.ProveRequest(nonce=nonce), timeout=20)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_file_of_a_secret(tmp_path: Path) -> None:
    made = tmp_path / "secret"
    FleetSecret.make(made)
    assert made.stat().st_mode & 0o777 == 0o600
    first = FleetSecret.read(made).token("a:1")
    made.write_bytes(made.read_bytes() + b"\n")  # as editors do
    assert FleetSecret.read(made).token("a:1") == first != FleetSecret.read(made).token("a:2")
    (tmp_path / "short").write_text("hello")
    with pytest.raises(OSError, match="--fleet-secret: expected 16 to 4096 bytes, got 5"):
        FleetSecret.read(tmp_path / "short")


def test_what_is_derived_depends_on_how_it_is_divided() -> None:
    assert OURS.derive("a", b"bc") != OURS.derive("a", b"b", b"c") != OURS.derive("ab", b"c")


def test_a_file_without_an_end_is_no_secret() -> None:
    with pytest.raises(OSError, match="expected 16 to 4096 bytes, got"):
        FleetSecret.read(Path("/dev/zero"))
