"""A front measures its links: its results and reports, and peers that refuse, stall, lie or die."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import fake_engine
import fronts
import grpc.aio
import msgspec
import pytest
from fronts import running
from slowness import patient

from effuse.placement.records import Link, WorkerRecord
from effuse.prefill_worker import server as prefill_server
from effuse.prefill_worker.server import Rehearsals, make_role
from effuse.protos import rpc
from effuse.protos.errors import Overloaded
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker.config import PrefillConfig, WorkerConfig

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")
LOGGER = "effuse.prefill_worker"
RATE = 64 / 0.25  # of the engine without a model


class Peer(pb_grpc.DecodeServiceServicer):
    """A decode worker that lends two pages, unless a test has it do something else."""

    def __init__(self) -> None:
        self.asked: list[pb.RehearseRequest] = []
        self.most_at_once = 0
        self._now = 0
        self.before: Callable[[], Awaitable[None]] | None = None
        self.twist: Callable[[pb.Reservation], None] = lambda reservation: None
        self.verifies = True

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        raise NotImplementedError
        yield pb.DecodeResponse()

    async def Rehearse(
        self, request: pb.RehearseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.RehearseResponse]:
        self.asked.append(request)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self.before is not None:
                await self.before()
            lent = fronts.reservation("a").reservation
            lent.attempt.CopyFrom(request.attempt)
            del lent.pages[1:]
            self.twist(lent)
            yield pb.RehearseResponse(reservation=lent)
            if self.verifies:
                yield pb.RehearseResponse(verified=pb.PrefillVerified(bytes=64, pages=1))
        finally:
            self._now -= 1


class Scene:
    """A front of a prefill worker, peers, and the view that its rehearsals have of them."""

    def __init__(self, one: fronts.Running, peers: dict[str, Peer], ports: dict[str, int]) -> None:
        self.one = one
        self.peers = peers
        self.announced = 0
        self.time = 0.0
        own = one.front.shell.record()
        assert own is not None
        self.records = [
            msgspec.structs.replace(
                own, role="decode", worker_id=name, incarnation=f"{name}-life",
                address=f"127.0.0.1:{ports[name]}",
            )
            for name in peers
        ]  # fmt: skip
        self.rehearsals = Rehearsals(
            one.front.shell, self.workers, self._changed, now=lambda: self.time
        )

    def workers(self) -> Sequence[WorkerRecord]:
        return self.records

    def _changed(self) -> None:
        self.announced += 1

    @property
    def links(self) -> tuple[Link, ...]:
        record = self.one.front.shell.record()
        assert record is not None
        return record.links

    async def settle(self) -> None:
        """Measures until no link is due."""
        while await self.rehearsals.turn():
            pass


def run(
    tmp_path: Path, body: Callable[[Scene], Awaitable[None]], *names: str, gbps: float = 0.0
) -> None:
    """Runs `body`; afterwards nothing of any rehearsal may be left in front or engine."""

    @asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        peers = {name: Peer() for name in names or ("d0",)}
        servers = {name: rpc.RpcServer(rpc.FLEET_LIMITS) for name in peers}
        ports = {}
        for name, server in servers.items():
            pb_grpc.add_DecodeServiceServicer_to_server(peers[name], server.server)
            ports[name] = await server.start("127.0.0.1:0", [])
        role = make_role(PrefillConfig(min_handoff_gbps=gbps))
        try:
            async with running(role, CONFIG, tmp_path) as one:
                yield Scene(one, peers, ports)
                await one.until_free()
                assert not len(one.front.shell.attempts)
        finally:
            for server in servers.values():
                await server.stop(0)

    async def go() -> None:
        async with scene() as made:
            await body(made)

    asyncio.run(go())


def test_every_peer_is_warmed_up_then_measured_and_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        with caplog.at_level(logging.INFO, LOGGER):
            await scene.settle()
        assert {*scene.links} == {Link(name, f"{name}-life", "fake", RATE) for name in ("d0", "d1")}
        assert scene.announced == 2
        for peer in scene.peers.values():
            assert (len(peer.asked), peer.most_at_once) == (3, 1)
            own = peer.asked[0].writer
            assert own.incarnation == scene.one.incarnation
            assert own.address == scene.one.front.shell.address
            assert peer.asked[0].most_pages == 1
        own_id = scene.one.front.shell.worker_id
        told = f"handoff {own_id} to d0: fake, 2.56e-07 GB/s"
        assert told in [record.getMessage() for record in caplog.records]
        by = {"peer": "d0", "transport": "fake"}
        assert scene.one.front.shell.metrics.value("effuse_kv_link_bytes_per_second", by) == 256
        await scene.settle()
        assert scene.announced == 2

    run(tmp_path, body, "d0", "d1")


def test_every_rank_of_a_peer_is_warmed_up_in_both_ways(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:  # each may be a replica with its own pool
        capacity = msgspec.structs.replace(scene.records[0].capacity, ranks=3)
        scene.records[0] = msgspec.structs.replace(scene.records[0], capacity=capacity)
        shell = scene.one.front.shell
        with patch.object(shell, "begin", wraps=shell.begin) as begin:
            await scene.settle()
        pushed = [call.args[2].in_groups for call in begin.call_args_list[:6]]
        assert pushed == [False] * 3 + [True] * 3

    run(tmp_path, body)


def test_a_link_that_is_cold_takes_no_prompt(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        peer = scene.records[0]

        def may_push() -> bool:
            record = scene.one.front.shell.record()
            return record is not None and record.may_push_to(peer)

        seen: list[bool] = []

        async def look() -> None:
            seen.append(may_push())

        scene.peers["d0"].before = look
        assert not may_push()
        await scene.settle()
        assert seen == [False, False, True], "it is warm once both warm-ups have passed"
        assert may_push()

    run(tmp_path, body)


def test_a_frozen_peer_keeps_no_other_link_cold(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.peers["d0"].before = scene.peers["d2"].before = stalls
        running = asyncio.create_task(scene.rehearsals.run())
        try:
            async with asyncio.timeout(patient(15)):
                while {link.peer for link in scene.links} != {"d1", "d3"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.wait({running})

    run(tmp_path, body, "d0", "d1", "d2", "d3")


def test_a_busy_peer_that_lends_a_few_pages_gets_its_link_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(scene: Scene) -> None:
        peer = scene.peers["d0"]

        async def lends_few() -> None:
            if peer.asked[-1].most_pages > 2:
                await refuses()

        peer.before = lends_few
        monkeypatch.setattr(prefill_server, "LEAST_SHARE", 1)
        monkeypatch.setattr(prefill_server, "FEW_PAGES", 2)
        await scene.settle()
        assert [link.peer for link in scene.links] == ["d0"]
        assert [one.most_pages for one in peer.asked] == [
            2,
            2,
            fake_engine.PAGES,
            fake_engine.PAGES,
        ]

    run(tmp_path, body)


def test_a_prompt_that_moved_faster_corrects_the_rate(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.settle()
        scene.one.front.shell.saw_handoff("d0-life", 64, 0.125)
        scene.one.front.shell.saw_handoff("another", 64, 0.001)
        await scene.settle()
        assert [link.bytes_per_second for link in scene.links] == [2 * RATE]

    run(tmp_path, body)


def test_a_new_life_of_a_peer_is_measured_anew(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.settle()
        scene.records = [msgspec.structs.replace(scene.records[0], incarnation="second")]
        await scene.settle()
        assert [link.peer_incarnation for link in scene.links] == ["second"]

    run(tmp_path, body)


def test_an_engine_forgets_each_receiver_that_is_gone(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.settle()
        assert [link.transport for link in scene.links] == ["fake"] * 2
        first, second = scene.records
        again = msgspec.structs.replace(first, incarnation="second")
        scene.records = [again, second]
        await scene.settle()
        scene.records = [again]
        await scene.settle()
        third = msgspec.structs.replace(second, incarnation="third")
        scene.records = [again, third]
        await scene.settle()
        found = {link.peer_incarnation: link.transport for link in scene.links}
        assert found["second"] == "fake without d0-life"
        assert found["third"] == "fake without d0-life without d1-life"

    run(tmp_path, body, "d0", "d1")


def test_a_new_life_of_our_engine_measures_anew(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.settle()
        old = scene.one.incarnation
        call = scene.one.prefill.Prefill(timeout=20)
        await call.write(fronts.prefill_start("crash", old, fake_engine.CRASH))
        await scene.one.until_new_life(old)
        assert not scene.links, "another engine found them"
        await scene.settle()
        assert [link.peer for link in scene.links] == ["d0"]
        assert scene.peers["d0"].asked[-1].writer.incarnation == scene.one.incarnation

    run(tmp_path, body)


async def refuses() -> None:
    raise Overloaded("requests need the pages", retry_after_s=1.0)


async def breaks() -> None:
    raise ZeroDivisionError


async def stalls() -> None:
    await asyncio.Event().wait()


def lies(lent: pb.Reservation) -> None:
    lent.attempt.transfer_id = "another"


def gives_too_much(lent: pb.Reservation) -> None:
    lent.pages.append(pb.PageRef(page_id=5, generation=1))


def is_malformed(lent: pb.Reservation) -> None:
    lent.pages[0].page_id = 1 << 20


@pytest.mark.parametrize("before", [refuses, breaks, stalls])
def test_a_peer_that_does_not_lend_is_asked_again_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: Callable[[], Awaitable[None]],
) -> None:
    if before is stalls:
        monkeypatch.setattr(prefill_server, "CALL_S", 1.0)

    async def body(scene: Scene) -> None:
        scene.peers["d0"].before = before
        with caplog.at_level(logging.INFO, LOGGER):
            await scene.settle()
        assert (scene.links, len(scene.peers["d0"].asked)) == ((), 1)
        assert "to d0: not measured, next try in" in caplog.text
        scene.peers["d0"].before = None
        monkeypatch.undo()
        scene.time = 100.0
        await scene.settle()
        assert [link.peer for link in scene.links] == ["d0"]

    run(tmp_path, body)


@pytest.mark.parametrize("twist", [lies, gives_too_much, is_malformed])
def test_a_reservation_that_was_not_asked_for_is_not_pushed_into(
    tmp_path: Path, twist: Callable[[pb.Reservation], None]
) -> None:
    async def body(scene: Scene) -> None:
        scene.peers["d0"].twist = twist
        await scene.settle()
        assert scene.links == ()

    run(tmp_path, body)


def test_pages_that_are_never_verified_give_no_rate(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.peers["d0"].verifies = False
        await scene.settle()
        assert (scene.links, scene.announced) == ((), 0)

    run(tmp_path, body)


def test_a_peer_that_is_not_there_costs_the_others_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.records[0] = msgspec.structs.replace(scene.records[0], address="127.0.0.1:1")
        await scene.settle()
        assert [link.peer for link in scene.links] == ["d1"]

    run(tmp_path, body, "d0", "d1")


def test_a_worker_that_drains_measures_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.one.front.shell.is_draining = True
        assert not await scene.rehearsals.turn()
        assert not scene.peers["d0"].asked

    run(tmp_path, body)


def test_a_rehearsal_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        reached = asyncio.Event()

        async def hold() -> None:
            reached.set()
            await asyncio.Event().wait()

        scene.peers["d0"].before = hold
        task = asyncio.create_task(scene.rehearsals.run())
        await reached.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    run(tmp_path, body)
