"""The table of attempts: admission, destinations of events, and remembered ids."""

from __future__ import annotations

import asyncio
from typing import get_args

import grpc
import msgspec
import pytest

from effuse.kvtransfer.messages import AttemptId, Tombstones
from effuse.protos.errors import (
    AlreadyRunning,
    InvalidRequest,
    Refused,
    TransferFailed,
    Unavailable,
    to_status,
)
from effuse.worker.attempts import Attempts, to_error
from effuse.worker.messages import (
    AbortDone,
    BlockState,
    Draft,
    Failed,
    FailureCode,
    PrefillDone,
)

ONE = AttemptId("r", 1, "t1")
CODES: dict[str, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "FAILED_PRECONDITION": grpc.StatusCode.FAILED_PRECONDITION,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "ABORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "DEADLINE_EXCEEDED": grpc.StatusCode.UNAVAILABLE,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "DATA_LOSS": grpc.StatusCode.UNAVAILABLE,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


def done(attempt: AttemptId) -> AbortDone:
    return AbortDone(attempt=attempt, was_running=True)


def test_an_attempt_is_admitted_once() -> None:
    attempts = Attempts()
    attempts.open(ONE, "life")
    for again in (ONE, AttemptId("other", 9, "t1")):
        with pytest.raises(AlreadyRunning):
            attempts.open(again, "life")
    attempts.open(AttemptId("r", 2, "t2"), "life")
    assert len(attempts) == 2


def test_a_request_may_come_anew_while_its_earlier_attempt_runs() -> None:
    """Its client went away and asked again under the same id, or its router is gone and has not
    been missed yet: the next one counts from 1 again."""
    attempts = Attempts()
    earlier = attempts.open(ONE, "life")
    anew = attempts.open(AttemptId("r", 1, "t9"), "life")
    attempts.close(earlier)
    assert attempts.running.get("t9") is anew


def test_events_reach_their_attempt_in_order_and_no_other() -> None:
    async def go() -> None:
        attempts = Attempts()
        one, two = attempts.open(ONE, "life"), attempts.open(AttemptId("q", 1, "t2"), "life")
        first = PrefillDone(attempt=ONE, queue_s=0.0, compute_s=0.0)
        for event in (first, done(two.id), done(ONE), done(AttemptId("x", 1, "gone"))):
            attempts.deliver(event)
        assert [await one.next_event(), await one.next_event()] == [first, done(ONE)]
        assert await two.next_event() == done(two.id)

    asyncio.run(go())


def test_an_error_ends_the_wait_of_a_handler() -> None:
    async def go() -> None:
        attempts = Attempts()
        attempt = attempts.open(ONE, "life")
        attempts.lose_engine(Unavailable("gone"))
        assert attempt.engine_ended
        with pytest.raises(Unavailable, match="gone"):
            await attempt.next_event()

    asyncio.run(go())


def test_a_slow_reader_misses_drafts_and_nothing_else() -> None:
    async def go() -> None:
        attempts = Attempts()
        attempt = attempts.open(ONE, "life")
        draft = Draft(attempt=ONE, token_offset=0, block=BlockState((1,), b"\1", True, 0))
        for _ in range(1000):
            attempts.deliver(draft)
        for _ in range(10):
            attempts.deliver(done(ONE))
        events = [await attempt.next_event() for _ in range(75)]
        assert events.count(done(ONE)) == 10
        assert events.count(draft) == 65

    asyncio.run(go())


def test_what_has_ended_is_refused_until_it_is_forgotten() -> None:
    async def go() -> None:
        now = 0.0
        attempts = Attempts(now=lambda: now)
        attempts.close(attempts.open(ONE, "life"))
        attempts.bury("never seen")
        for late in (ONE, AttemptId("r", 1, "never seen")):
            with pytest.raises(Refused):
                attempts.open(late, "life")
        now = 601.0
        attempts.bury("a later one")
        attempts.open(ONE, "life")

    asyncio.run(go())


def test_a_transfer_is_remembered_until_its_time_is_over() -> None:
    stones = Tombstones(keep_s=10.0)
    stones.add("a", now=0.0)
    stones.add("b", now=6.0)
    assert "a" in stones and "b" in stones
    stones.add("c", now=11.0)
    assert "a" not in stones and "b" in stones and "c" in stones


def test_a_second_abort_renews_the_memory() -> None:
    stones = Tombstones(keep_s=10.0)
    stones.add("a", now=0.0)
    stones.add("a", now=9.0)
    stones.add("b", now=15.0)
    assert "a" in stones


def test_the_oldest_of_too_many_is_forgotten() -> None:
    stones = Tombstones(keep_s=10.0, most=2)
    for name in "abc":
        stones.add(name, now=1.0)
    assert "a" not in stones and "b" in stones and "c" in stones


def test_idle_is_when_the_last_one_is_closed() -> None:
    async def go() -> None:
        attempts = Attempts()
        await attempts.idle.wait()
        one, two = attempts.open(ONE, "life"), attempts.open(AttemptId("q", 1, "t2"), "life")
        waiter = asyncio.ensure_future(attempts.idle.wait())
        attempts.close(one)
        await asyncio.sleep(0)
        assert not waiter.done()
        attempts.close(two)
        await asyncio.wait_for(waiter, 20)
        assert one.ended.is_set()

    asyncio.run(go())


def test_what_is_ready_ends_before_a_bad_end_and_none_is_lost() -> None:
    async def go() -> None:
        attempt = Attempts().open(ONE, "life")
        first = PrefillDone(attempt=ONE, queue_s=0.0, compute_s=0.0)
        failed = Failed(attempt=ONE, code="INTERNAL", message="why", retryable=True)
        assert attempt.next_ready() is None
        for event in (first, first, failed, first):
            attempt.deliver(event)
        attempt.deliver(Unavailable("gone"))
        assert await attempt.next_event() == first
        assert attempt.next_ready() == first
        assert attempt.next_ready() is None and attempt.next_ready() is None
        assert await attempt.next_event() == failed
        assert attempt.next_ready() == first
        assert attempt.next_ready() is None
        with pytest.raises(Unavailable):
            await attempt.next_event()

    asyncio.run(go())


def failed(code: FailureCode, **more: object) -> Failed:
    return Failed(attempt=AttemptId("r", 1, "t"), code=code, message="why", retryable=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", get_args(FailureCode))
def test_every_code_has_a_status(code: FailureCode) -> None:
    error = to_error(failed(code))
    assert error.code is CODES[code]
    needs_hint = error.code in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert (error.retry_after_s is not None) is needs_hint


def test_the_engine_s_own_hint_and_field_are_kept() -> None:
    assert to_error(failed("RESOURCE_EXHAUSTED", retry_after_s=7.0)).retry_after_s == 7.0
    assert to_error(failed("FAILED_PRECONDITION", field="page_size")).labels == {
        "field": "page_size"
    }
    wrong = to_error(failed("INVALID_ARGUMENT", field="max_tokens"))
    assert isinstance(wrong, InvalidRequest)
    assert wrong.violations[0].field == "max_tokens"


def test_a_handoff_whose_lease_ran_out_is_the_writer_s_failure() -> None:
    assert type(to_error(failed("DEADLINE_EXCEEDED"))) is TransferFailed


@pytest.mark.parametrize("retryable", [True, False])
def test_of_its_own_mistakes_the_engine_says_whether_another_try_may_work(retryable: bool) -> None:
    told = msgspec.structs.replace(failed("INTERNAL"), retryable=retryable)
    assert to_error(told).retryable is retryable


def test_a_refusal_carries_retry_info() -> None:
    names = [detail.TypeName() for detail in to_status(to_error(failed("DATA_LOSS"))).details]
    assert "google.rpc.RetryInfo" in names
