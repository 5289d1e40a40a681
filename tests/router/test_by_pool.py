"""Prompts whose KV goes through a pool that prefill and decode workers share."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis_server
from router.asking import failure
from router.fake_workers import holds, once, raises
from router.fakes import FakeFleet, run, until
from router.test_rungs import TEXT, ask

from effuse.placement.records import Link, Load, WorkerRecord
from effuse.protos import errors
from effuse.router import answer as answers
from effuse.router import attempt
from effuse.router.policy import AttemptNeeds, Candidate, InFlight, place, what_is_missing


def record(name: str, role: str, pool: int, **changes: object) -> WorkerRecord:
    load = Load(total_pages=8, free_pages=8, offload_pool=pool)
    return redis_server.worker(worker_id=name, role=role, load=load, **changes)


@pytest.mark.parametrize(
    ("mode", "pools", "expected"),
    [
        ("pool", (7, 7), True),
        ("pool", (7, 8), None),
        ("pool", (0, 0), None),
        ("p2p", (7, 7), None),
    ],
)
def test_workers_that_share_a_pool_need_no_link(
    mode: str, pools: tuple[int, int], expected: bool | None
) -> None:
    """A cold link takes no prompt, and stands for any that cannot be taken."""
    prefill = record("p0", "prefill", pools[0], warms_links=True)
    decode = record("d0", "decode", pools[1])
    workers = [Candidate(record=one, in_flight=InFlight()) for one in (prefill, decode)]
    need = AttemptNeeds(model=decode.model.name, mode="remote", by_pool=mode == "pool")
    placed = place(workers, need)
    assert (placed and placed.by_pool) is expected
    link = Link("d0", decode.incarnation, "tcp", 1e9)
    warm = msgspec.structs.replace(prefill, links=(link,))
    placed = place([Candidate(record=warm, in_flight=InFlight()), workers[1]], need)
    assert placed is not None and placed.prefill is not None
    assert placed.by_pool is bool(expected)
    assert need.key != msgspec.structs.replace(need, by_pool=not need.by_pool).key


async def share_pool(fleet: FakeFleet) -> None:
    for worker in fleet.workers:
        load = msgspec.structs.replace(worker.record.load, offload_pool=7)
        worker.record = msgspec.structs.replace(worker.record, load=load)
    await fleet.announce()


def test_a_prompt_in_the_pool_is_decoded_without_its_prefill_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert (answer.stats.connector, answer.stats.prefill_worker) == ("pool", "p0")
        (request,) = fleet.decode[0].requests
        assert request.local.in_pool and not request.HasField("remote")

    run(body, kv_mode="pool")


def test_a_prompt_that_the_pool_did_not_get_is_handed_over() -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        fleet.prefill[0].pool_works = False
        answer = await ask(fleet)
        assert answer.text == TEXT and answer.stats.connector not in ("", "pool")
        (request,) = fleet.decode[0].requests
        assert request.HasField("remote") and len(fleet.prefill[0].prompts) == 1

    run(body, kv_mode="pool")


def test_after_the_pool_did_not_get_a_prompt_its_pages_come_first_over_a_link() -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        prefill.pool_works, go = False, asyncio.Event()
        prefill.at["computed"] = once(raises(errors.Unreserved("no pages in time")))
        decode.at["start"] = holds(go)
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: any(one.attempt.attempt == 2 for one in decode.requests))
        assert len(prefill.prompts) == 1
        go.set()
        assert (await asking).text == TEXT

    run(body, kv_mode="pool", prefill="remote")


@pytest.mark.parametrize("rate", [1e8, None])
def test_a_prompt_that_the_pool_did_not_get_takes_no_link_that_may_not_have_it(
    rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that is too slow is refused. A cold one is waited for, and the pool tried again."""
    monkeypatch.setattr(attempt, "POOL_S", 0.3)
    monkeypatch.setattr(answers, "LOOK_S", 0.05)

    async def body(fleet: FakeFleet) -> None:
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        links = () if rate is None else (Link("d0", decode.record.incarnation, "tcp", rate),)
        prefill.record = msgspec.structs.replace(
            prefill.record, links=links, min_handoff_gbps=10.0, warms_links=True
        )
        await share_pool(fleet)
        prefill.pool_works = False
        if rate is not None:
            error = await failure(ask(fleet))
            assert type(error) is errors.Unavailable and "--min-handoff-gbps" in error.message
            assert not decode.requests and not fleet.router.fleet.standing.suspects()
            return
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        prefill.pool_works = True
        assert (await asking).stats.connector == "pool"
        assert len(prefill.prompts) == 2 and len(decode.requests) == 1

    run(body, kv_mode="pool", prefill="remote")


@pytest.mark.parametrize("point", ["start", "reserved", "commit 0", "commit 1"])
def test_a_decode_worker_that_dies_costs_no_second_prefill(point: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        first = iter(fleet.decode)

        async def crash_once() -> None:
            if next(first, None) is fleet.decode[0]:
                await next(one for one in fleet.decode if one.running).crash()

        for one in fleet.decode:
            one.at[point] = crash_once
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert sum(len(one.prompts) for one in fleet.prefill) == 1
        requests = [request for one in fleet.decode for request in one.requests]
        assert len(requests) == 2 and all(one.local.in_pool for one in requests)

    run(body, kv_mode="pool", num_decode=2)


def test_a_failure_of_the_decode_worker_is_no_handoff_of_a_prompt_in_the_pool() -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        fleet.decode[0].at["reserved"] = once(raises(errors.Aborted("a failed forward")))
        assert (await ask(fleet)).text == TEXT
        standing = fleet.router.fleet.standing
        assert not standing.doubtful_pairs() and ("d0", "1") in standing.suspects()

    run(body, kv_mode="pool", prefill="remote")


def test_a_prefill_worker_that_dies_before_the_pool_has_its_prompt_is_replaced() -> None:
    async def body(fleet: FakeFleet) -> None:
        await share_pool(fleet)
        first = iter(fleet.prefill)

        async def crash_once() -> None:
            if next(first, None) is fleet.prefill[0]:
                await next(one for one in fleet.prefill if one.running).crash()

        for one in fleet.prefill:
            one.at["start"] = crash_once
        answer = await ask(fleet)
        assert answer.text == TEXT and answer.stats.connector == "pool"

    run(body, kv_mode="pool", num_prefill=2)


@pytest.mark.parametrize(
    ("sizes", "told"), [(("64", "128"), "64 at p0, 128"), (("64", ""), "64 at p0, (absent)")]
)
def test_workers_with_units_of_other_sizes_are_named_with_both_sizes(
    sizes: tuple[str, str], told: str
) -> None:
    """A worker with the default has no such fact."""
    asked = [(("kv_unit_tokens", size),) if size else () for size in sizes]
    ours, theirs = ((("page_size", "16"), *one) for one in asked)
    prefill = record("p0", "prefill", 7, fingerprint=ours)
    decode = record("d0", "decode", 7, fingerprint=theirs)
    workers = [Candidate(record=one, in_flight=InFlight()) for one in (prefill, decode)]
    need = AttemptNeeds(model=decode.model.name, mode="remote", by_pool=True)
    assert place(workers, need) is None
    assert what_is_missing(workers, need).endswith(f": kv_unit_tokens is {told} at d0")
