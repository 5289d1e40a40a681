"""Rehearsals in a decode engine: pages that are lent to a writer, and all ways to get them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from auditing import audit
from checkpoints import write_tiny_checkpoint
from decode_worker.test_engine_handoff import Pair
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, make_request
from decoding.source import SOURCE

from effuse.decode_worker import intake
from effuse.kvtransfer.connector import FinishPush, PushPages
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import AttemptId, BoundaryState, Reservation
from effuse.kvtransfer.pool import PageState
from effuse.worker.messages import (
    Abort,
    AbortDone,
    Failed,
    Reserved,
    StartRehearsal,
    Verified,
    WriterGone,
)

ATTEMPT = AttemptId("rehearsal", 1, "transfer-a")
REHEARSAL = StartRehearsal(attempt=ATTEMPT, writer=SOURCE, most_pages=1 << 20)
NOTHING = BoundaryState(prompt_len=0, prompt_digest=prompt_digest(()), tail_token_ids=())


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sdar") / "model", "sdar", seed=3)


@pytest.fixture(params=[Rig, DeviceRig], ids=["host", "device"])
def pair(sdar: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(load_tiny(sdar), request.param, num_pages=32)
    yield made
    audit(made.rig.engine)
    assert made.rig.pool.num_free == made.rig.pool.num_pages
    made.close()


def reserve(pair: Pair, message: StartRehearsal = REHEARSAL) -> Reservation:
    reserved = pair.rig.start(message).events[-1]
    assert isinstance(reserved, Reserved)
    audit(pair.rig.engine)
    return reserved.reservation


def push(pair: Pair, reservation: Reservation) -> None:
    pair.source.connector.send(PushPages(reservation, tuple(range(len(reservation.pages))), 0))
    pair.source.connector.send(FinishPush(reservation, lambda: NOTHING))


def test_a_rehearsal_that_was_aborted_before_it_came_gets_no_pages(pair: Pair) -> None:
    pair.rig.engine.handle(Abort(attempt=ATTEMPT))
    event = pair.rig.start(REHEARSAL).events[-1]
    assert isinstance(event, Failed) and event.code == "ABORTED"


def test_an_eighth_of_the_pool_is_lent_and_free_again_once_verified(pair: Pair) -> None:
    reservation = reserve(pair)
    assert len(reservation.pages) == 4
    assert pair.rig.engine.load().running == 0, "a rehearsal is no request"
    push(pair, reservation)
    pair.rig.run()
    verified = pair.rig.answers["transfer-a"].events[-1]
    assert isinstance(verified, Verified)
    assert (verified.pages, verified.bytes) == (4, 4 * pair.rig.layout.page_bytes)
    assert pair.rig.engine.counters.kv_bytes == 0


@pytest.mark.parametrize(("most_pages", "most_bytes", "lent"), [(3, 1 << 26, 3), (9, 1, 1)])
def test_what_the_writer_has_and_a_size_bound_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, most_pages: int, most_bytes: int, lent: int
) -> None:
    monkeypatch.setattr(intake, "MOST_BYTES", most_bytes)
    message = StartRehearsal(attempt=ATTEMPT, writer=SOURCE, most_pages=most_pages)
    reservation = reserve(pair, message)
    assert len(reservation.pages) == lent
    push(pair, reservation)
    pair.rig.run()


def test_requests_that_hold_or_wait_for_pages_come_first(pair: Pair) -> None:
    held = pair.rig.pool.allocate_committed(25)
    assert held is not None
    answer = pair.rig.start(REHEARSAL)
    assert (answer.failed.code, answer.failed.retryable) == ("RESOURCE_EXHAUSTED", True)
    assert "4 of 7 free pages" in answer.failed.message
    pair.rig.pool.release(held)

    prompt = make_request("b", range(20, 33), max_tokens=4)
    pair.rig.engine.handle(prompt)
    late = msgspec.structs.replace(REHEARSAL, attempt=AttemptId("rehearsal", 2, "late"))
    assert pair.rig.start(late).failed.code == "RESOURCE_EXHAUSTED"
    few = StartRehearsal(attempt=AttemptId("rehearsal", 3, "few"), writer=SOURCE, most_pages=2)
    push(pair, reserve(pair, few))
    pair.rig.run()
    assert pair.rig.answers["transfer-b"].finished


def test_few_pages_are_lent_while_few_are_free_and_none_when_none_is(pair: Pair) -> None:
    few = StartRehearsal(attempt=ATTEMPT, writer=SOURCE, most_pages=4)
    held = pair.rig.pool.allocate_committed(27)
    assert held is not None
    reserved = pair.rig.start(few).events[-1]
    assert isinstance(reserved, Reserved)
    assert len(reserved.reservation.pages) == 2, "half of what is free"
    pair.rig.pool.release(held)
    push(pair, reserved.reservation)
    pair.rig.run()
    rest = pair.rig.pool.allocate_committed(31)
    assert rest is not None
    other = msgspec.structs.replace(few, attempt=AttemptId("rehearsal", 2, "other"))
    assert pair.rig.start(other).failed.code == "RESOURCE_EXHAUSTED"
    pair.rig.pool.release(rest)


def test_one_at_a_time_also_while_the_last_one_is_in_quarantine(pair: Pair) -> None:
    reserve(pair)
    other = StartRehearsal(attempt=AttemptId("rehearsal", 2, "other"), writer=SOURCE, most_pages=4)
    assert "another rehearsal" in pair.rig.start(other).failed.message
    pair.rig.engine.handle(Abort(attempt=ATTEMPT))
    assert pair.rig.start(other).failed.code == "RESOURCE_EXHAUSTED"
    pair.writer_gone()
    push(pair, reserve(pair, other))
    pair.rig.run()


def test_an_abort_quarantines_until_the_writer_is_gone(pair: Pair) -> None:
    reservation = reserve(pair)
    pair.rig.engine.handle(Abort(attempt=ATTEMPT))
    pair.rig.run()
    done = AbortDone(attempt=ATTEMPT, was_running=True)
    assert pair.rig.answers["transfer-a"].events[-1] == done
    assert pair.rig.pool.count(PageState.QUARANTINED) == 4
    push(pair, reservation)  # comes late, and is refused
    pair.rig.run()
    pair.writer_gone()


def test_a_writer_that_is_gone_early_fails_it(pair: Pair) -> None:
    reserve(pair)
    pair.rig.engine.handle(WriterGone(transfer_id="transfer-a", has_drained=True))
    pair.rig.run()
    answer = pair.rig.answers["transfer-a"]
    assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)


def test_the_lease_ends_one_that_is_never_pushed(pair: Pair) -> None:
    reserve(pair)
    pair.rig.clock.now = 10.0
    pair.rig.run()
    assert pair.rig.answers["transfer-a"].failed.code == "DEADLINE_EXCEEDED"
    assert pair.rig.pool.count(PageState.QUARANTINED) == 4
    pair.writer_gone()


def test_without_a_connector_there_is_nothing_to_measure(sdar: Path) -> None:
    answer = Rig(load_tiny(sdar)).start(REHEARSAL)
    assert (answer.failed.code, answer.failed.retryable) == ("FAILED_PRECONDITION", False)


def test_requests_are_served_beside_it(pair: Pair) -> None:
    reservation = reserve(pair)
    pair.rig.engine.handle(make_request("b", range(20, 33), max_tokens=4))
    pair.rig.run()
    assert pair.rig.answers["transfer-b"].finished
    push(pair, reservation)
    pair.rig.run()
    assert isinstance(pair.rig.answers["transfer-a"].events[-1], Verified)


def test_a_pool_of_one_page_lends_it(sdar: Path) -> None:
    pair = Pair(load_tiny(sdar), Rig, num_pages=1)
    push(pair, reserve(pair))
    pair.rig.run()
    assert isinstance(pair.rig.answers["transfer-a"].events[-1], Verified)
    pair.close()
