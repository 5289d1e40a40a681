"""Records in Redis, which anything may have written: workers, routers, placements, answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
from fuzz.drawing import Draw, bent, garbage, mutated
from fuzz.services import OURS, Misbehaved
from fuzz.surface import Face
from router.fake_model import worker_record
from router.fakes import FakeFleet, fake_fleet

from effuse.placement.leases import Snapshot, merge
from effuse.placement.records import (
    Link,
    PlacedOn,
    PlacementRecord,
    Quarantine,
    Role,
    RoutedLoad,
    RouterRecord,
    StoredWorker,
    WorkerRecord,
)
from effuse.placement.store import Claim
from effuse.protos.errors import EffuseError
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

ASKED_SHARE: Final = 0.05
"""How often gRPC requests are sent while the router believes the records."""

_STRANGERS: Final[Sequence[tuple[str, Role]]] = (("strange-p", "prefill"), ("strange-d", "decode"))
WORKERS: Final = [
    msgspec.structs.replace(
        worker_record(name, role),
        links=(Link("d0", "1", "cuda_ipc", 1e9),),
        min_handoff_gbps=1.0,
        quarantines=(Quarantine("127.0.0.1:1", 3, 1.5),),
    )
    for name, role in _STRANGERS
]
ROUTER: Final = RouterRecord(
    router_id="r2",
    address="127.0.0.1:2",
    waiting_by_model={"fake": 1},
    loads=(RoutedLoad("d0", "1", 3),),
)
PLACEMENT: Final = PlacementRecord(
    request_id="kept",
    attempt=1,
    transfer_id="t",
    router_id="r2",
    state="running",
    model="fake",
    decode=PlacedOn(worker_id="d0", incarnation="1"),
    prompt_tokens=3,
    seed=9,
    asked="digest",
)
ANSWER: Final = pb.GenerateResponse(
    request_id="kept", text="three", finish_reason=pb.FINISH_REASON_STOP, seed=9
)


def drawn_record(draw: Draw, good: WorkerRecord | RouterRecord | PlacementRecord) -> bytes:
    """A stored form like it."""
    if draw.random() < 0.05:
        return garbage(draw)
    plain = bent(draw, msgspec.to_builtins(good))
    for _ in range(draw.choice((0, 0, 1, 3))):
        plain = bent(draw, plain)
    try:
        stored = msgspec.json.encode(plain)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):  # it is no JSON
        stored = msgspec.json.encode(good)
    return mutated(draw, stored) if draw.random() < 0.3 else stored


@dataclass
class Readers:
    """A router that finds such records beside those of its own workers."""

    fleet: FakeFleet

    async def feed(self, draw: random.Random) -> str:
        match draw.randrange(4):
            case 0 | 1:
                return await self._read_worker(draw)
            case 2:
                return await self._read_router(draw)
            case _:
                return await self._read_placement(draw)

    async def _read_worker(self, draw: random.Random) -> str:
        stored = drawn_record(draw, draw.choice(WORKERS))
        left_s = draw.choice((0.0, 1.0, 60.0))
        found = merge(Snapshot({}, True), [(stored, left_s)], 0.0, 0.0)
        if not found.faults and draw.random() < ASKED_SHARE:
            await self._believe(stored)
        return "malformed worker" if found.faults else "worker"

    async def _believe(self, stored: bytes) -> None:
        """The router sees it beside its own workers, and still answers."""
        fleet, store = self.fleet, self.fleet.store
        own = store.workers

        async def workers() -> list[tuple[StoredWorker, float]]:
            return [*await own(), (StoredWorker(stored), 0.5)]

        store.workers = workers  # type: ignore[method-assign]
        try:
            await fleet.router.fleet.view.poll()
            models = fleet.models
            await _ask(models.ListWorkers(model_pb2.ListWorkersRequest(), timeout=30), stored)
            await _ask(models.ListModels(model_pb2.ListModelsRequest(), timeout=30), stored)
            asked = pb.GenerateRequest(model="fake", prompt="how many?")
            await _ask(fleet.generation.Generate(asked, timeout=5), stored)
            str(fleet.router.metrics.value("effuse_kv_cache_usage_perc", {}))
        finally:
            store.workers = own  # type: ignore[method-assign]
            await self._forget()

    async def _forget(self) -> None:
        """The believed record is gone, as after its lease."""
        view = self.fleet.router.fleet.view
        view._snapshot = Snapshot({}, True)
        await view.poll()

    async def _read_router(self, draw: random.Random) -> str:
        router, store = self.fleet.router, self.fleet.store
        stored, own = drawn_record(draw, ROUTER), store.announce_router

        async def announce(record: RouterRecord, lease_s: float) -> list[bytes]:
            return [stored]

        store.announce_router = announce  # type: ignore[method-assign]
        try:
            await router.seats.others.exchange(RouterRecord(router_id="us", address="a:1"))
            for record in self.fleet.decode:
                assert router.seats.others.seats(record.record) >= 0, stored
        finally:
            store.announce_router = own  # type: ignore[method-assign]
        return "router" if router.seats.others.num_alive else "malformed router"

    async def _read_placement(self, draw: random.Random) -> str:
        fleet, store = self.fleet, self.fleet.store
        stored = drawn_record(draw, PLACEMENT)
        kept = mutated(draw, ANSWER.SerializeToString()) if draw.random() < 0.5 else None
        if draw.random() < ASKED_SHARE:
            parts = {"earlier": stored, "elsewhere": stored, "response": kept}
            name = draw.choice(sorted(parts))
            await self._claim(draw, Claim(**{name: parts[name]}))  # type: ignore[arg-type]

        async def placement(request_id: str) -> bytes | None:
            return stored

        async def answer(request_id: str, digest: str) -> bytes | None:
            return kept

        own = store.placement, store.answer
        store.placement, store.answer = placement, answer  # type: ignore[method-assign]
        try:
            found = await fleet.router.requests.look_up("kept")
        except EffuseError as error:
            return f"placement {error.code.name}"
        finally:
            store.placement, store.answer = own  # type: ignore[method-assign]
        found.SerializeToString()
        return "placement"

    async def _claim(self, draw: random.Random, claim: Claim) -> None:
        """A client uses an id whose record exists."""
        store = self.fleet.store
        own = store.claim

        async def claimed(record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
            store.claim = own  # type: ignore[method-assign]  # the next look finds another thing
            return claim

        store.claim = claimed  # type: ignore[method-assign]
        try:
            name = f"fuzz-{draw.randrange(2**40)}"
            asked = pb.GenerateRequest(request_id=name, prompt="how many?")
            await _ask(self.fleet.generation.Generate(asked, timeout=30), repr(claim).encode())
        finally:
            store.claim = own  # type: ignore[method-assign]
            store.placements.clear()
            store.answers.clear()

    def held(self) -> Mapping[str, int]:
        router = self.fleet.router
        return {
            "requests": router.requests.num_running,
            "workers": len(router.fleet.view.workers()),
        }


async def _ask(made: grpc.aio.UnaryUnaryCall[Any, Any], stored: bytes) -> None:
    code = await made.code()
    if code.name in OURS - {"DEADLINE_EXCEEDED"}:
        raise Misbehaved(f"{code.name} {await made.details()}: {stored[:2000]!r}")


class RecordSurface:
    """Records of all kinds."""

    name, weight, at_once = "records in Redis", 180, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        async with fake_fleet() as fleet:
            yield Readers(fleet)
