"""Readers that need no loads read workers again only if there is news, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import redis
import redis_server

from effuse.placement.leases import ALL_S, GRACE_S, FleetView
from effuse.placement.records import Load
from effuse.placement.store import Store

LONG_S = 60.0
NAMES = tuple(f"decode-{number}" for number in range(40))


class Scene:
    """Workers, a router's view, and the view of a worker, on a clock of its own."""

    def __init__(self, store: Store, plain: redis.Redis) -> None:
        self.store, self.plain, self.now = store, plain, 100.0
        self.routers = FleetView(store, now=lambda: self.now)
        self.view = FleetView(store, only_news=True, now=lambda: self.now)

    async def announce(self, name: str, *, lease_s: float = LONG_S, **changes: object) -> None:
        record = redis_server.worker(worker_id=name, **changes)
        assert await self.store.announce(record, lease_s, "process-1", takes=True) == "held"

    async def poll(self) -> list[str]:
        await self.view.poll()
        return [one.worker_id for one in self.view.workers()]

    def sent(self) -> int:
        return int(self.plain.info("stats")["total_net_output_bytes"])


def play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def go() -> None:
        with redis_server.running() as server, redis.Redis(port=server.port) as plain:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                await act(Scene(store, plain))

    asyncio.run(go())


def test_loads_are_no_news_and_polls_without_news_cost_the_same_for_any_number() -> None:
    async def act(scene: Scene) -> None:
        costs = []
        for names in (NAMES[:1], NAMES):
            for name in names:
                await scene.announce(name)
            assert await scene.poll() == sorted(names)
            seen = scene.view.workers()
            for name in names:
                await scene.announce(name, load=Load(running=3, total_pages=9))
            before = scene.sent()
            for _ in range(8):
                scene.now += 1.0
                await scene.poll()
            costs.append(scene.sent() - before)
            assert scene.view.workers() is seen, "the same list, which costs its readers nothing"
            assert not any(one.load.running for one in seen)
            looked_up = await scene.view.look(names[0])
            assert looked_up is not None
            assert looked_up.load.running == 3
        assert costs[1] < 2 * costs[0] < 20_000

    play(act)


def test_whatever_happens_to_a_worker_is_news() -> None:
    async def act(scene: Scene) -> None:
        await scene.announce("a")
        await scene.announce("b")
        assert await scene.poll() == ["a", "b"]
        await scene.announce("c")
        assert await scene.poll() == ["a", "b", "c"]
        await scene.announce("c", state="draining")
        await scene.poll()
        assert [one.state for one in scene.view.workers()] == ["ready", "ready", "draining"]
        await scene.announce("b", incarnation="life-2")
        await scene.poll()
        assert scene.view.workers()[1].incarnation == "life-2"
        await scene.announce("b", state="released")
        assert await scene.poll() == ["a", "c"]
        assert await scene.view.look("nobody") is None

    play(act)


def test_an_expired_lease_is_news_once_a_router_has_seen_it() -> None:
    async def act(scene: Scene) -> None:
        await scene.announce("a")
        await scene.announce("b", lease_s=0.05)
        assert await scene.poll() == ["a", "b"]
        await asyncio.sleep(0.1)
        assert await scene.poll() == ["a", "b"], "nothing tells it yet"
        await scene.routers.poll()
        assert await scene.poll() == ["a"]

    play(act)


def test_without_a_router_all_are_read_again_after_a_while() -> None:
    async def act(scene: Scene) -> None:
        await scene.announce("a")
        await scene.announce("b", lease_s=0.05)
        await scene.poll()
        await asyncio.sleep(0.1)
        for _ in range(int(ALL_S)):
            scene.now += 1.0
            assert await scene.poll() == ["a", "b"]
        scene.now += 1.0
        assert await scene.poll() == ["a"]

    play(act)


def test_an_emptied_redis_takes_nobody_with_it_at_once() -> None:
    async def act(scene: Scene) -> None:
        await scene.announce("a")
        await scene.announce("b")
        await scene.poll()
        scene.plain.flushall()
        assert await scene.poll() == ["a", "b"]
        await scene.announce("a")
        scene.now += 1.0
        assert await scene.poll() == ["a", "b"]
        scene.now += 1.0
        await scene.poll()
        scene.now += GRACE_S - 2.1
        assert await scene.poll() == ["a", "b"]
        scene.now += 0.2
        assert await scene.poll() == ["a"], "and what does not come back is over"

    play(act)


def test_workers_return_to_an_emptied_redis_one_after_the_other() -> None:
    async def act(scene: Scene) -> None:
        for name in "abc":
            await scene.announce(name)
        await scene.poll()
        scene.plain.flushall()
        for returns in ("", "a", "b"):
            assert await scene.poll() == ["a", "b", "c"]
            scene.now += 0.5
            if returns:
                await scene.announce(returns)
        assert await scene.poll() == ["a", "b", "c"]
        scene.now += GRACE_S
        assert await scene.poll() == ["a", "b"]

    play(act)
