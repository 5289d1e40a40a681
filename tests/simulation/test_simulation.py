"""Fleets on a virtual clock, thousands of them, each with faults of its own."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from effuse.kvtransfer.handoff import ReceiverState, SenderState
from effuse.router.request_states import ENDED, State
from simulation import mutants
from simulation.cancels import States, cancel
from simulation.faults import FAULTS
from simulation.mutants import MUTANTS, Patch
from simulation.run import Broken, Run, run, run_all

SEEDS = int(os.environ.get("SIMULATED_SEEDS", "200"))  # `make chaos` has 20000
MOST_SEEDS = 1000  # in which each planted bug is seen
# The seeds in which the rarer ones were seen, so they are tried first. All others follow.
SEEN = {
    mutants.digests_not_compared: 31,
    mutants.pages_and_generations_not_compared: 140,
    mutants.incarnation_not_compared: 32,
    mutants.any_writer_let_in: 49,
    mutants.fence_skipped: 134,
    mutants.pages_freed_at_abort: 50,
    mutants.pages_freed_when_the_lease_ends: 211,
    mutants.source_freed_at_abort: 28,
    mutants.drained_before_writes_are_over: 28,
    mutants.handoff_lease_judged_early: 33,
    mutants.seed_of_the_run_before_forgotten: 71,
    mutants.cancelled_requests_not_ended_in_redis: 28,
}
CANCELS = 500  # `make chaos` has 10000
MOST_TURNS = 6  # of this many, because the rarest state occurs once in 260 cancels
R, S = ReceiverState, SenderState
OVER = {R.RESERVED, R.VERIFIED, R.RELEASED, S.ENDED}  # or at once another one
OPEN = {*State, *R, *S} - ENDED - OVER


def test_nothing_is_violated_and_whoever_stays_is_answered() -> None:
    faults: Counter[str] = Counter()
    states: Counter[State] = Counter()
    num_lost = 0
    found = run_all(range(SEEDS))
    assert len({one.seed for one in found}) == len(found) == SEEDS
    for outcome in found:
        faults += outcome.faults
        states += outcome.states
        num_lost += outcome.num_attempts_lost
    assert set(faults) == {fault.__name__ for fault in FAULTS}
    assert set(states) == {State.FINISHED, State.CANCELLED}
    assert num_lost > len(found)


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = Run(3), Run(3)
    assert first.go() == second.go()
    assert first.clock.told() == second.clock.told()
    assert len(first.clock.trace) > 20


def first_broken(most: int, likely: int = 0) -> Broken | None:
    for seed in (likely, *range(most)):
        try:
            run(seed)
        except Broken as broken:
            return broken
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_seen(mutant: type[Patch]) -> None:
    with mutant():
        broken = first_broken(MOST_SEEDS, SEEN.get(mutant, 0))
    assert broken is not None
    assert "python -P -m simulation --seed" in str(broken)


def test_cancels_leave_nothing_behind_whatever_state_they_meet() -> None:
    met: States = Counter()
    for turn in range(MOST_TURNS):
        met += cancel(CANCELS, first_seed=turn * CANCELS)  # each seed has several
        if set(met) >= OPEN:
            break
    assert set(met) >= OPEN, OPEN - set(met)


def test_a_broken_run_can_be_seen_again() -> None:
    with mutants.committed_twice():
        broken = first_broken(10)
        assert broken is not None
        with pytest.raises(Broken) as again:
            run(int(str(broken).split()[-1]))
    assert str(again.value) == str(broken)
