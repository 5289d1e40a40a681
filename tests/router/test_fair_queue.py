"""Turns among tenants: the same share of tokens for each, whatever the others do."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from effuse.router.tenants import QUANTUM, FairQueue, Turn


def turn(tenant: str, cost: int, place: float = 0.0, count: int = 1) -> Turn:
    return Turn(tenant, cost, cast(Any, None), place, count)


def pushed(queue: FairQueue, *args: Any, **kwargs: Any) -> Turn:
    queue.push(one := turn(*args, **kwargs))
    return one


def test_one_tenant_is_served_in_its_order() -> None:
    queue = FairQueue()
    turns = [pushed(queue, "a", cost) for cost in (5000, 1, 300, 0, QUANTUM)]
    assert [queue.pop() for _ in turns] == turns
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


def test_places_order_a_tenants_own_and_nobody_elses() -> None:
    queue = FairQueue()
    late, early, again = (pushed(queue, "a", QUANTUM, place) for place in (9.0, 1.0, 1.0))
    other = pushed(queue, "b", QUANTUM, 99.0)
    served = [queue.pop() for _ in range(4)]
    assert [one for one in served if one is not other] == [early, again, late]
    assert served.index(other) < 3


def test_who_comes_late_does_not_wait_behind_a_flood() -> None:
    queue = FairQueue()
    for _ in range(1000):
        pushed(queue, "flood", 256)
    pushed(queue, "late", 256)
    served = [queue.pop().tenant for _ in range(10)]
    assert served.count("late") == 1


def test_shares_are_of_tokens_and_not_of_requests() -> None:
    queue = FairQueue()
    costs = {"short": 64, "long": 4096}
    for tenant, cost in costs.items():
        for _ in range(4000):
            pushed(queue, tenant, cost)
    spent = dict.fromkeys(costs, 0)
    for _ in range(2000):
        popped = queue.pop()
        spent[popped.tenant] += popped.cost
    assert abs(spent["short"] - spent["long"]) <= 4096 + 2 * QUANTUM


def test_nothing_is_lost_and_nothing_comes_twice() -> None:
    """Compared with a plain list of its content, through random pushes, pops and removals."""
    draw = random.Random(7)
    for _ in range(200):
        queue, held = FairQueue(), list[Turn]()
        for _ in range(60):
            what = draw.random()
            if what < 0.5 or not held:
                cost, count = draw.randrange(3000), draw.randint(1, 8)
                held.append(pushed(queue, draw.choice("abc"), cost, count=count))
            elif what < 0.7:
                held.remove(queue.pop())
            elif what < 0.85:
                gone = held.pop(draw.randrange(len(held)))
                assert queue.remove(gone)
                assert not queue.remove(gone), "which is not there any more"
            else:
                tenant = queue.longest()
                newest = [one for one in held if one.tenant == tenant][-1]
                assert queue.pop_last(tenant) is newest
                held.remove(newest)
            lengths = {
                tenant: sum(one.num_answers for one in held if one.tenant == tenant)
                for tenant in "abc"
            }
            assert len(queue) == sum(lengths.values())
            assert {tenant: queue.length_of(tenant) for tenant in "abc"} == lengths
            assert queue.count_beyond(5) == sum(max(0, one - 5) for one in lengths.values())


@pytest.mark.parametrize("seed", range(20))
def test_how_many_go_first_is_told_but_for_whose_turn_it_is(seed: int) -> None:
    draw, queue = random.Random(seed), FairQueue()
    for _ in range(draw.randrange(30)):
        count = draw.choice((1, 1, 1, 4))
        pushed(queue, draw.choice("abcd"), count * QUANTUM, draw.random(), count)
    place, mine = draw.random(), draw.choice((1, 4))
    told = queue.ahead_of("a", place, mine)
    own = pushed(queue, "a", mine * QUANTUM, place, mine)
    before = 0
    while (popped := queue.pop()) is not own:
        before += popped.num_answers
    # Of three other tenants, a turn of each may not have come, or have come for four at once.
    assert told - 3 * 4 <= before <= told + 3 * 3
