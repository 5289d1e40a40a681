"""Calls of attempts that are over: awaited for a while, then ended, and none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from router.fake_model import worker_record
from router.fake_workers import FakeDecode, Handoffs

from effuse.placement.leases import FleetView
from effuse.placement.records import WorkerRecord
from effuse.protos.channels import FleetAccess, FleetChannel, ProofServicer
from effuse.protos.errors import PeerLost
from effuse.protos.fleet_secret import FleetSecret
from effuse.router.calls import Cleanup, Peers
from effuse.router.fleet import RoutedFleet
from effuse.v1 import worker_pb2
from effuse.v1.proof_pb2_grpc import add_ProofServiceServicer_to_server


class Call:
    """Ends on command."""

    def __init__(self) -> None:
        self.has_ended = False
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        if self.has_ended:
            callback(self)  # as grpcio does
        self._callbacks.append(callback)

    def end(self) -> None:
        self.has_ended = True
        for callback in self._callbacks:
            callback(self)


def any_call() -> Any:
    """As much of a call as its end needs."""
    return Call()


def ender(call: Call, reader: asyncio.Task[Any]) -> Callable[[], None]:
    def end() -> None:
        call.end()
        reader.cancel()

    return end


class NoWorkers(FleetView):
    def __init__(self) -> None:
        return

    def workers(self) -> list[WorkerRecord]:
        return []


def cleanup_of(settle_s: float) -> Cleanup:
    return Cleanup(Peers(lambda: 0.0), settle_s)


def test_what_ends_by_itself_is_let_be() -> None:
    async def main() -> None:
        cut: list[str] = []
        cleanup = cleanup_of(settle_s=10)
        async with cleanup.running():
            call, reader = any_call(), asyncio.create_task(asyncio.sleep(0))
            cleanup.settle_calls([call, reader], lambda: cut.append("cut"))
            assert cleanup.num_open == 1
            call.end()
        assert (cut, cleanup.num_open, cleanup.num_late) == ([], 0, 0)
        assert reader.done() and not reader.cancelled()

    asyncio.run(main())


def test_what_does_not_end_is_ended() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=0.01)
        async with cleanup.running():
            call, reader = any_call(), asyncio.create_task(asyncio.Event().wait())
            cleanup.settle_calls([call, reader], ender(call, reader))
        assert call.has_ended and reader.cancelled()
        assert (cleanup.num_open, cleanup.num_late) == (0, 1)

    asyncio.run(main())


def test_after_the_end_everything_is_ended_at_once() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=10)
        call, reader = any_call(), asyncio.create_task(asyncio.Event().wait())
        cleanup.settle_calls([call, reader], ender(call, reader))
        assert call.has_ended
        await asyncio.wait({reader}, timeout=30)
        assert reader.cancelled()

    asyncio.run(main())


def test_an_abort_tells_nothing_to_who_has_the_port_of_a_worker_that_is_gone() -> None:
    """And a process with a message would count as the worker: its connection is there."""
    ours, theirs = FleetSecret(b"the fleet's own secret"), FleetSecret(b"some other secret")

    async def serve(secret: FleetSecret, address: str = "127.0.0.1:0") -> tuple[FakeDecode, str]:
        worker, told = FakeDecode("d0", Handoffs()), address
        proof = ProofServicer(secret, lambda: told)
        add_ProofServiceServicer_to_server(proof, worker.server.server)
        port = await worker.server.start(address, [])
        told = f"127.0.0.1:{port}"
        return worker, told

    async def main() -> None:
        worker, address = await serve(ours)
        peers = Peers(lambda: 0.0, FleetAccess(secret=ours))
        channel = peers.at(address).channel
        await channel.prove()
        await worker.server.stop(0)
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        stranger, _ = await serve(theirs, address)
        cleanup, record = Cleanup(peers), worker_record("d0", "decode", address=address)
        async with cleanup.running():
            cleanup.send_abort(record, worker_pb2.AttemptId(transfer_id="t"), "why")
        assert stranger.aborted == []
        with pytest.raises(PeerLost, match="does not belong to the fleet"):
            await channel.prove()
        await peers.close()
        await stranger.server.stop(0)

    asyncio.run(main())


def test_a_worker_whose_channel_is_closed_in_that_moment_ends_no_router() -> None:
    """As of one that is gone by the time that it has shown that it belongs to the fleet."""

    async def main() -> None:
        peers, worker = Peers(lambda: 0.0), worker_record("d", "decode")
        cleanup = Cleanup(peers)
        await peers.at(worker.address).channel.close()
        assert await peers.condition_of(worker) is None
        async with cleanup.running():
            cleanup.send_abort(worker, worker_pb2.AttemptId(), "gone")
        assert cleanup.num_aborts == 1

    asyncio.run(main())


def test_a_channel_that_is_being_closed_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may come back while another one's is closed."""
    closed: set[FleetChannel] = set()
    taken: set[FleetChannel] = set()

    async def main() -> None:
        fleet, addresses = RoutedFleet(NoWorkers(), "auto", lambda: 0.0), ("a:1", "b:1")
        for address in addresses:
            fleet.peers.at(address)

        async def close(channel: FleetChannel, grace: float | None = None) -> None:
            closed.add(channel)
            taken.update(fleet.peers.at(address).channel for address in addresses)

        monkeypatch.setattr(FleetChannel, "close", close)
        await fleet.forget_ended()

    asyncio.run(main())
    assert len(closed) == 2 and not closed & taken
