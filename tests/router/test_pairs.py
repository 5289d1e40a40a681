"""A failed handoff counts against the pair, and a death against the dead worker."""

from __future__ import annotations

import asyncio

import pytest
import redis_server
from router.asking import ask
from router.fake_workers import FakeDecode, Point, ends_its_engine, once, raises
from router.fakes import FakeFleet, run

from effuse.protos import errors
from effuse.router import attempt
from effuse.router import metrics as router_metrics
from effuse.router.failures import Failure, FailureKind

TEXT = "the answer is three"


def out_of_reach(fleet: FakeFleet, decode: FakeDecode) -> Point:
    """A point of a prefill worker at which pages for `decode` do not get through."""

    async def push() -> None:
        if decode.running:
            raise errors.Unavailable("the decode worker's pool cannot be reached")

    return push


def test_who_two_prefill_workers_cannot_reach_comes_last_and_they_keep_their_place() -> None:
    async def body(fleet: FakeFleet) -> None:
        hidden = fleet.decode[0]
        for prefill in fleet.prefill:
            prefill.at["reservation"] = out_of_reach(fleet, hidden)
        for _ in range(6):
            answer = await ask(fleet)
            assert answer.text == TEXT and answer.stats.prefill_worker
        assert 1 <= len(hidden.requests) <= 2, "it is idle, and still nobody goes there"
        assert not fleet.router.fleet.standing.absent
        assert not {("p0", "1"), ("p1", "1")} & fleet.router.fleet.standing.suspects()

    run(body, num_prefill=2, num_decode=2, prefill="remote")


def test_a_decode_worker_that_dies_in_a_handoff_is_one_loss_and_not_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "REPORT_S", 60.0)  # however slow the machine is

    async def body(fleet: FakeFleet) -> None:
        dying, prefill = fleet.decode[0], fleet.prefill[0]
        push_failed = asyncio.Event()

        async def push() -> None:
            if dying.running:
                push_failed.set()
                raise errors.Unavailable("the decode worker's pool cannot be reached")

        async def die() -> None:
            await push_failed.wait()
            await asyncio.sleep(0.1)  # as long as its front may take to notice
            await ends_its_engine(dying)()

        prefill.at["reservation"] = push
        dying.at["reserved"] = die
        answer = await ask(fleet)
        assert (answer.text, answer.stats.decode_worker) == (TEXT, "d1")
        assert not fleet.router.fleet.standing.doubtful_pairs()
        lost = "effuse_worker_losses_total"
        assert fleet.metric(lost, worker="d0", reason="ENGINE_LOST") == 1
        assert fleet.metric("effuse_retries_total") == 1

    run(body, num_decode=2, prefill="remote")


def test_of_workers_that_were_replaced_the_latest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod has a different name, so the common values are not in each scrape."""
    monkeypatch.setattr(router_metrics, "MOST_SERIES", 3)
    told = router_metrics.RouterMetrics()

    def fail(name: str, kind: FailureKind = FailureKind.LOST) -> None:
        error, worker = errors.EngineLost("it died"), redis_server.worker(worker_id=name)
        told.count_failure(Failure(kind, error, worker))

    for number in range(100):
        fail("d0")
        fail(f"gone-{number}")
        fail(f"gone-{number}", FailureKind.UNREADY)
    lost, refused = (
        {sample.labels["worker"]: sample.value for f in one.collect() for sample in f.samples}
        for one in (told.losses, told.refusals)
    )
    assert lost == {"d0": 100, "gone-99": 1}
    assert refused == {"gone-99": 1}


def test_a_pair_that_hands_over_again_is_trusted_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        (prefill,) = fleet.prefill
        prefill.at["reservation"] = once(raises(errors.TransferFailed("a digest differs")))
        answer = await ask(fleet)
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, "p0")
        assert len(prefill.served) == 2
        assert not fleet.router.fleet.standing.doubtful_pairs()

    run(body, prefill="remote")
