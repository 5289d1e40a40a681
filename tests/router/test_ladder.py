"""The meaning of a failure, a request's memory of it, and the retries that the traffic bears."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from router.asking import ask
from router.fake_model import ids_of, worker_record
from router.fake_workers import raises
from router.fakes import FakeFleet, run, until
from router.test_recovery import start_anew

from effuse.protos import errors
from effuse.router.failures import (
    RETRIES_PER_S,
    Failure,
    FailureKind,
    RetryBudget,
    Setbacks,
    judge,
)
from effuse.router.policy import Placement

PREFILL, DECODE = worker_record("p0", "prefill"), worker_record("d0", "decode")
REMOTE, LOCAL = Placement(DECODE, PREFILL), Placement(DECODE, None)


@pytest.mark.parametrize(
    ("error", "outcome", "in_handoff"),
    [
        (errors.Starting("-"), FailureKind.UNREADY, FailureKind.UNREADY),
        (errors.Draining("-"), FailureKind.UNREADY, FailureKind.UNREADY),
        (errors.Replaced("-"), FailureKind.UNREADY, FailureKind.UNREADY),
        (errors.Overloaded("-"), FailureKind.FULL, FailureKind.FULL),
        (errors.Unreserved("-"), FailureKind.LATE, FailureKind.LATE),
        (errors.EngineLost("-"), FailureKind.LOST, FailureKind.LOST),
        (errors.PeerLost("-"), FailureKind.LOST, FailureKind.LOST),
        (errors.Cancelled("-"), FailureKind.LOST, FailureKind.LOST),
        (errors.Refused("-"), FailureKind.FAILED, FailureKind.HANDOFF),
        (errors.Aborted("-"), FailureKind.FAILED, FailureKind.HANDOFF),
        (errors.Unavailable("-"), FailureKind.FAILED, FailureKind.HANDOFF),
        (errors.TransferFailed("-"), FailureKind.FAILED, FailureKind.HANDOFF),
        (errors.DeadlineExceeded("-"), FailureKind.FINAL, FailureKind.HANDOFF),
        (errors.Bug("-", retryable=True), FailureKind.FAILED, FailureKind.FAILED),
        (errors.Bug("-"), FailureKind.FINAL, FailureKind.FINAL),
        (errors.Overloaded("-", retryable=False), FailureKind.FINAL, FailureKind.FINAL),
        (errors.InvalidRequest.of("prompt", "-"), FailureKind.FINAL, FailureKind.FINAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, errors.EffuseError) else "",
)
def test_what_an_error_means(
    error: errors.EffuseError, outcome: FailureKind, in_handoff: FailureKind
) -> None:
    assert judge(error, DECODE, REMOTE, is_handoff=False).outcome is outcome
    assert judge(error, DECODE, LOCAL, is_handoff=True).outcome is outcome
    found = judge(error, DECODE, REMOTE, is_handoff=True)
    assert found.outcome is in_handoff
    pair = (PREFILL.life, DECODE.life)
    assert found.pair == (pair if in_handoff is FailureKind.HANDOFF else None)


def failed(outcome: FailureKind, worker_id: str = "d0", why: str = "it died") -> Failure:
    return Failure(outcome, errors.Unavailable(why), worker_record(worker_id, "decode"))


def test_refusals_are_no_losses() -> None:
    setbacks = Setbacks()
    for outcome in (FailureKind.UNREADY, FailureKind.FULL, FailureKind.LATE):
        setbacks.add(failed(outcome), 0.0)
    assert (setbacks.num_losses, setbacks.losses_in_a_row) == (0, 0)
    assert not setbacks.avoided(0.0)
    assert (setbacks.num_losses, setbacks.num_refusals) == (0, 3)


def test_losses_in_a_row_end_with_a_block_and_a_handoff_is_none() -> None:
    setbacks = Setbacks()
    setbacks.add(failed(FailureKind.HANDOFF), 0.0)
    assert (setbacks.num_losses, setbacks.losses_in_a_row) == (1, 0)
    setbacks.add(failed(FailureKind.LOST), 0.0)
    setbacks.add(failed(FailureKind.FAILED), 0.0)
    assert setbacks.losses_in_a_row == 2
    setbacks.stalled_at = 5.0
    setbacks.add_progress()
    assert setbacks.losses_in_a_row == 0 and setbacks.stalled_at is None
    assert setbacks.num_losses == 3


def test_a_worker_that_fails_a_request_again_is_left_alone_for_longer() -> None:
    setbacks, now, pauses = Setbacks(), 10.0, []
    for _ in range(8):
        setbacks.add(failed(FailureKind.FAILED), now)
        assert setbacks.avoided(now) == {("d0", "1")}
        pauses.append(setbacks.next_change_s(now))
        now += pauses[-1] or 0.0
        assert not setbacks.avoided(now)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_what_it_met_with_is_told_by_worker_losses_and_refusals_apart() -> None:
    setbacks = Setbacks()
    assert setbacks.summary() == ""
    setbacks.add(failed(FailureKind.LOST, "d0"), 0.0)
    setbacks.add(failed(FailureKind.FAILED, "d1", "a step failed"), 0.0)
    setbacks.add(failed(FailureKind.UNREADY, "d2"), 0.0)
    setbacks.add(failed(FailureKind.UNREADY, "d2"), 0.0)
    assert setbacks.summary() == (
        "2 attempts lost (d0: it died; d1: a step failed), 2 refusals (d2 not ready 2 times)"
    )


def test_what_is_told_is_bounded() -> None:
    setbacks = Setbacks()
    for number in range(50):
        setbacks.add(failed(FailureKind.LOST, f"d{number}", "why " * 100), 0.0)
        setbacks.add(failed(FailureKind.FULL, f"d{number}"), 0.0)
    text = setbacks.summary()
    assert text.startswith("50 attempts lost (")
    assert "d49" in text and "d41" not in text.split("refusals")[0]
    assert len(text) < 1000


def test_a_full_budget_grants_a_burst_and_then_a_share_of_the_traffic() -> None:
    budget = RetryBudget(share=0.5, most=3, now=0.0)
    assert [budget.take(0.0) for _ in range(3)] == [0, 0, 0]
    budget.add_requests(1, 0.0)
    budget.add_requests(3, 0.0)
    assert [budget.take(0.0) for _ in range(2)] == [0, 0]
    assert budget.take(0.0) > 0


def test_an_empty_budget_delays_one_after_the_other_and_refuses_nobody() -> None:
    budget = RetryBudget(share=0.0, most=1, now=0.0)
    waits = [budget.take(0.0) for _ in range(5)]
    assert waits == pytest.approx([at / RETRIES_PER_S for at in range(5)])
    assert budget.left(0.4) == pytest.approx(0.0)
    assert budget.left(1000.0) == 1.0, "time fills it to its size and no further"


def test_nobody_waits_for_attempts_that_were_given_up() -> None:
    budget = RetryBudget(share=0.0, most=1, now=0.0)
    for _ in range(1000):
        budget.take(0.0)
    for _ in range(999):
        budget.give_back()
    assert budget.take(0.0) == pytest.approx(1 / RETRIES_PER_S)


def test_who_gives_up_waiting_leaves_no_debt_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = raises(errors.Unavailable("a step failed"))
        budget, now = fleet.router.budget, time.monotonic()
        take = budget.take
        monkeypatch.setattr(budget, "take", lambda _: take(now))
        monkeypatch.setattr(budget, "add_requests", lambda *_: None)
        while budget.take(now) < 60:
            pass
        before = budget.left(now)
        for _ in range(3):
            asking = asyncio.create_task(ask(fleet))
            await until(lambda: fleet.is_waiting("budget"))
            asking.cancel()
            await fleet.idle()
        assert budget.left(now) == before

    run(body, num_prefill=0, retry_share=0.0)


@pytest.mark.parametrize("point", ["start", "verified", "seat"])
def test_time_on_a_worker_or_without_a_seat_is_no_wait_for_a_worker(point: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.others = [ids_of("another answer")]
        capacity = msgspec.structs.replace(worker.record.capacity, max_num_seqs=1)
        worker.record = msgspec.structs.replace(worker.record, capacity=capacity)
        await fleet.announce()
        reached, go = asyncio.Event(), asyncio.Event()

        async def end() -> None:
            worker.is_starting = True
            raise errors.PeerLost("unreachable")

        async def end_later() -> None:
            reached.set()
            await go.wait()
            await end()

        def is_waiting() -> bool:
            stalled = fleet.metric("effuse_num_requests_stalled", reason="worker")
            return asking.done() or stalled == num_answers

        num_answers = 2 if point == "seat" else 1
        worker.at["commit 1"] = end
        asking = asyncio.create_task(ask(fleet, n=num_answers))
        await until(is_waiting)
        await start_anew(fleet, worker, "2")
        worker.at["commit 3" if point == "seat" else point] = end_later
        await reached.wait()
        await until(lambda: point != "seat" or fleet.is_waiting("seat"))
        now = fleet.router.now
        fleet.router.now = fleet.router.seats._now = lambda: now() + 100.0
        go.set()
        await until(is_waiting)
        await start_anew(fleet, worker, "3")
        assert (await asking).text == "the answer is three"

    run(body, num_prefill=0)
