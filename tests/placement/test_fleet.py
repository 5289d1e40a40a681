"""The view of the fleet: the changes of a poll, the view after an outage, and a real server
below.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import pytest
import redis
import redis_server

from effuse.placement.leases import (
    GRACE_S,
    MOST_PARDONS,
    Announcer,
    FleetView,
    Snapshot,
    merge,
    pause_s,
)
from effuse.placement.records import StoredWorker, WorkerRecord, encode
from effuse.placement.store import Store, StoreUnavailable

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
    view = merge(view, [], 1.9, 1.9)
    assert ids(merge(view, [], 2.9, 2.9)) == ["decode-0"]
    assert ids(merge(view, [], 3.0, 3.0)) == []


@pytest.mark.parametrize("pause_s", [2.1, 12.0, 40.0])
@pytest.mark.parametrize("is_current", [True, False], ids=["stood still", "Redis was gone"])
def test_after_a_time_in_which_nothing_was_heard_workers_have_a_lease_to_come_back(
    pause_s: float, is_current: bool
) -> None:
    """After a frozen machine, Redis also reports that all leases have expired."""
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 10.0, 10.0)
    stale = dataclasses.replace(view, is_current=is_current)
    now = 10.0 + pause_s
    assert stale.alive(now), "nobody is gone for who has not asked"
    back = merge(stale, [], now, now)
    assert ids(merge(back, [], now + GRACE_S - 0.1, now + GRACE_S - 0.1)) == ["decode-0"]
    later = merge(back, [], now + 1.9, now + 1.9)
    assert ids(merge(later, [], now + GRACE_S, now + GRACE_S)) == []


def test_a_pause_between_question_and_answer_is_noticed_too() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 10.0, 10.0)
    late = merge(view, stored((redis_server.RECORD, 3.0)), 10.5, 52.0)
    assert late.alive(52.1) == [redis_server.RECORD]
    again = merge(late, [], 52.1, 52.1)
    assert again.alive(52.1 + GRACE_S - 0.1) == [redis_server.RECORD]


def test_who_always_asks_late_sees_the_dead_all_the_same() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    for asked_at in range(5, 5 + 5 * MOST_PARDONS, 5):
        view = merge(view, [], asked_at, asked_at)
        assert ids(view) == ["decode-0"]
    assert ids(merge(view, [], asked_at + 5.0, asked_at + 5.0)) == []


def test_a_redis_that_is_lost_again_before_anybody_was_heard_hides_nobody() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    view = merge(dataclasses.replace(view, is_current=False), [], 5.0, 5.0)
    again = merge(dataclasses.replace(view, is_current=False), [], 5.0 + GRACE_S, 5.0 + GRACE_S)
    assert ids(again) == ["decode-0"]
    assert ids(merge(again, [], 6.9 + GRACE_S, 6.9 + GRACE_S)) == ["decode-0"]


def test_a_worker_that_was_heard_again_is_pardoned_again() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    view = merge(view, [], 12.0, 12.0)
    view = merge(view, stored((redis_server.RECORD, 3.0)), 13.0, 13.0)
    assert ids(merge(view, [], 53.0, 53.0)) == ["decode-0"]


def test_a_longer_lease_is_not_cut_by_a_pause() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 60.0)), 0.0, 0.0)
    assert merge(view, [], 10.0, 10.0).sightings["decode-0"].expires_at == 60.0


def test_a_released_worker_goes_at_once() -> None:
    view = merge(EMPTY, stored((redis_server.RECORD, 3.0)), 0.0, 0.0)
    released = redis_server.worker(state="released")
    assert ids(merge(view, stored((released, 3.0)), 1.0, 1.0)) == []


def test_broken_records_are_ignored_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of workers of another version are, for as long as these live."""
    answer = [(b"{", 5.0), *stored((redis_server.RECORD, 5.0)), (b'{"worker_id": 3}', 5.0)]
    view = merge(EMPTY, answer, 0.0, 0.0)
    assert ids(view) == ["decode-0"]
    for asked_at in (0.5, 1.0):
        view = merge(view, answer, asked_at, asked_at)
    assert len(caplog.messages) == 2
    view = merge(view, answer[:2], 1.5, 1.5)
    view = merge(view, answer, 2.0, 2.0)
    assert len(caplog.messages) == 3, "one that went has come back"


def test_against_a_server_that_is_emptied_killed_and_comes_back() -> None:
    async def go() -> None:
        now = 100.0
        with redis_server.running() as server:
            port = server.port
            async with Store(
                server.connection_url, "blue", timeout_s=20.0, now=lambda: now
            ) as store:
                view = FleetView(store, now=lambda: now)
                assert view.workers() == []
                prefill = redis_server.worker(worker_id="prefill-0", role="prefill")
                await store.announce(redis_server.RECORD, 60.0, "process-1", takes=True)
                await store.announce(prefill, 60.0, "process-1", takes=True)
                await view.poll()
                assert [w.worker_id for w in view.workers()] == ["decode-0", "prefill-0"]
                assert view.workers() == [redis_server.RECORD, prefill]

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
                    now += GRACE_S - 1.0
                    await view.poll()
                    now += 1.0
                    assert view.workers() == [], "and what does not come back is over"
                server.start()

    asyncio.run(go())


def test_a_lease_that_runs_out_between_polls_is_noticed() -> None:
    async def go() -> None:
        now = 0.0
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                view = FleetView(store, now=lambda: now)
                await store.announce(redis_server.RECORD, 1.0, "process-1", takes=True)
                await view.poll()
                assert len(view.workers()) == 1
                now = 1.0
                assert view.workers() == []

    asyncio.run(go())


def test_a_server_that_never_was_there_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with Store("redis://127.0.0.1:1", "blue", timeout_s=20.0) as store:
            view = FleetView(store)
            for _ in range(3):
                await view.poll()

    asyncio.run(go())
    (told,) = caplog.messages
    assert told.startswith("no process of the fleet is known yet: Redis: Error 111 connecting")


def test_each_reason_is_logged_once_until_the_server_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(Store):
        async def workers(self) -> list[tuple[StoredWorker, float]]:
            return self._refuse()

        async def announce(self, *_: object, **__: object) -> Literal["held"]:
            self._refuse()
            return "held"

        def _refuse(self) -> list[tuple[StoredWorker, float]]:
            if why := whys.pop(0):
                raise StoreUnavailable(why)
            return []

    async def go(do: Callable[[], Awaitable[object]]) -> list[str]:
        caplog.clear()
        whys[:] = ["", "closed", "closed", "password", "closed", "", "closed"]
        for _ in range(7):
            await do()
        return [text.rpartition(": ")[2] for text in caplog.messages if "lease" not in text]

    whys: list[str] = []
    store = Refusing("redis://127.0.0.1:1", "blue")
    view, record = FleetView(store), redis_server.RECORD
    announcer = Announcer(store, lambda: record, "process-1")
    caplog.set_level(logging.INFO)
    current, announced = "the view of the fleet is current again", "decode-0 is announced"
    reasons = ["closed", "password"]
    assert asyncio.run(go(view.poll)) == [current, *reasons, current, "closed"]
    announce = partial(announcer._announce, record)
    assert asyncio.run(go(announce)) == [*reasons, announced, "closed"]


def test_run_polls_until_it_is_cancelled() -> None:
    async def go() -> None:
        with redis_server.running() as server:
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                await store.announce(redis_server.RECORD, 60.0, "process-1", takes=True)
                view = FleetView(store, poll_s=0.01)
                task = asyncio.ensure_future(view.run())
                async with asyncio.timeout(20):
                    await view.polled.wait()
                assert len(view.workers()) == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    asyncio.run(go())


def test_a_large_fleet_is_looked_at_less_often() -> None:
    assert pause_s(0.5, 0.0) == pause_s(0.5, 0.005) == 0.5
    assert pause_s(0.2, 0.005) == pytest.approx(0.5), "1 % of the time"
    assert pause_s(0.2, 3.0) == 1.0, "leases still have to be seen in time"
