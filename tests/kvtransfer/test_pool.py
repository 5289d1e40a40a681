"""Page states are a table, references carry generations, and no page is ever lost unnoticed; free
pages are runs, compared with a plain set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import permutations
from types import FrameType
from typing import Any

import pytest
from auditing import AuditError, audit_pool, free_ids

from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import (
    TRANSITIONS,
    FreeRuns,
    PageError,
    PageEvent,
    PagePool,
    PageState,
)

PATHS: dict[PageState, tuple[PageEvent, ...]] = {
    PageState.RESERVED: (PageEvent.RESERVE,),
    PageState.RECEIVING: (PageEvent.RESERVE, PageEvent.OPEN),
    PageState.COMMITTED: (PageEvent.TAKE,),
    PageState.QUARANTINED: (PageEvent.RESERVE, PageEvent.OPEN, PageEvent.QUARANTINE),
}
# A page stays in its state while it is shared, which a test below covers.
AFTER_ENTRY = [
    e for e in PageEvent if e not in (PageEvent.RESERVE, PageEvent.TAKE, PageEvent.LEAVE)
]


def enter(pool: PagePool, count: int, event: PageEvent) -> tuple[PageRef, ...]:
    taken = pool.allocate(count) if event is PageEvent.RESERVE else pool.allocate_committed(count)
    assert taken is not None
    return taken


def test_a_rehearsal_may_have_half_of_the_free_pages_or_the_only_one() -> None:
    pool, one = PagePool(5), PagePool(1)
    assert (pool.num_lendable, one.num_lendable) == (2, 1)
    assert pool.allocate(4) and one.allocate(1)
    assert (pool.num_lendable, one.num_lendable) == (0, 0)


def apply(pool: PagePool, pages: tuple[PageRef, ...], event: PageEvent) -> None:
    {
        PageEvent.OPEN: pool.open,
        PageEvent.COMMIT: pool.commit,
        PageEvent.QUARANTINE: pool.quarantine,
        PageEvent.FENCE: pool.fence,
        PageEvent.SHARE: pool.share,
        PageEvent.RELEASE: pool.release,
    }[event](pages)


def in_state(pool: PagePool, state: PageState) -> tuple[PageRef, ...]:
    pages = enter(pool, 1, PATHS[state][0])
    for event in PATHS[state][1:]:
        apply(pool, pages, event)
    return pages


@pytest.mark.parametrize("state", PATHS, ids=lambda s: s.name)
@pytest.mark.parametrize("event", AFTER_ENTRY, ids=lambda e: e.name)
def test_every_state_and_event_is_the_table(state: PageState, event: PageEvent) -> None:
    pool = PagePool(2)
    pages = in_state(pool, state)
    expected = TRANSITIONS.get((state, event))
    if expected is None:
        with pytest.raises(PageError, match=f"{state.name}: {event.name} is not allowed"):
            apply(pool, pages, event)
        assert pool._states[pages[0].page_id] is state
    else:
        apply(pool, pages, event)
        assert pool._states[pages[0].page_id] is expected
    audit_pool(pool)


def test_a_page_a_writer_may_reach_cannot_be_freed_without_a_fence() -> None:
    freeing = {pair for pair, after in TRANSITIONS.items() if after is PageState.FREE}
    assert (PageState.RECEIVING, PageEvent.RELEASE) not in freeing
    assert (PageState.QUARANTINED, PageEvent.RELEASE) not in freeing
    assert {s for s, e in freeing if e is PageEvent.FENCE} == {PageState.QUARANTINED}


def test_generations_are_bumped_at_each_allocation_and_stale_references_refused() -> None:
    pool = PagePool(1)
    first = enter(pool, 1, PageEvent.TAKE)
    pool.release(first)
    second = enter(pool, 1, PageEvent.TAKE)
    assert second[0].page_id == first[0].page_id
    assert second[0].generation == first[0].generation + 1
    with pytest.raises(PageError, match="generation 2, the reference is to generation 1"):
        pool.release(first)


def test_allocation_takes_the_tightest_run_that_fits() -> None:
    pool = PagePool(10)
    pages = enter(pool, 10, PageEvent.TAKE)
    pool.release((pages[1], pages[2], pages[5], pages[6], pages[7], pages[9]))
    assert [p.page_id for p in enter(pool, 2, PageEvent.TAKE)] == [1, 2]
    assert [p.page_id for p in enter(pool, 3, PageEvent.TAKE)] == [5, 6, 7]


def test_allocation_splits_over_the_longest_runs_when_none_fits() -> None:
    pool = PagePool(8)
    pages = enter(pool, 8, PageEvent.TAKE)
    pool.release((pages[0], pages[3], pages[4], pages[5], pages[7]))
    assert [p.page_id for p in enter(pool, 4, PageEvent.TAKE)] == [3, 4, 5, 0]


def test_too_few_pages_is_none_and_takes_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == ()
    audit_pool(pool, held=())


def test_a_page_outside_the_pool_is_refused() -> None:
    with pytest.raises(PageError, match="outside a pool of 2"):
        PagePool(2).release((PageRef(2, 0),))


def test_a_planted_leak_fails_the_audit() -> None:
    pool = PagePool(4)
    kept = enter(pool, 2, PageEvent.TAKE)
    audit_pool(pool, held=kept)
    with pytest.raises(AuditError, match=r"2 pages leaked: 0 COMMITTED, 1 COMMITTED"):
        audit_pool(pool, held=())


def test_the_audit_sees_double_stale_and_freed_holders() -> None:
    pool = PagePool(4)
    (page,) = enter(pool, 1, PageEvent.TAKE)
    with pytest.raises(AuditError, match="held twice"):
        audit_pool(pool, held=(page, page))
    with pytest.raises(AuditError, match="earlier generation"):
        audit_pool(pool, held=(PageRef(page.page_id, 0),))
    pool.release((page,))
    with pytest.raises(AuditError, match="although they are free"):
        audit_pool(pool, held=(page,))


def test_the_audit_sees_broken_books() -> None:
    pool = PagePool(2)
    pool._free.take(1)
    with pytest.raises(AuditError, match="free list"):
        audit_pool(pool)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_shared_page_is_free_once_its_last_holder_has_let_go(order: tuple[int, ...]) -> None:
    """Of two shared pages two holders have one more each of their own, in all orders of leaving."""
    pool = PagePool(4)
    shared = enter(pool, 2, PageEvent.TAKE)
    holders = [shared, (*shared, *enter(pool, 1, PageEvent.TAKE))]
    holders.append((*shared, *enter(pool, 1, PageEvent.TAKE)))
    pool.share(shared)
    pool.share(shared)
    left = set(order)
    for holder in order:
        is_last = len(left) == 1
        own = holders[holder] if is_last else holders[holder][2:]
        num_free = pool.num_free
        assert pool.count_freed([holders[holder]]) == len(own)
        assert pool.count_freed(holders[one] for one in left) == pool.num_pages - num_free
        pool.release(holders[holder])
        left.remove(holder)
        assert pool.num_free == num_free + len(own)
        audit_pool(pool, held=[page for one in left for page in holders[one]])
    with pytest.raises(PageError, match="FREE: RELEASE is not allowed"):
        pool.release(shared)


def test_only_committed_pages_are_shared() -> None:
    pool = PagePool(4)
    for state in (PageState.RESERVED, PageState.RECEIVING, PageState.QUARANTINED):
        with pytest.raises(PageError, match=f"{state.name}: SHARE is not allowed"):
            pool.share(in_state(pool, state))
    audit_pool(pool)


def test_the_audit_sees_a_holder_too_few_and_one_too_many() -> None:
    pool = PagePool(2)
    pages = enter(pool, 2, PageEvent.TAKE)
    pool.share(pages[:1])
    audit_pool(pool, held=(*pages, pages[0]))
    with pytest.raises(AuditError, match=r"with fewer holders than sharers: \[0\]"):
        audit_pool(pool, held=pages)
    with pytest.raises(AuditError, match=r"held twice: \[1\]"):
        audit_pool(pool, held=(*pages, *pages))
    pool._states[0] = PageState.RECEIVING
    pool._counts.update({PageState.COMMITTED: -1, PageState.RECEIVING: 1})
    with pytest.raises(AuditError, match=r"shared pages that no attempt may read: \[0\]"):
        audit_pool(pool)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_conserve_pages(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(24)
    groups: list[tuple[PageRef, ...]] = []
    for _ in range(600):
        if not groups or rng.random() < 0.4:
            event = rng.choice((PageEvent.RESERVE, PageEvent.TAKE))
            count = rng.randint(1, 6)
            if count <= pool.num_free:
                groups.append(enter(pool, count, event))
        else:
            pages = groups.pop(rng.randrange(len(groups)))
            state = pool._states[pages[0].page_id]
            event = rng.choice([e for e in AFTER_ENTRY if (state, e) in TRANSITIONS])
            apply(pool, pages, event)
            if event is PageEvent.SHARE:
                groups.append(pages)
            if TRANSITIONS[state, event] is not PageState.FREE:
                groups.append(pages)
        audit_pool(pool, held=[page for group in groups for page in group])


@pytest.mark.parametrize("seed", range(6))
def test_runs_hold_what_a_set_would(seed: int) -> None:
    rng = random.Random(seed)
    runs, free = FreeRuns(40), set(range(40))
    for _ in range(400):
        if rng.random() < 0.5:
            count = rng.randint(0, len(free))
            taken = runs.take(count)
            assert len(taken) == count and set(taken) <= free
            free -= set(taken)
        elif len(free) < 40:
            page_id = rng.choice([i for i in range(40) if i not in free])
            runs.give(page_id)
            free.add(page_id)
        assert free_ids(runs) == sorted(free) and len(runs) == len(free)


def test_what_fits_into_one_run_comes_from_one() -> None:
    runs = FreeRuns(20)
    runs.take(20)
    for page_id in (0, 1, 2, 7, 8, 9, 10, 15):
        runs.give(page_id)
    assert runs.take(3) == [0, 1, 2]
    assert runs.take(4) == [7, 8, 9, 10]


def test_many_small_runs_cost_no_more_than_their_number() -> None:
    """An engine does nothing else meanwhile: with quadratic time a long prompt's pages took 10 s if
    free pages were scattered, and the engine counted as hung.
    """
    few, many = instructions_to_take(50), instructions_to_take(400)
    assert many < 16 * few


def instructions_to_take(count: int) -> int:
    """The number of executed lines for this many pages without neighbours."""
    runs, executed = FreeRuns(4 * count), 0
    runs.take(4 * count)
    for page_id in range(0, 4 * count, 2):
        runs.give(page_id)

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal executed
        executed += event == "opcode"
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # otherwise Python 3.12 reports none the first time
    sys.settrace(trace)
    taken = runs.take(count)
    sys.settrace(before)
    assert taken == list(range(0, 2 * count, 2))
    return executed


def test_no_pages_are_no_runs() -> None:
    runs = FreeRuns(0)
    assert (free_ids(runs), runs.take(0), len(runs)) == ([], [], 0)
