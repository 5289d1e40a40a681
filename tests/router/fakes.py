"""A router in front of fake workers, with a store that needs no Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import msgspec
from router.fake_model import byte_tokenizer, chat_template
from router.fake_workers import FakeDecode, FakePrefill, FakeWorker, Handoffs

from effuse.placement.records import (
    PlacementRecord,
    PrefixNews,
    RouterRecord,
    StoredWorker,
    WorkerRecord,
    encode,
)
from effuse.placement.store import Claim, Placing, Store, StoreUnavailable
from effuse.protos.channels import OPEN, generation_stub, model_stub
from effuse.router import process
from effuse.router.config import RouterConfig
from effuse.router.policy import Condition
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2_grpc, model_pb2_grpc


class FakeStore(Store):
    """Redis's content, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.placements: dict[str, PlacementRecord] = {}
        self.refused: dict[str, float] = {}
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.routers: dict[str, RouterRecord] = {}
        self.leases: dict[str, float] = {}  # of routers that hold one, in seconds left
        self.prefixes: list[tuple[str, bytes]] = []  # notes, by router
        self.prefix_epoch = b""
        self.is_down = False
        self._changed = asyncio.Event()

    async def until(self, is_so: Callable[[dict[str, PlacementRecord]], bool]) -> None:
        """Returns once the placements are so."""
        while not is_so(self.placements):
            self._changed.clear()
            await self._changed.wait()

    async def workers(self) -> list[tuple[StoredWorker, float]]:
        self._check()
        return [(StoredWorker.of(record), 60.0) for record in self.records.values()]

    async def place(
        self, placements: Sequence[tuple[PlacementRecord, float]], held: Collection[str] = ()
    ) -> list[Placing]:
        self._check()
        lost = {record.request_id for record, _ in placements if self._is_lost(record, held)}
        found = {record.request_id: record for record, _ in placements}
        self.placements |= {name: one for name, one in found.items() if name not in lost}
        self._changed.set()
        return ["duplicate" if record.request_id in lost else "placed" for record, _ in placements]

    def _is_lost(self, record: PlacementRecord, held: Collection[str]) -> bool:
        """Whether another router has ended a request of this one."""
        found = self.placements.get(record.request_id)
        is_theirs = found is not None and found.router_id != record.router_id
        return record.request_id in held and is_theirs

    async def placement(self, request_id: str) -> bytes | None:
        self._check()
        record = self.placements.get(request_id)
        return None if record is None else encode(record)

    async def share_refusals(self, refused: Mapping[str, float], most: int) -> dict[str, float]:
        self._check()
        self.refused = {**refused, **self.refused}
        return self.refused

    async def claim(self, record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
        self._check()
        held, kept = self.placements.get(record.request_id), self.answers.get(record.request_id)
        if held is not None and held.state == "running" and held.router_id in self.leases:
            return Claim(elsewhere=encode(held), lease_s=self.leases[held.router_id])
        if kept is not None and kept[0] == digest:
            return Claim(response=kept[1])
        self.placements[record.request_id] = record
        runs = held is not None and held.state == "running" and held.router_id != record.router_id
        return Claim(earlier=encode(held) if held is not None and runs else None)

    async def keep_answer(
        self, request_id: str, digest: str, response: bytes, keep_s: float, holder: str = ""
    ) -> None:
        self._check()
        self.answers[request_id] = (digest, response)

    async def answer(self, request_id: str, digest: str) -> bytes | None:
        self._check()
        kept = self.answers.get(request_id)
        return kept[1] if kept is not None and kept[0] == digest else None

    async def announce_router(self, record: RouterRecord, lease_s: float) -> list[bytes]:
        self._check()
        self.routers[record.router_id] = record
        return [encode(one) for name, one in self.routers.items() if name != record.router_id]

    async def release_router(self, router_id: str) -> None:
        self._check()
        del self.routers[router_id]

    async def share_prefixes(
        self, router_id: str, last: PrefixNews, notes: bytes, most_bytes: int
    ) -> PrefixNews:
        self._check()
        if not self.prefix_epoch:
            self.prefixes, self.prefix_epoch = [], f"{router_id} {secrets.token_hex(4)}".encode()
        if notes:
            self.prefixes.append((router_id, notes))
        first = int(last.read) if last.read and last.epoch == self.prefix_epoch else 0
        read = min(len(self.prefixes), first + 2)
        new = [(value, 0.0) for by, value in self.prefixes[first:read] if by != router_id]
        has_more = read < len(self.prefixes)
        return PrefixNews(self.prefix_epoch, str(read).encode(), has_more, new)

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnavailable("Redis: down for the test")


@dataclass
class FakeFleet:
    """A router in front of fake workers, and a channel to it."""

    router: Router
    store: FakeStore
    prefill: list[FakePrefill]
    decode: list[FakeDecode]
    channel: grpc.aio.Channel
    stop: asyncio.Event
    generation: generation_pb2_grpc.GenerationServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.generation = generation_stub(self.channel)
        self.models = model_stub(self.channel)

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    def condition(self, worker: FakeWorker) -> Condition | None:
        """The router's state of it; None if it does not know it."""
        found = {c.record.worker_id: c.condition for c in self.router.fleet.candidates()}
        return found.get(worker.worker_id)

    def metric(self, name: str, **labels: str) -> float | None:
        """A metric of the router, as it would be scraped now."""
        return self.router.metrics.value(name, labels)

    def is_waiting(self, reason: str) -> bool:
        """Whether one request waits for that."""
        return self.metric("effuse_num_requests_stalled", reason=reason) == 1

    async def idle(self) -> None:
        """Returns once no worker runs an attempt, the router runs no request and has written to
        Redis.
        """
        for worker in self.workers:
            await worker.idle.wait()
        await self.router.requests.idle.wait()
        while not await self.router.placements.flush(1.0):
            pass  # it gives up after a second; the test's own deadline bounds this

    async def announce(self) -> None:
        """Lets the router see the workers as they are now."""
        self.store.records = {worker.worker_id: worker.record for worker in self.workers}
        await self.router.fleet.view.poll()
        self.router.fleet.look()


@asynccontextmanager
async def fake_fleet(
    num_prefill: int = 1, num_decode: int = 1, state: str = "ready", **settings: object
) -> AsyncIterator[FakeFleet]:
    """A running fleet, whose workers announce `state`. `settings` are of RouterConfig, except for
    the port.
    """
    handoffs, store, stop = Handoffs(), FakeStore(), asyncio.Event()
    prefillers = [FakePrefill(f"p{i}", handoffs) for i in range(num_prefill)]
    decoders = [FakeDecode(f"d{i}", handoffs) for i in range(num_decode)]
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(asyncio.TaskGroup())
        for worker in [*prefillers, *decoders]:
            await worker.start()
            workers.create_task(worker.until_crash())
            stack.callback(worker.crashed.set)
            worker.record = msgspec.structs.replace(worker.record, state=state)
            store.records[worker.worker_id] = worker.record
        config = RouterConfig(port=0, **{"metrics": False, **settings})  # type: ignore[arg-type]
        router = Router(config, Tokenizer(byte_tokenizer(), chat_template()), store)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(process.serve(router, stop))
        stack.callback(stop.set)
        await router.ports.ready.wait()
        channel = OPEN.connect(f"127.0.0.1:{router.ports.grpc}", keepalive=None)
        await stack.enter_async_context(channel)
        yield FakeFleet(router, store, prefillers, decoders, channel, stop)


_CALLS = ("rpc_task", "HandleExceptions[")
"""How gRPC names tasks for calls to a server, which end a moment after it has stopped."""


def _others() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def run(
    body: Callable[[FakeFleet], Awaitable[None]], timeout_s: float = 60, **kwargs: object
) -> None:
    """Runs `body` with a fake fleet; afterwards no task is left."""

    async def main() -> None:
        async with asyncio.timeout(timeout_s):
            async with fake_fleet(**kwargs) as fleet:  # type: ignore[arg-type]
                await body(fleet)
            while calls := [task for task in _others() if task.get_name().startswith(_CALLS)]:
                await asyncio.wait(calls)
            assert not (left := _others()), left

    asyncio.run(main())


def pass_time(seconds: float) -> None:
    """Moves the event loop's clock: whatever would be due by then is due now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def until(is_so: Callable[[], bool]) -> None:
    """Returns once the condition holds, for silent changes. The test's own deadline bounds it."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)
