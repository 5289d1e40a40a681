"""Request ids among several routers: kept answers, running requests, and take-overs."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from router.asking import ask, failure, request
from router.fake_workers import holds
from router.fakes import FakeFleet, run

from effuse.client.retries import REPEATED_KEY
from effuse.placement.records import PlacementRecord, RouterRecord
from effuse.placement.store import Claim, StoreFull, StoreUnavailable
from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb

TEXT = "the answer is three"
AGAIN = ((REPEATED_KEY, "1"),)
THEIRS = PlacementRecord(
    request_id="mine", attempt=0, transfer_id="", router_id="router-x", state="running",
    model="fake",
)  # fmt: skip


async def finish(fleet: FakeFleet, request_id: str = "mine", **fields: object) -> None:
    """Sends a request, and waits until its answer is kept."""
    assert (await ask(fleet, request_id=request_id, **fields)).text == TEXT
    await fleet.store.until(lambda held: held[request_id].state == "finished")


def num_runs(fleet: FakeFleet) -> int:
    return len(fleet.decode[0].requests)


def test_an_answer_is_given_again_to_who_asks_the_same_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        first = await ask(fleet, request_id="mine")
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        assert await ask(fleet, request_id="mine") == first
        assert num_runs(fleet) == 1
        assert fleet.metric("effuse_answers_repeated_total") == 1
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert (found.state, found.answer.text) == (pb.REQUEST_STATE_FINISHED, TEXT)

    run(body)


def test_an_answer_that_redis_has_not_been_given_yet_is_given_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.store.is_down = True
        first = await ask(fleet, request_id="mine")
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert (found.state, found.answer) == (pb.REQUEST_STATE_FINISHED, first)
        assert await ask(fleet, request_id="mine") == first
        assert num_runs(fleet) == 1
        assert (await ask(fleet, request_id="mine", prompt="another")).text == TEXT
        assert num_runs(fleet) == 2

    run(body)


def test_a_stream_is_given_again_whole() -> None:
    async def body(fleet: FakeFleet) -> None:
        whole = request(request_id="mine", output=pb.OutputOptions(token_ids=True))
        asked = pb.GenerateStreamRequest(request=whole)

        async def read() -> tuple[str, list[int], pb.Finished]:
            events = [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]
            commits = [event.commit for event in events[:-1]]
            token_ids = [token for commit in commits for token in commit.token_ids]
            return "".join(commit.text for commit in commits), token_ids, events[-1].finished

        first = await read()
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        assert await read() == first
        assert (first[0], num_runs(fleet)) == (TEXT, 1)

    run(body)


def test_another_question_under_an_id_that_is_free_is_answered_anew() -> None:
    async def body(fleet: FakeFleet) -> None:
        await finish(fleet)
        await finish(fleet, prompt="how much?")
        assert num_runs(fleet) == 2

    run(body)


@pytest.mark.parametrize(
    ("fields", "keep_s"),
    [({}, 60.0), ({"request_id": "mine"}, 0.0)],
    ids=["an id of ours", "nothing is kept"],
)
def test_nothing_is_kept_that_nobody_asks_again(fields: dict[str, object], keep_s: float) -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet, **fields)
        await fleet.idle()
        assert not fleet.store.answers

    run(body, keep_answers_s=keep_s)


def test_what_a_live_router_runs_is_not_run_twice() -> None:
    async def body(fleet: FakeFleet) -> None:
        store = fleet.store
        other = RouterRecord(router_id="router-x", address="10.0.0.7:50051")
        await store.announce_router(other, 3.0)
        await fleet.router.seats.exchange(fleet.router.id, fleet.router.ports.address)
        store.placements["mine"], store.leases["router-x"] = THEIRS, 2.0
        asking = asyncio.create_task(ask(fleet, request_id="mine"))
        await fleet.decode[0].idle.wait()
        while not asking.done():
            store.leases["router-x"] += 0.1  # it is renewed
            await asyncio.sleep(0.05)
        error = await failure(asking)
        assert type(error) is errors.AlreadyRunning
        assert "router-x (10.0.0.7:50051)" in error.message
        assert error.labels["address"] == "10.0.0.7:50051"
        found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
        assert (found.state, found.router) == (pb.REQUEST_STATE_QUEUED, "router-x")
        assert not num_runs(fleet)

    run(body)


@pytest.mark.parametrize("runs", [1, 0], ids=["its router is gone", "its router has finished it"])
def test_who_asks_while_a_router_is_silent_has_the_answer_in_the_end(runs: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        store = fleet.store
        await finish(fleet)
        digest, response = store.answers.pop("mine")
        store.placements["mine"], store.leases["router-x"] = THEIRS, 2.0
        before = num_runs(fleet)
        asking = asyncio.create_task(ask(fleet, request_id="mine"))
        await asyncio.sleep(0.15)
        assert not asking.done()
        if runs:
            del store.leases["router-x"]
        else:
            store.placements["mine"] = msgspec.structs.replace(THEIRS, state="finished")
            store.answers["mine"] = (digest, response)
        assert (await asking).text == TEXT
        assert num_runs(fleet) - before == runs

    run(body)


def test_without_redis_a_first_request_runs_and_a_repeated_one_is_told_why_not() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.store.is_down = True
        assert (await ask(fleet, request_id="mine")).text == TEXT
        again = fleet.generation.Generate(request(request_id="other"), timeout=30, metadata=AGAIN)
        error = await failure(again)
        assert type(error) is errors.Unavailable
        assert error.retry_after_s
        assert "Redis" in error.message
        assert fleet.router.requests.find("other") is None, "it may be another router's"
        assert num_runs(fleet) == 1
        unnamed = fleet.generation.Generate(request(), timeout=30, metadata=AGAIN)
        assert (await unnamed).text == TEXT

    run(body)


def test_a_full_redis_gives_what_it_keeps_although_it_takes_no_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
        raise StoreFull("Redis is full: used memory > 'maxmemory'")

    async def body(fleet: FakeFleet) -> None:
        first = await ask(fleet, request_id="mine")
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        monkeypatch.setattr(fleet.store, "claim", refuse)
        for metadata in (None, AGAIN):
            asked = request(request_id="mine")
            assert await fleet.generation.Generate(asked, timeout=30, metadata=metadata) == first
        assert fleet.store.placements["mine"].state == "finished"
        assert num_runs(fleet) == 1
        asked = request(request_id="other")
        error = await failure(fleet.generation.Generate(asked, timeout=30, metadata=AGAIN))
        assert type(error) is errors.Unavailable and "Redis is full" in error.message
        assert (await ask(fleet, request_id="other")).text == TEXT

    run(body)


def test_a_request_that_ended_badly_is_free_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = fleet.generation.Generate(request(request_id="mine"), timeout=30)
        await reached.wait()
        asking.cancel()
        await fleet.store.until(lambda held: held["mine"].state == "cancelled")
        go.set()
        await finish(fleet)

    run(body)


@pytest.mark.parametrize("state", ["running", "finished"])
def test_what_another_router_made_of_a_request_is_told_where_it_ended_badly_before(
    state: str,
) -> None:
    """Its client has retried at another one: this one's memory is not the current state."""

    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go, reached)
        asking = fleet.generation.Generate(request(request_id="mine"), timeout=30)
        await reached.wait()
        asking.cancel()
        await fleet.store.until(lambda held: held["mine"].state == "cancelled")
        go.set()
        ours = fleet.store.placements["mine"]
        kept = pb.GenerateResponse(request_id="mine", text=TEXT)
        fleet.store.answers["mine"] = ours.asked, kept.SerializeToString()

        async def look_up(asked: str = ours.asked, router_id: str = "router-x") -> pb.RequestState:
            theirs = msgspec.structs.replace(
                THEIRS, state=state, asked=asked, router_id=router_id, decode=ours.decode
            )
            fleet.store.placements["mine"] = theirs
            found = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="mine"))
            is_theirs = found.state != pb.REQUEST_STATE_CANCELLED
            assert found.router == ("router-x" if is_theirs and state == "running" else "")
            cancelled = await fleet.generation.CancelRequest(
                pb.CancelRequestRequest(request_id="mine")
            )
            assert (cancelled.state, cancelled.router) == (found.state, found.router)
            assert found.answer.text == (TEXT if is_theirs and state == "finished" else "")
            return found.state

        is_so = {"running": pb.REQUEST_STATE_RUNNING, "finished": pb.REQUEST_STATE_FINISHED}
        assert await look_up() == is_so[state]
        assert await look_up(asked="another question") == pb.REQUEST_STATE_CANCELLED
        assert await look_up(router_id=fleet.router.id) == pb.REQUEST_STATE_CANCELLED
        fleet.store.is_down = True
        assert await look_up() == pb.REQUEST_STATE_CANCELLED

    run(body)


@pytest.mark.parametrize("metadata", [None, AGAIN], ids=["asked", "asked again"])
def test_who_stood_still_in_a_claim_leaves_alone_what_another_router_has_finished_meanwhile(
    metadata: tuple[tuple[str, str], ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(fleet: FakeFleet) -> None:
        store, claim = fleet.store, fleet.store.claim
        theirs = msgspec.structs.replace(THEIRS, state="finished")

        async def take(record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
            await claim(record, digest, lifetime_s)
            store.placements["mine"] = theirs
            raise StoreUnavailable("Redis: no answer in time")

        monkeypatch.setattr(store, "claim", take)
        asking = fleet.generation.Generate(
            request(request_id="mine"), timeout=30, metadata=metadata
        )
        if metadata is None:
            assert (await asking).text == TEXT
        else:
            assert type(await failure(asking)) is errors.Unavailable
        await fleet.idle()
        assert store.placements["mine"] == theirs

    run(body)


@pytest.mark.parametrize("ends", ["with its client", "unheard"])
def test_a_claim_that_redis_took_unheard_does_not_stay(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(fleet: FakeFleet) -> None:
        taken, claim = asyncio.Event(), fleet.store.claim

        async def take(record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
            await claim(record, digest, lifetime_s)
            taken.set()
            if ends == "unheard":
                raise StoreUnavailable("Redis: no answer in time")
            await asyncio.sleep(60)
            raise AssertionError("the client has gone before")

        monkeypatch.setattr(fleet.store, "claim", take)
        metadata = AGAIN if ends == "unheard" else None
        asking = fleet.generation.Generate(
            request(request_id="mine"), timeout=30, metadata=metadata
        )
        waiting = asyncio.ensure_future(failure(asking))
        await asyncio.wait_for(taken.wait(), 30)
        assert fleet.store.placements["mine"].state == "running"
        if ends == "with its client":
            asking.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(60):
            await fleet.store.until(lambda held: held["mine"].state != "running")
        assert num_runs(fleet) == 0

    run(body)
