"""Roles that follow a plan: the table of changes, and a checker that finds planted bugs in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import pytest
from msgspec.structs import replace
from router.fake_model import worker_record

from effuse.placement.records import Kind, Load, Role, WorkerRecord
from effuse.router import role_changes
from effuse.router.planner import Split
from effuse.router.role_changes import COOL_S, Change, changes, why_not
from effuse.router.steering import fixed

STEP_S = 1.0
KINDS: tuple[Kind, ...] = get_args(Kind)


class Wrong(Exception):
    """The table did what it must not do."""


def worker(
    number: int, role: Role, *, is_free: bool = True, is_pinned: bool = False, weights: str = "same"
) -> WorkerRecord:
    record = worker_record(f"w{number:03}", role, fingerprint=weights)
    return replace(record, may_change_role=is_free, role_is_pinned=is_pinned)


def roles_of(records: Sequence[WorkerRecord]) -> list[Role]:
    return [one.role for one in records]


class Roles:
    """A fleet whose roles follow plans, step by step, under a checker."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        self.records = {one.worker_id: one for one in records}
        self.num_changes = 0

    def follow(self, plan: Split, seconds: float = 600.0) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.pass_time(STEP_S)
            found = changes(plan, list(self.records.values()))
            self.check(found)
            for worker, role in found:
                changed = replace(self.records[worker.worker_id], role=role, role_age_s=0.0)
                self.records[worker.worker_id] = changed
            self.num_changes += len(found)

    def pass_time(self, seconds: float) -> None:
        for name, one in self.records.items():
            if one.role_age_s is not None:
                self.records[name] = replace(one, role_age_s=one.role_age_s + seconds)

    def check(self, found: Sequence[Change]) -> None:
        roles = {one.worker.worker_id: one.role for one in found}
        if len(found) > max(1, len(self.records) // 10) or len(roles) < len(found):
            raise Wrong(f"{len(found)} change at once")
        for one, role in found:
            if one.role == role or not one.may_change_role or one.role_is_pinned:
                raise Wrong(f"{one.worker_id} changes from {one.role} to {role}")
            if one.role_age_s is not None and one.role_age_s < COOL_S:
                raise Wrong(f"{one.worker_id} changes again")
        for text in {one.fingerprint_text for one in self.records.values()}:
            group = [one for one in self.records.values() if one.fingerprint_text == text]
            for kind in KINDS:
                stay = [
                    one.does(kind) and roles.get(one.worker_id, one.role) in (kind, "both")
                    for one in group
                ]
                if not any(stay) and any(one.does(kind) for one in group):
                    raise Wrong(f"nobody goes on with {kind}")

    @property
    def roles(self) -> list[Role]:
        return roles_of(list(self.records.values()))


def storm(seed: int) -> None:
    """Plans that change at random, also before they are carried out."""
    rng = random.Random(seed)
    weights = rng.choice([["same"], ["same"], ["old", "new"], ["a", "b", "c"]])
    number = rng.choice([1, 2, 3, 4, 7, 25, 60])
    day = Roles(
        [
            worker(
                at,
                rng.choice(get_args(Role)),
                is_free=rng.random() < 0.8,
                is_pinned=rng.random() < 0.1,
                weights=rng.choice(weights),
            )
            for at in range(number)
        ]
    )
    for _ in range(12):
        prefill = rng.randint(0, number)
        day.follow(Split(prefill, number - prefill), rng.choice([3.0, 20.0, 200.0]))


def sized(record: WorkerRecord, pages: int) -> WorkerRecord:
    return replace(record, capacity=replace(record.capacity, total_pages=pages))


def test_a_worker_with_more_room_than_all_others_goes_on_with_answers() -> None:
    small = [sized(worker(at, "both"), 8) for at in (1, 2)]
    for busy in small:
        fleet = Roles([sized(worker(0, "both"), 64), *small])
        fleet.records[busy.worker_id] = replace(busy, load=Load(running=3))
        fleet.follow(Split(1, 2))
        assert fleet.records["w000"].role == "decode" and fleet.roles.count("prefill") == 1
    fleet = Roles([worker(1, "prefill"), sized(worker(2, "prefill"), 999), worker(3, "decode")])
    fleet.follow(Split(1, 2))
    assert fleet.roles == ["prefill", "decode", "decode"]


SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_keep_their_rules_at_any_plans(seed: int) -> None:
    storm(seed)


PLANTED: dict[str, tuple[str, object]] = {
    "takes the last worker of a kind": ("_within_reach", lambda workers, prefill: prefill),
    "changes a worker again at once": ("is_cooling", lambda record: False),
    "changes too many at once": ("AT_ONCE", 0.5),
    "moves what must stay": ("is_free", lambda record: True),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_checker_finds_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_changes, *PLANTED[bug])
    with pytest.raises(Wrong):
        for seed in SEEDS:
            storm(seed)


Plans = list[tuple[tuple[int, int], dict[Role, int], int]]


@pytest.mark.parametrize(
    "plans",
    [
        [((1, 1), {"prefill": 1, "decode": 1}, 2), ((0, 2), {"both": 2}, 4)],
        [((1, 2), {"prefill": 1, "decode": 2}, 3), ((2, 1), {"prefill": 2, "decode": 1}, 4)],
        [((40, 60), {"prefill": 40, "decode": 60}, 100), ((0, 100), {"both": 100}, 200)],
        [((40, 60), {"prefill": 40, "decode": 60}, 100), ((41, 59), {"prefill": 41, "decode": 59},
                                                          101)],
    ],
    ids=["two", "three", "a hundred", "one of a hundred"],
)  # fmt: skip
def test_a_fleet_gets_the_roles_of_its_plan_with_the_fewest_changes(plans: Plans) -> None:
    day = Roles([worker(at, "both") for at in range(sum(plans[0][0]))])
    for split, roles, num_changes in plans:
        day.follow(Split(*split))
        assert {role: day.roles.count(role) for role in roles} == roles
        assert day.num_changes == num_changes


def test_idle_workers_change_first() -> None:
    busy = {"w000": 3, "w001": 1, "w002": 2}
    records = [
        replace(worker(at, "decode"), load=Load(running=busy[f"w{at:03}"])) for at in range(3)
    ]
    (one,) = changes(Split(1, 2), records)
    assert (one.worker.worker_id, one.role) == ("w001", "prefill")


def test_roles_that_stay_bound_the_plan() -> None:
    day = Roles(
        [
            worker(0, "prefill", is_free=False),
            worker(1, "prefill", is_pinned=True),
            worker(2, "decode", is_free=False),
            worker(3, "both"),
        ]
    )
    assert fixed(list(day.records.values())) == (2, 1)
    day.follow(Split(0, 4))
    assert day.roles == ["prefill", "prefill", "decode", "decode"]
    day.follow(Split(3, 1))
    assert day.roles == ["prefill", "prefill", "decode", "prefill"]
    alone = [worker(0, "prefill", is_free=False), worker(1, "decode", is_free=False)]
    assert fixed(alone) == (0, 0), "a plan for them is advice"


def test_each_group_of_equal_weights_gets_both_kinds() -> None:
    """During an update half of the workers have other weights, and hand nothing to the rest."""
    day = Roles([worker(at, "both", weights="old" if at % 2 else "new") for at in range(8)])
    day.follow(Split(4, 4))
    assert day.roles[::2].count("prefill") == day.roles[1::2].count("prefill") == 2
    day.follow(Split(1, 7))
    for group in (day.roles[::2], day.roles[1::2]):
        if "prefill" not in group:
            assert group == ["both"] * 4
    assert day.roles.count("prefill") == 1


def test_the_last_worker_does_both() -> None:
    day = Roles([worker(0, "prefill")])
    day.follow(Split(1, 0))
    assert day.roles == ["both"]


def test_a_worker_that_failed_to_change_rests() -> None:
    records = [worker(at, "both") for at in range(3)]
    first = changes(Split(1, 2), records)[0].worker
    second = changes(Split(1, 2), records, {first.life})[0].worker
    assert first.worker_id == "w000" and second.worker_id == "w001"


def test_an_operator_reads_why_a_worker_stays() -> None:
    records = [
        replace(worker(0, "both"), role_age_s=3.0),
        worker(1, "both", is_pinned=True),
        replace(worker(2, "both"), role_age_s=COOL_S),
    ]
    (one,) = changes(Split(2, 1), records)
    assert one.worker.worker_id == "w002"
    assert why_not(Split(2, 1), records) == [
        "a role stays for 30 s before it changes again: w000",
        "an operator set the role of w001; `effuse role w001 auto` frees it",
    ]
    assert why_not(Split(0, 3), records[::2]) == []


def test_a_group_without_a_kind_of_work_does_not_wait_until_roles_may_change() -> None:
    """Its only prefill worker has ended just after the roles of the others changed."""
    cooling = [replace(worker(number, "decode"), role_age_s=1.0) for number in range(3)]
    assert [one.role for one in changes(Split(1, 2), cooling)] == ["prefill"]
    cooling = [replace(worker(number, "prefill"), role_age_s=1.0) for number in range(3)]
    assert [one.role for one in changes(Split(2, 1), cooling)] == ["decode"]
    pair = [
        replace(worker(3, "decode"), role_age_s=1.0),
        replace(worker(4, "prefill"), role_age_s=1.0),
    ]
    assert not changes(Split(4, 1), [*pair, *cooling]), "it has both"
