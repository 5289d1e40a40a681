"""A role as a value: which work it accepts, and how it changes."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from effuse.placement.records import Kind, Role
from effuse.protos.errors import InvalidRequest, OtherRole, Refused
from effuse.worker.attempts import AUTO, ROLES, Duty

KINDS: tuple[Kind, ...] = get_args(Kind)
ACCEPTS: dict[Role, set[Kind]] = {
    "prefill": {"prefill"},
    "decode": {"decode"},
    "both": {"prefill", "decode"},
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_accepts_its_own_kinds_and_every_rehearsal(role: Role) -> None:
    duty = Duty(role)
    duty.check(None)
    assert {kind for kind in KINDS if duty.does(kind)} == ACCEPTS[role]
    for kind in set(KINDS) - ACCEPTS[role]:
        with pytest.raises(OtherRole, match=f"accepts no {kind} requests now") as refused:
            duty.check(kind)
        assert refused.value.labels == {"role": role} and refused.value.retryable


@pytest.mark.parametrize("before", ROLES)
@pytest.mark.parametrize("after", ROLES)
def test_every_change_takes_effect_at_once(before: Role, after: Role) -> None:
    changed = Duty(before, may_change=True).changed(after, now=10.0, hand_over_s=None)
    assert (changed.role, changed.may_change) == (after, True)
    assert changed.age_s(now=12.5) == (None if before == after else 2.5)
    assert changed.wait_s(now=10.0) is None, "what runs goes on to its end"


def test_other_work_is_handed_over_when_its_time_is_over() -> None:
    changed = Duty("both", may_change=True).changed("prefill", now=10.0, hand_over_s=4.0)
    assert [changed.wait_s(now) for now in (10.0, 13.0, 14.0, 99.0)] == [4.0, 1.0, 0.0, 0.0]
    again = changed.changed("decode", now=11.0, hand_over_s=None)
    assert again.hand_over_at == math.inf


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_fixed_role_only_stays(role: Role) -> None:
    duty = Duty(role)
    assert duty.changed(role, now=0.0, hand_over_s=None) == duty
    with pytest.raises(Refused, match=f"always a {role} worker") as refused:
        duty.changed("both", now=0.0, hand_over_s=None)
    assert not refused.value.retryable
    with pytest.raises(Refused, match=f"always a {role} worker"):
        duty.changed(AUTO, now=0.0, hand_over_s=None)


@pytest.mark.parametrize("role", ["", "Prefill", "prefill ", "all", "x" * 1000])
def test_an_unknown_role_is_refused_with_those_that_exist(role: str) -> None:
    with pytest.raises(InvalidRequest, match="role: expected one of prefill, decode, both"):
        Duty("both", may_change=True).changed(role, now=0.0, hand_over_s=None)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, -math.inf])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="hand_over_s: expected 0 seconds or more"):
        Duty("both", may_change=True).changed("decode", now=0.0, hand_over_s=seconds)


def test_a_plan_leaves_an_operators_role_until_it_is_free_again() -> None:
    first = Duty("both", may_change=True)
    planned = first.changed("decode", 1.0, None, is_planned=True)
    assert (planned.role, planned.is_pinned) == ("decode", False)
    pinned = planned.changed("decode", 2.0, None)
    assert pinned.is_pinned and pinned.age_s(3.0) == 2.0, "the role is the same as before"
    with pytest.raises(Refused, match="an operator has set") as refused:
        pinned.changed("prefill", 3.0, None, is_planned=True)
    assert not refused.value.retryable
    again = pinned.changed("prefill", 4.0, None)
    assert (again.role, again.is_pinned) == ("prefill", True)
    free = again.changed("auto", 5.0, None)
    assert (free.role, free.is_pinned, free.age_s(6.0)) == ("prefill", False, 2.0)
    assert free.changed("both", 7.0, None, is_planned=True).role == "both"
    with pytest.raises(InvalidRequest, match="expected one of prefill, decode, both, got 'auto'"):
        free.changed("auto", 8.0, None, is_planned=True)
    with pytest.raises(Refused, match="always a decode worker"):
        Duty("decode").changed("both", 9.0, None, is_planned=True)
    assert not Duty("decode").changed("decode", 9.0, None).is_pinned, "it is fixed anyway"
