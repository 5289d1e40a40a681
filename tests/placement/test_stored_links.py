"""Links of a worker, which are most of its record: when they go to Redis and to its readers."""

from __future__ import annotations

import asyncio

import redis
import redis_server
from msgspec.structs import replace

from effuse.placement.leases import Snapshot, merge
from effuse.placement.records import Link, StoredWorker, WorkerRecord, decode_worker, encode
from effuse.placement.store import Store

LONG_S = 60.0


def test_links_travel_only_where_they_are_not_known() -> None:
    links = tuple(Link(f"decode-{number}", "life-1", "cuda_ipc", 1e11) for number in range(500))
    few, size = links[:1], len(encode(redis_server.worker(links=links)))

    def moved(plain: redis.Redis) -> tuple[int, int]:
        stats = plain.info("stats")
        return stats["total_net_input_bytes"], stats["total_net_output_bytes"]

    async def go(url: str, plain: redis.Redis) -> None:
        async with (
            Store(url, "blue", timeout_s=20.0) as store,
            Store(url, "blue", timeout_s=20.0) as reader,
        ):

            async def announce(links: tuple[Link, ...]) -> None:
                record = redis_server.worker(links=links)
                assert await store.announce(record, LONG_S, "process-1", takes=False) == "held"

            async def found(store: Store = reader) -> WorkerRecord:
                ((value, _),) = await store.workers()
                return decode_worker(value)

            await announce(links)
            assert (await found()).links == links
            before = moved(plain)
            for _ in range(4):
                await announce(links)
                assert (await found()).links == links
            assert all(now - was < 2 * size for was, now in zip(before, moved(plain), strict=True))
            assert (await found(store)).links == links, "another reader has them, too"
            await announce(few)
            assert (await found()).links == few
            plain.flushall()
            await announce(few)
            assert (await found()).links == few
            await announce(())
            assert (await found()).links == ()

    with redis_server.running() as server, redis.Redis(port=server.port) as plain:
        asyncio.run(go(server.connection_url, plain))


def test_each_worker_of_several_is_read_with_its_own_record_and_links() -> None:
    link = Link("décodeur", "life-1", "cuda_ipc", 1e11)
    told = [
        redis_server.worker(worker_id=f"worker-{number}", links=(link,) * (number % 3))
        for number in range(7)
    ]

    async def go(url: str) -> None:
        async with Store(url, "blue", timeout_s=20.0) as store:
            for record in told:
                await store.announce(record, LONG_S, "process-1", takes=True)
            for _ in range(2):  # the second answer leaves out the links
                found = [decode_worker(value) for value, _ in await store.workers()]
                assert sorted(found, key=lambda one: one.worker_id) == told

    with redis_server.running() as server:
        asyncio.run(go(server.connection_url))


def test_readers_keep_links_only_as_long_as_workers_announce_them() -> None:
    """Each rehearsal changes some of the links, of which a large fleet has megabytes."""
    seen, first = Snapshot({}, True), Link("decode-0", "life-1", "cuda_ipc", 1e11)
    for rate in range(1, 50):
        still, moved = (first,), (replace(first, bytes_per_second=float(rate)),)
        records = [
            redis_server.worker(worker_id=f"prefill-{number}", role="prefill", links=links)
            for number, links in enumerate((still, moved))
        ]
        before, answer = seen, [(StoredWorker.of(record), LONG_S) for record in records]
        seen = merge(before, answer, 0.0, 0.0)
        assert [one.record for one in seen.sightings.values()] == records
        assert seen.links is not None and [*seen.links.values()] == [still, moved]
        if before.sightings:
            one, other = before.sightings["prefill-0"], seen.sightings["prefill-0"]
            assert one.record.links is other.record.links, "they were read again"
