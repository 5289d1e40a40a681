"""The view of the fleet: what a poll changes, what an outage leaves, and a real server below."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis_server

from effuse.placement.fleet import FleetView, Snapshot, merge
from effuse.placement.records import WorkerRecord, encode
from effuse.placement.store import Store

EMPTY = Snapshot({}, False)


def ids(snapshot: Snapshot) -> list[str]:
    return sorted(snapshot.sightings)


def stored(*workers: tuple[WorkerRecord, float]) -> list[tuple[bytes, float]]:
    return [(encode(record), left_s) for record, left_s in workers]


def test_a_poll_brings_workers_with_their_leases_in_our_time() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), asked_at=10.0, now=10.2)
    assert view.is_current
    assert view.sightings["decode-0"].expires_at == 13.0


def test_a_newer_life_replaces_the_older_one() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    again = redis_server.worker(incarnation="life-2")
    view = merge(view, stored((again, 5.0)), 1.0, 1.0)
    assert view.sightings["decode-0"].record.incarnation == "life-2"


def test_a_missing_worker_stays_until_its_known_lease_is_over() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    assert ids(merge(view, [], 2.9, 2.9)) == ["decode-0"]
    assert ids(merge(view, [], 3.0, 3.0)) == []


def test_leases_stand_still_while_redis_is_gone() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    lost = Snapshot(view.sightings, False, lost_at=1.0)
    back = merge(lost, [], 60.0, 60.0)  # a new Redis that no worker has found yet
    assert ids(back) == ["decode-0"]
    assert ids(merge(back, [], 61.9, 61.9)) == ["decode-0"]
    assert ids(merge(back, [], 62.0, 62.0)) == []


def test_a_released_worker_goes_at_once() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    released = redis_server.worker(state="released")
    assert ids(merge(view, stored((released, 3.0)), 1.0, 1.0)) == []


def test_broken_records_are_ignored_and_counted() -> None:
    answer = [(b"{", 5.0), *stored((redis_server.RECORD, 5.0)), (b'{"worker_id": 3}', 5.0)]
    view = merge(EMPTY, answer, 0.0, 0.0)
    assert (ids(view), view.malformed) == (["decode-0"], 2)


def test_against_a_server_that_is_emptied_killed_and_comes_back() -> None:
    async def go() -> None:
        now = 100.0
        with redis_server.running() as server:
            port = server.port
            async with Store(
                server.connection_url, "blue", timeout_s=20.0, now=lambda: now
            ) as store:
                view = FleetView(store, now=lambda: now)
                assert view.workers() == ()
                prefill = redis_server.worker(worker_id="prefill-0", role="prefill")
                await store.register(redis_server.RECORD, 60.0, "")
                await store.register(prefill, 60.0, "")
                await view.poll()
                assert [w.worker_id for w in view.workers()] == ["decode-0", "prefill-0"]
                assert view.workers("prefill") == (prefill,)
                assert view.worker("decode-0") == redis_server.RECORD
                assert view.worker("nobody") is None

                with redis.Redis(host="127.0.0.1", port=port) as client:
                    client.flushall()
                await view.poll()
                assert len(view.workers()) == 2, "an emptied Redis takes nobody with it"

                server.terminate()
                await view.poll()
                assert not view.is_current
                now += 1000.0
                assert len(view.workers()) == 2, "nothing expires while Redis is gone"

                with redis_server.running(port):
                    await view.poll()
                    assert view.is_current
                    assert len(view.workers()) == 2, "nor at once when it is back and empty"
                    now += 60.0
                    assert view.workers() == (), "and what does not come back is over"
                server.start()

    asyncio.run(go())


def test_a_lease_that_runs_out_between_polls_is_noticed() -> None:
    async def go() -> None:
        now = 0.0
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                view = FleetView(store, now=lambda: now)
                await store.register(redis_server.RECORD, 60.0, "")
                await view.poll()
                assert len(view.workers()) == 1
                now = 61.0
                assert view.workers() == ()

    asyncio.run(go())


def test_run_polls_until_it_is_cancelled() -> None:
    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                await store.register(redis_server.RECORD, 60.0, "")
                view = FleetView(store, poll_s=0.01)
                task = asyncio.ensure_future(view.run())
                async with asyncio.timeout(20):
                    await view.first_poll()
                assert len(view.workers()) == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    asyncio.run(go())
