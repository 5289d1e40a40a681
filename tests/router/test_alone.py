"""Requests under which engines die run separately and then not at all; others are unaffected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from router.asking import ask, failure
from router.fake_model import BLOCK_SIZE, worker_record
from router.fake_workers import FakeDecode, Point, ends_its_engine, holds, once, raises
from router.fakes import FakeFleet, fake_fleet, run, until

from effuse.placement.records import Kind
from effuse.protos import errors
from effuse.router import answer, process
from effuse.router.policy import (
    AttemptNeeds,
    Candidate,
    Condition,
    Holder,
    InFlight,
    PrefillMode,
    Prospect,
    choose_own,
    has_own,
    place,
    prospect,
)
from effuse.v1 import generation_pb2 as pb

TEXT = "the answer is three"
OTHERS_S = 0.1  # that other requests stay in an engine, once one has died
HOLDER, OTHER = Holder("digest", "r1"), Holder("digest 2", "r2")
BUSY = InFlight(requests=1, tokens=100)


# Which workers are kept.


def candidate(name: str, **fields: object) -> Candidate:
    role: Kind = "prefill" if name.startswith("p") else "decode"
    given = {"in_flight": InFlight(), **fields}
    return Candidate(worker_record(name, role), **given)  # type: ignore[arg-type]


def need(*alone: Kind, mode: PrefillMode = "auto") -> AttemptNeeds:
    return AttemptNeeds(model="fake", mode=mode, holder=HOLDER, alone=alone)


def own(
    *candidates: Candidate, alone: tuple[Kind, ...] = ("decode",), mode: PrefillMode = "auto"
) -> list[str]:
    return [record.worker_id for record in choose_own(candidates, need(*alone, mode=mode))]


def test_the_least_loaded_worker_is_kept_though_none_is_empty() -> None:
    busier = candidate("d0", in_flight=InFlight(requests=2, tokens=200))
    assert own(busier, candidate("d1", in_flight=BUSY)) == ["d1"]
    full = InFlight(requests=64, tokens=100)
    assert own(candidate("d0", in_flight=full), candidate("d1", in_flight=full)) == ["d0"]


def test_a_prefill_worker_is_kept_where_such_engines_died() -> None:
    fleet = [candidate(name) for name in ("p0", "p1", "d0", "d1")]
    assert own(*fleet) == ["d0"]
    assert own(*fleet, alone=("decode", "prefill")) == ["d0", "p0"]


def test_where_no_prefill_worker_can_be_kept_a_decode_worker_that_prefills_is() -> None:
    both: tuple[Kind, ...] = ("decode", "prefill")
    fleet = [candidate("p0", condition=Condition.LOST), *map(candidate, ("p1", "d0", "d1"))]
    assert own(*fleet, alone=both) == ["d0"]
    assert own(*fleet, alone=both, mode="remote") == [], "all or nothing"
    kept = candidate("d0", kept_for=HOLDER)
    chosen = place([*fleet[:2], kept, fleet[3]], need(*both))
    assert chosen is not None
    assert (chosen.decode.worker_id, chosen.prefill) == ("d0", None), "not p1, which others use"
    assert own(*fleet[:3], candidate("d1", condition=Condition.LOST), alone=both) == []


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ([], ["d0"]),  # no request has more
        ([candidate("d1")], ["d0"]),
        ([candidate("d1", condition=Condition.LOST)], []),
        ([candidate("d1", condition=Condition.STARTING)], []),
        ([candidate("d1", condition=Condition.DRAINING)], ["d0"]),
        ([candidate("d1", kept_for=OTHER)], []),
        ([candidate("d1", kept_for=OTHER), candidate("d2")], []),
        ([candidate("d1", kept_for=OTHER), candidate("d2"), candidate("d3")], ["d0"]),
    ],
)
def test_others_keep_a_worker_and_half_of_all(others: list[Candidate], kept: list[str]) -> None:
    assert own(candidate("d0"), *others) == kept


def test_a_kept_worker_takes_its_request_once_empty_and_no_other() -> None:
    empty, full = (candidate("d0", kept_for=HOLDER, in_flight=one) for one in (InFlight(), BUSY))
    assert place([empty], need("decode")) is not None
    assert place([full], need("decode")) is None
    assert has_own([full], need("decode"))
    assert place([candidate("d0")], need("decode")) is None, "not kept, others may come"
    assert not has_own([candidate("d0", kept_for=OTHER)], need("decode"))
    assert place([empty], need()) is None
    assert prospect([empty], need()) is Prospect.SEAT
    assert prospect([candidate("d0", kept_for=OTHER)], need("decode")) is Prospect.SEAT


# Results of the request, and of others.

POISON = pb.SamplingParams(seed=13)


class Engines:
    """One engine after the other in each decode worker. Each dies of requests with the seed of
    `POISON`, with all that runs in it, and is followed by the next one. Other requests stay until
    the first death, however slow the machine is."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.deaths: list[list[str]] = []  # the ids of requests that ran there
        self._has_died = asyncio.Event()
        for worker in fleet.decode:
            self._renew(worker)

    def _renew(self, worker: FakeDecode) -> None:
        died = asyncio.Event()

        async def start() -> None:
            if worker.requests[-1].sampling.seed == POISON.seed and not died.is_set():
                self.deaths.append(sorted(worker.running.values()))
                died.set()
                self._has_died.set()
                worker.is_starting = True
                asyncio.get_running_loop().call_later(0.05, self._restart, worker)
            await self._has_died.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(OTHERS_S):
                    await died.wait()
                raise errors.EngineLost("the engine was lost")

        worker.at["start"] = start

    def _restart(self, worker: FakeDecode) -> None:
        worker.past_lives.add(worker.record.incarnation)
        life = f"{int(worker.record.incarnation) + 1}"
        worker.record = msgspec.structs.replace(worker.record, incarnation=life)
        worker.is_starting = False
        self.fleet.store.records[worker.worker_id] = worker.record
        self._renew(worker)


async def refused(fleet: FakeFleet, request_id: str) -> errors.EffuseError:
    error = await failure(ask(fleet, sampling=POISON, request_id=request_id))
    assert type(error) is errors.Poisonous
    return error


@asynccontextmanager
async def others_around(fleet: FakeFleet, number: int) -> AsyncIterator[list[str]]:
    """This many other requests at any time, one after another each; the answers. None may fail."""
    texts, is_over = list[str](), False

    async def send(seed: int) -> None:
        while not is_over:
            answer = await ask(fleet, sampling=pb.SamplingParams(seed=100 + seed))
            texts.append(answer.text)

    async with asyncio.TaskGroup() as group:
        for seed in range(number):
            group.create_task(send(seed))
        await until(lambda: sum(len(one.running) for one in fleet.decode) == number)
        yield texts
        is_over = True
    assert set(texts) == {TEXT}


@pytest.mark.parametrize(("num_decode", "num_others"), [(3, 9), (2, 4), (1, 3)])
def test_the_third_engine_runs_it_alone_and_then_nobody_does(
    num_decode: int, num_others: int
) -> None:
    async def body(fleet: FakeFleet) -> None:
        engines = Engines(fleet)
        async with others_around(fleet, num_others) as texts:
            first = await refused(fleet, "first")
            assert len(engines.deaths) == 3
            assert len(engines.deaths[0]) > 1, "nobody was beside it"
            assert engines.deaths[2] == ["first"]
            assert (first.labels["losses"], first.retry_after_s) == ("3", None)
            again = await refused(fleet, "again")
            assert not any("again" in one.served for one in fleet.decode)
            answered = len(texts)
            await until(lambda: len(texts) > answered + num_others)
        left_s = int(again.labels["refused_for_s"])
        assert 500 < left_s <= 600
        assert f"for another {left_s} s" in again.message
        assert fleet.metric("effuse_refused_poison_total") == 2
        assert fleet.metric("effuse_num_requests_alone") == 0

    run(body, num_prefill=0, num_decode=num_decode, prefill="local")


def test_copies_sent_at_once_run_alone_one_after_the_other() -> None:
    """They may share as many engines as there are before any of these has died."""

    async def body(fleet: FakeFleet) -> None:
        engines = Engines(fleet)
        await asyncio.gather(*(refused(fleet, f"copy-{number}") for number in range(8)))
        assert len(engines.deaths) <= 4 + 1
        assert len(engines.deaths[-1]) == 1

    run(body, num_prefill=0, num_decode=4, prefill="local")


def test_an_innocent_is_alone_until_its_next_block_and_then_forgotten() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached, go, then = asyncio.Event(), asyncio.Event(), asyncio.Event()
        third = fleet.decode[2]
        for worker in fleet.decode[:2]:
            worker.at["commit 1"] = once(raises(errors.EngineLost("it died")))
        third.at["commit 1"] = holds(go, reached)
        third.at["commit 2"] = holds(then)
        asking = asyncio.create_task(ask(fleet))
        await reached.wait()
        assert fleet.metric("effuse_num_requests_alone") == 1
        assert len(third.requests[-1].resume.committed_token_ids) == BLOCK_SIZE
        await until(lambda: not fleet.router.fleet.standing.absent)
        beside = [await ask(fleet, sampling=pb.SamplingParams(seed=n)) for n in range(1, 7)]
        assert {answer.stats.decode_worker for answer in beside} == {"d0", "d1"}
        go.set()
        await until(lambda: fleet.metric("effuse_num_requests_alone") == 0)
        assert (await ask(fleet, stopping=pb.StoppingParams(max_tokens=4))).text
        then.set()
        assert (await asking).text == TEXT
        assert (await ask(fleet)).text == TEXT, "nothing is held against it"

    run(body, num_prefill=0, num_decode=3, prefill="local")


@pytest.mark.parametrize("ending, elsewhere", [("killed", 0), ("killed", 1), ("hung", 1)])
def test_what_also_happens_elsewhere_counts_half(ending: str, elsewhere: int) -> None:
    """Three in a row are as many as of those that died; six are, if one ended so elsewhere."""

    async def body(fleet: FakeFleet) -> None:
        alone: list[float | None] = []

        async def ends() -> None:
            if len(alone) < most:
                alone.append(fleet.metric("effuse_num_requests_alone"))
                raise errors.EngineLost("it ended", labels={"ending": ending})

        for worker in fleet.decode:
            worker.at["start"] = ends
        most = elsewhere
        assert (await ask(fleet, sampling=pb.SamplingParams(seed=1))).text == TEXT
        most = 8
        assert type(await failure(ask(fleet))) is errors.Poisonous
        assert alone[elsewhere:] == [0, 0, *([0, 0, 1] * elsewhere), 1]

    run(body, num_prefill=0, num_decode=8, prefill="local")


def test_a_prompt_that_ends_prefill_engines_is_alone_there_too() -> None:
    async def body(fleet: FakeFleet) -> None:
        alone: list[float | None] = []

        async def note() -> None:
            alone.append(fleet.metric("effuse_num_requests_alone"))

        for worker in fleet.prefill:
            worker.at["start"] = note
            # The last write: gRPC reports one to a call that has ended as an error of its own.
            worker.at["reservation"] = raises(errors.EngineLost("the engine was lost"))
        assert type(await failure(ask(fleet))) is errors.Poisonous
        assert alone == [0, 0, 1]
        assert [len(worker.prompts) for worker in fleet.prefill] == [1, 1, 1, 0]

    run(body, num_prefill=4, num_decode=2, prefill="remote")


def test_of_engines_that_die_together_a_request_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's death is known only after the first one's, and is its next destination."""
    monkeypatch.setattr(answer, "TOGETHER_S", 1.0)  # however late a busy machine reports it

    async def body(fleet: FakeFleet) -> None:
        ends = [asyncio.Event() for _ in fleet.decode]
        for worker, end in zip(fleet.decode, ends, strict=True):
            worker.at["start"] = dies_after(end, worker)
        asked = [
            asyncio.create_task(ask(fleet, sampling=pb.SamplingParams(seed=seed)))
            for seed in range(4)
        ]
        await until(lambda: sum(len(one.running) for one in fleet.decode) == 4)
        first, second, last = sorted(fleet.decode, key=lambda one: len(one.running))
        last.at.clear()
        beside = set(first.running.values())
        ends[fleet.decode.index(first)].set()
        await asyncio.sleep(0.03)  # until the others are known to have died, too
        ends[fleet.decode.index(second)].set()
        ends[fleet.decode.index(last)].set()
        assert {(await one).text for one in asked} == {TEXT}
        assert len(first.requests) == len(second.requests) == 1
        assert beside <= set(last.served)
        assert fleet.router.poison.verdicts.is_empty

    def dies_after(end: asyncio.Event, worker: FakeDecode) -> Point:
        async def die() -> None:
            await end.wait()
            if worker.at:
                await ends_its_engine(worker)()

        return die

    run(body, num_prefill=0, num_decode=3, prefill="local")


def test_it_does_not_wait_for_a_prefill_worker_to_itself() -> None:
    """Of two, one is starting after its engine died, and the other one serves all requests."""

    async def body(fleet: FakeFleet) -> None:
        dead, other = fleet.prefill

        async def die() -> None:
            dead.is_starting = True
            raise errors.EngineLost("the engine was lost")

        dead.at["start"] = die
        killed = once(raises(errors.EngineLost("it died")))
        for worker in fleet.decode:
            worker.at["commit 1"] = killed
        assert (await ask(fleet)).text == TEXT
        assert (len(dead.prompts), len(other.prompts)) == (1, 1)
        asked = [one for worker in fleet.decode for one in worker.requests]
        last = max(asked, key=lambda one: one.attempt.attempt)
        assert last.attempt.attempt == 3
        assert not last.HasField("remote"), "it was not prefilled where it decodes"

    run(body, num_prefill=2, num_decode=3)


@pytest.mark.parametrize(
    "error",
    [errors.PeerLost("unreachable"), errors.Draining("it drains"), errors.Overloaded("full"),
     errors.Bug("a step failed", retryable=True), errors.TransferFailed("no pages came")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_only_engines_that_died_count(error: errors.EffuseError) -> None:
    async def body(fleet: FakeFleet) -> None:
        reached, go = asyncio.Event(), asyncio.Event()
        for worker in fleet.decode[:3]:
            worker.at["start"] = raises(error)
        fleet.decode[3].at["start"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet))
        await reached.wait()
        assert fleet.metric("effuse_num_requests_alone") == 0
        go.set()
        assert (await asking).text == TEXT

    run(body, num_prefill=0, num_decode=4, prefill="local")


def test_an_own_worker_is_waited_for_until_it_says_that_it_is_empty() -> None:
    """It may run requests of other routers, or hanging leftovers of a client."""

    async def body(fleet: FakeFleet) -> None:
        third = fleet.decode[2]
        third.num_others = 1
        for worker in fleet.decode[:2]:
            worker.at["start"] = once(raises(errors.EngineLost("it died")))
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: third.num_asked >= 2)
        assert not third.requests
        third.num_others = 0
        assert (await asking).text == TEXT
        assert len(third.requests) == 1

    run(body, num_prefill=0, num_decode=3, prefill="local")


def test_routers_tell_each_other_through_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SHARE_S", 0.01)

    async def body(fleet: FakeFleet) -> None:
        engines = Engines(fleet)
        await refused(fleet, "first")
        await until(lambda: bool(fleet.store.refused))
        told = dict(fleet.store.refused)
        async with fake_fleet(0, 1, prefill="local") as other:
            other.store.refused = told
            await until(lambda: bool(other.router.poison.verdicts.refused()))
            other.store.is_down = True
            await refused(other, "there")
            assert not other.decode[0].served
        assert len(engines.deaths) == 3

    run(body, num_prefill=0, num_decode=3, prefill="local")
