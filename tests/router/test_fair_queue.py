"""Turns among tenants: the same share of tokens for each, whatever the others do."""

from __future__ import annotations

import random

import pytest

from effuse.router.tenants import QUANTUM, FairQueue


def test_one_tenant_is_served_in_its_order() -> None:
    queue = FairQueue[int]()
    costs = [5000, 1, 300, 0, QUANTUM]
    for at, cost in enumerate(costs):
        queue.push("a", cost, at)
    assert [queue.pop() for _ in costs] == list(range(len(costs)))
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


def test_places_order_a_tenants_own_and_nobody_elses() -> None:
    queue = FairQueue[str]()
    for item, place in (("late", 9.0), ("early", 1.0), ("again", 1.0)):
        queue.push("a", QUANTUM, item, place)
    queue.push("b", QUANTUM, "other", 99.0)
    served = [queue.pop() for _ in range(4)]
    assert [one for one in served if one != "other"] == ["early", "again", "late"]
    assert served.index("other") < 3


def test_who_comes_late_does_not_wait_behind_a_flood() -> None:
    queue = FairQueue[str]()
    for _ in range(1000):
        queue.push("flood", 256, "flood")
    queue.push("late", 256, "late")
    served = [queue.pop() for _ in range(10)]
    assert served.count("late") == 1


def test_shares_are_of_tokens_and_not_of_requests() -> None:
    queue = FairQueue[tuple[str, int]]()
    costs = {"short": 64, "long": 4096}
    for tenant, cost in costs.items():
        for _ in range(4000):
            queue.push(tenant, cost, (tenant, cost))
    spent = dict.fromkeys(costs, 0)
    for _ in range(2000):
        tenant, cost = queue.pop()
        spent[tenant] += cost
    assert abs(spent["short"] - spent["long"]) <= 4096 + 2 * QUANTUM


def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    """Compared with a plain list of its content, through random pushes, pops and removals."""
    draw = random.Random(7)
    for _ in range(200):
        queue, held = FairQueue[object](), list[tuple[str, object, int]]()
        for _ in range(60):
            what = draw.random()
            if what < 0.5 or not held:
                entry = (draw.choice("abc"), object(), draw.randint(1, 8))
                queue.push(entry[0], draw.randrange(3000), entry[1], count=entry[2])
                held.append(entry)
            elif what < 0.7:
                item = queue.pop()
                held.remove(next(one for one in held if one[1] is item))
            elif what < 0.85:
                entry = held.pop(draw.randrange(len(held)))
                queue.remove(*entry[:2])
                queue.remove(*entry[:2])  # which is not there any more
            else:
                tenant = queue.longest()
                newest = [one for one in held if one[0] == tenant][-1]
                assert queue.pop_last(tenant) is newest[1]
                held.remove(newest)
            lengths = {tenant: sum(one[2] for one in held if one[0] == tenant) for tenant in "abc"}
            assert len(queue) == sum(lengths.values())
            assert {tenant: queue.length_of(tenant) for tenant in "abc"} == lengths
            assert queue.count_beyond(5) == sum(max(0, one - 5) for one in lengths.values())


@pytest.mark.parametrize("seed", range(20))
def test_how_many_go_first_is_told_but_for_whose_turn_it_is(seed: int) -> None:
    draw, queue = random.Random(seed), FairQueue[int]()
    for _ in range(draw.randrange(30)):
        count = draw.choice((1, 1, 1, 4))
        queue.push(draw.choice("abcd"), count * QUANTUM, count, draw.random(), count)
    place, mine = draw.random(), draw.choice((1, 4))
    told = queue.ahead_of("a", place, mine)
    queue.push("a", mine * QUANTUM, 0, place, mine)
    before = 0
    while popped := queue.pop():
        before += popped
    # Of three other tenants, a turn of each may not have come, or have come for four at once.
    assert told - 3 * 4 <= before <= told + 3 * 3
