"""Effects of failed calls on workers and pairs, and their duration."""

from __future__ import annotations

import msgspec
import pytest
from router.fake_model import worker_record

from effuse.placement.records import Role, WorkerRecord
from effuse.protos import errors
from effuse.router.failures import ROLE_S, Failure, FailureKind, Setbacks, Standing, judge
from effuse.router.policy import Condition, Placement


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worker(worker_id: str, incarnation: str = "1") -> WorkerRecord:
    role: Role = "prefill" if worker_id.startswith("p") else "decode"
    return worker_record(worker_id, role, incarnation=incarnation)


def lost(record: WorkerRecord, error: errors.EffuseError) -> Failure:
    return Failure(FailureKind.LOST, error, record)


def unreached(prefill: str, decode: str) -> Failure:
    p, d = worker(prefill), worker(decode)
    return Failure(FailureKind.HANDOFF, errors.TransferFailed("no way"), p, (p.life, d.life))


@pytest.mark.parametrize(
    ("outcome", "error", "condition"),
    [
        (FailureKind.LOST, errors.EngineLost("it died"), Condition.LOST),
        (FailureKind.LOST, errors.PeerLost("no route"), Condition.UNREACHABLE),
        (FailureKind.UNREADY, errors.Starting("not yet"), Condition.STARTING),
        (FailureKind.UNREADY, errors.Replaced("another life"), Condition.STARTING),
        (FailureKind.UNREADY, errors.Draining("no more"), Condition.DRAINING),
    ],
)
def test_who_cannot_take_a_request_is_out_by_the_call_that_tells(
    outcome: FailureKind, error: errors.EffuseError, condition: Condition
) -> None:
    standing, d0 = Standing(Clock()), worker("d0")
    assert standing.condition(d0) is Condition.READY
    standing.note(Failure(outcome, error, d0))
    assert standing.condition(d0) is condition
    assert standing.condition(worker("d0", "2")) is Condition.READY, "its next life is another"


@pytest.mark.parametrize(
    ("state", "condition"),
    [
        ("ready", Condition.READY),
        ("starting", Condition.STARTING),
        ("draining", Condition.DRAINING),
        ("of a later release", Condition.DRAINING),
    ],
)
def test_who_is_not_out_is_what_it_announces(state: str, condition: Condition) -> None:
    record = msgspec.structs.replace(worker("d0"), state=state)
    assert Standing(Clock()).condition(record) is condition


def test_time_brings_nobody_back_but_its_own_word_does() -> None:
    clock = Clock()
    standing, d0 = Standing(clock), worker("d0")
    standing.note(lost(d0, errors.PeerLost("no route")))
    clock.now += 1000.0
    assert standing.condition(d0) is Condition.UNREACHABLE
    assert not standing.note_condition(d0.life, None)
    assert not standing.note_condition(d0.life, Condition.STARTING)
    assert standing.condition(d0) is Condition.STARTING
    assert standing.note_condition(d0.life, Condition.READY)
    assert standing.condition(d0) is Condition.READY


def test_who_is_out_is_remembered_while_its_lease_or_its_front_lives() -> None:
    standing, d0 = Standing(Clock()), worker("d0")
    standing.note(lost(d0, errors.EngineLost("it died")))
    standing.forget_ended([d0])
    assert standing.absent == [d0]
    standing.note_condition(d0.life, Condition.STARTING)
    standing.forget_ended([])
    assert standing.absent == [d0], "its front answers: an engine is on the way"
    standing.note_condition(d0.life, None)
    standing.forget_ended([])
    assert standing.absent == []


def test_a_life_that_another_one_has_followed_is_forgotten() -> None:
    standing, d0 = Standing(Clock()), worker("d0")
    standing.note(lost(d0, errors.EngineLost("it died")))
    standing.note_condition(d0.life, Condition.STARTING)
    standing.forget_ended([worker("d0", "2")])
    assert standing.absent == []


def test_full_is_not_out_and_not_suspect_and_ends_by_itself() -> None:
    clock = Clock()
    standing, d0 = Standing(clock), worker("d0")
    error = errors.Overloaded("no room", retry_after_s=2.0)
    standing.note(Failure(FailureKind.FULL, error, d0))
    assert standing.is_full(d0.life)
    assert standing.condition(d0) is Condition.READY
    assert not standing.suspects()
    assert standing.next_change_s() == pytest.approx(2.0)
    clock.now += 2.0
    assert not standing.is_full(d0.life)
    assert standing.next_change_s() is None


def test_a_handoff_that_failed_is_held_against_the_pair_alone() -> None:
    clock = Clock()
    standing = Standing(clock)
    failure = unreached("p0", "d0")
    standing.note(failure)
    assert standing.broken_pairs() == {failure.pair}
    assert not standing.suspects()
    assert not standing.absent
    clock.now += 0.5
    assert not standing.broken_pairs()
    assert standing.doubtful_pairs() == {failure.pair}
    clock.now += 60.0
    assert not standing.doubtful_pairs()


def test_after_doubt_one_handoff_is_tried_and_the_others_wait_for_its_end() -> None:
    clock = Clock()
    standing, failure = Standing(clock), unreached("p0", "d0")
    assert failure.pair is not None
    standing.note_try(failure.pair)
    assert not standing.doubtful_pairs(), "it never failed"
    standing.note(failure)
    clock.now += 60.5
    standing.note_try(failure.pair)
    assert standing.doubtful_pairs() == {failure.pair}
    assert not standing.broken_pairs()
    standing.note(failure)
    assert standing.next_change_s() == pytest.approx(1.0), "a failure in a row"
    standing.note_handoff(failure.pair)
    assert not standing.doubtful_pairs()


def test_pairs_are_forgotten_with_either_life() -> None:
    standing = Standing(Clock())
    standing.note(unreached("p0", "d0"))
    standing.note(unreached("p0", "d1"))
    standing.forget_ended([worker("p0"), worker("d0"), worker("d1", "2")])
    assert standing.doubtful_pairs() == {(("p0", "1"), ("d0", "1"))}


def test_a_pair_pauses_twice_as_long_for_each_failure_in_a_row() -> None:
    clock = Clock()
    standing, failure = Standing(clock), unreached("p0", "d0")
    pauses = []
    for _ in range(8):
        standing.note(failure)
        standing.note(failure)  # begun before the first had failed
        pauses.append(standing.next_change_s())
        clock.now += pauses[-1] or 0.0
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])
    assert failure.pair is not None
    standing.note_handoff(failure.pair)
    standing.note(failure)
    assert standing.next_change_s() == pytest.approx(0.5)


def test_who_two_others_cannot_hand_over_with_is_suspect() -> None:
    standing = Standing(Clock())
    standing.note(unreached("p0", "d0"))
    standing.note(unreached("p1", "d0"))
    assert standing.suspects() == {("d0", "1")}
    standing.note(unreached("p0", "d1"))
    assert standing.suspects() == {("d0", "1")}, "what d0 does is not held against p0"
    standing.note(unreached("p0", "d2"))
    assert standing.suspects() == {("d0", "1"), ("p0", "1")}


@pytest.mark.parametrize("outcome", [FailureKind.LOST, FailureKind.FAILED])
def test_who_failed_comes_after_others_for_a_while(outcome: FailureKind) -> None:
    clock = Clock()
    standing, d0 = Standing(clock), worker("d0")
    standing.note(Failure(outcome, errors.PeerLost("gone"), d0))
    standing.note_condition(d0.life, Condition.READY)
    assert standing.suspects() == {("d0", "1")}
    clock.now += 6.0
    assert not standing.suspects()


def of_role(record: WorkerRecord, role: str) -> Failure:
    error = errors.OtherRole("not now", labels={"role": role})
    return Failure(FailureKind.ROLE, error, record)


def test_a_refusal_names_the_role_that_counts_until_the_record_has_it() -> None:
    clock, record = Clock(), worker_record("b0", "both")
    standing = Standing(clock)
    standing.note(of_role(record, "prefill"))
    assert standing.with_role(record).role == "prefill"
    assert standing.condition(record) is Condition.READY, "it takes part in its other role"
    assert not standing.is_full(record.life) and not standing.suspects()
    standing.note(of_role(record, "decode"))
    assert standing.with_role(record).role == "decode"
    clock.now += ROLE_S
    assert standing.with_role(record) is record
    standing.forget_ended([record])
    assert not standing._roles


def test_a_role_that_does_not_exist_changes_nothing() -> None:
    standing, record = Standing(Clock()), worker_record("b0", "both")
    standing.note(of_role(record, "queen"))
    assert standing.with_role(record) is record


def test_a_change_of_role_is_no_attempt() -> None:
    record = worker_record("b0", "both")
    error = errors.OtherRole("not now", labels={"role": "prefill"})
    failure = judge(error, record, Placement(record, None), is_handoff=False)
    setbacks = Setbacks()
    setbacks.add(failure, 0.0)
    assert failure.outcome is FailureKind.ROLE
    assert (setbacks.num_losses, setbacks.losses_in_a_row) == (0, 0)
    assert not setbacks.avoided(0.0)
