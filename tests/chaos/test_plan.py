"""A plan follows from its seed, and has the required faults."""

from __future__ import annotations

from collections import Counter

from chaos.plan import (
    KILLS,
    LASTING,
    LONGEST_PAUSE_S,
    OF_NETWORKS,
    OF_WORKERS,
    Fault,
    Kind,
    draw_plan,
    targets_of,
)

TARGETS = targets_of(2, 3)
A_DECK, ITS_KILLS = 20, 10


def plan(seed: int, kills: int) -> list[Fault]:
    return draw_plan(seed, kills, TARGETS)


def test_a_plan_follows_from_its_seed() -> None:
    assert plan(1, 50) == plan(1, 50)
    assert plan(1, 50) != plan(2, 50)
    assert plan(1, 50) == plan(1, 80)[: len(plan(1, 50))]


def test_it_has_as_many_kills_as_asked_for_and_ends_with_one() -> None:
    for kills in range(1, 30):
        faults = plan(3, kills)
        assert sum(fault.kind in KILLS for fault in faults) == kills
        assert faults[-1].kind in KILLS


def test_each_deck_has_a_kill_of_every_engine_and_every_kind() -> None:
    for seed in range(20):
        # The faults after the last kill of a deck are in the next one's plan.
        faults = plan(seed, ITS_KILLS + 1)[:A_DECK]
        targets = Counter(fault.target for fault in faults if fault.kind is Kind.ENGINE_KILLED)
        assert targets == Counter(TARGETS.workers)
        assert {fault.kind for fault in faults} == set(Kind) - OF_NETWORKS


def test_what_lasts_does_so_for_a_while() -> None:
    for fault in plan(4, 200):
        assert (0 < fault.hold_s <= LONGEST_PAUSE_S) == (fault.kind in LASTING)
        assert (fault.target == "redis") == (fault.role == "redis")


def test_all_but_kills_of_workers_can_be_left_out() -> None:
    found = draw_plan(5, 40, TARGETS, only=OF_WORKERS)
    assert {fault.kind for fault in found} == OF_WORKERS
    assert {fault.target for fault in found} == set(TARGETS.workers)
    assert len(found) == 40


def test_what_kills_nobody_is_counted_where_nothing_else_is_asked_for() -> None:
    kinds = {Kind.REDIS_PAUSED, Kind.REDIS_EMPTIED}
    found = draw_plan(6, 5, TARGETS, only=kinds, hold_s=60.0)
    assert len(found) == 5
    assert {(fault.kind, fault.hold_s) for fault in found} == {
        (Kind.REDIS_PAUSED, 60.0),
        (Kind.REDIS_EMPTIED, 0.0),
    }
