"""Choices in a fleet that is too large to look at each worker."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import pytest
from router.fake_model import worker_record
from router.test_routed_fleet import View, worker

from effuse.placement.records import WorkerRecord
from effuse.router import fleet as fleets
from effuse.router.fleet import RoutedFleet
from effuse.router.policy import AttemptNeeds, Candidate, Placement

NUM = 200
SEATS = 64


class Counting(RoutedFleet):
    """Counts how often all workers are listed."""

    num_listed = 0

    def candidates(self) -> list[Candidate]:
        self.num_listed += 1
        return super().candidates()


def fleet_of(*others: WorkerRecord, num: int = NUM) -> Counting:
    named = [worker(f"{kind}{number}") for number in range(num // 2) for kind in "dp"]
    fleet = Counting(View(*named, *others), "auto", lambda: 0.0)
    fleet.look()
    fleet.num_listed = 0
    return fleet


def spread(fleet: RoutedFleet, seed: int) -> float:
    """The largest number of a worker's tokens over the mean, after many requests of all lengths,
    each of which ends after a while."""
    draw = random.Random(seed)
    ends: list[tuple[float, int, ExitStack]] = []
    tokens: dict[str, int] = {}
    for number in range(12 * NUM):
        while ends and ends[0][0] <= number:
            heapq.heappop(ends)[2].close()
        placement = fleet.place(fleet.need("fake"))
        assert placement is not None
        length = draw.choice((64, 256, 1024))
        stack = ExitStack()
        stack.enter_context(fleet.counted(placement, length, 64))
        stack.callback(_less, tokens, placement, length)
        tokens[placement.decode.worker_id] = tokens.get(placement.decode.worker_id, 0) + length
        heapq.heappush(ends, (number + draw.expovariate(1 / (8 * NUM)), number, stack))
    found = max(tokens.values()) / (sum(tokens.values()) / (NUM // 2))
    for _, _, stack in ends:
        stack.close()
    return found


def _less(tokens: dict[str, int], placement: Placement, length: int) -> None:
    tokens[placement.decode.worker_id] -= length


def test_loads_are_almost_as_even_as_if_each_choice_saw_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = spread(fleet_of(), 1)
    monkeypatch.setattr(random, "sample", lambda ready, num: ready[:num])
    same = spread(fleet_of(), 1)
    monkeypatch.setattr(fleets, "FEW", NUM)
    every = spread(fleet_of(), 1)
    assert few <= 1.1 * every
    assert same > 1.5 * every, "it would not show if the few were always the same"


def test_a_choice_lists_all_workers_only_if_none_of_a_few_has_a_seat() -> None:
    fleet = fleet_of()
    with ExitStack() as full:
        held = []
        for _ in range(NUM // 2 * SEATS):
            placement = fleet.place(fleet.need("fake"))
            assert placement is not None
            held.append(full.enter_context(ExitStack()))
            held[-1].enter_context(fleet.counted(placement, 8, 8))
        # The last free seats are hard to find by chance.
        assert fleet.num_listed < NUM * SEATS / 10
        assert fleet.place(fleet.need("fake")) is None
        fleet.num_listed = 0
        held[17].close()
        assert fleet.place(fleet.need("fake")) is not None
        assert not fleet.num_listed, "the worker that has a seat now was known"


def chosen(fleet: RoutedFleet, need: AttemptNeeds, times: int = 40) -> set[str]:
    found = set()
    for _ in range(times):
        placement = fleet.place(need)
        assert placement is not None and placement.prefill is not None
        found.add(placement.prefill.worker_id)
    return found


def with_cache(fleet: RoutedFleet, cached: dict[tuple[str, str], int]) -> AttemptNeeds:
    return msgspec.structs.replace(fleet.need("fake"), cached=cached)


def test_a_worker_that_knows_the_prompt_is_among_the_few() -> None:
    view = fleet_of().view.workers()
    known = [
        msgspec.structs.replace(one, load=msgspec.structs.replace(one.load, prefix_queries=1))
        for one in view
    ]
    fleet = Counting(View(*known), "auto", lambda: 0.0)
    fleet.look()
    assert chosen(fleet, with_cache(fleet, {known[41].life: 512})) == {known[41].worker_id}
    assert len(chosen(fleet, fleet.need("fake"))) > 10


def test_the_only_workers_of_a_model_are_found_among_those_of_others() -> None:
    others: Sequence[WorkerRecord] = [
        worker_record("p-other", "prefill", model="other"),
        worker_record("d-other", "decode", model="other"),
    ]
    fleet = fleet_of(*others)
    placement = fleet.place(fleet.need("other"))
    assert placement is not None and placement.prefill is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p-other", "d-other")
    assert not fleet.num_listed


def test_no_prompt_stays_at_a_decode_worker_whose_prefill_workers_were_not_drawn() -> None:
    """A rollout: the new workers are few, and empty."""
    old = [worker(f"{kind}{number}") for number in range(NUM // 2) for kind in "dp"]
    busy = [
        msgspec.structs.replace(one, load=msgspec.structs.replace(one.load, free_pages=100))
        for one in old
    ]
    new = [
        worker_record(f"{role}-new{number}", role, fingerprint="new")
        for number in range(NUM // 20)
        for role in ("prefill", "decode")
    ]
    fleet = Counting(View(*busy, *new), "auto", lambda: 0.0)
    fleet.look()
    fleet.num_listed = 0
    assert any("-new" in name for name in chosen(fleet, fleet.need("fake"), 200))
    assert not fleet.num_listed


def test_an_answer_goes_on_at_one_of_few_workers_with_its_weights() -> None:
    others = [
        worker_record("p-new", "prefill", fingerprint="new"),
        worker_record("d-new", "decode", fingerprint="new"),
    ]
    fleet = fleet_of(*others)
    need = msgspec.structs.replace(fleet.need("fake"), fingerprint=others[1].fingerprint)
    assert chosen(fleet, need) == {"p-new"}
    assert not fleet.num_listed
