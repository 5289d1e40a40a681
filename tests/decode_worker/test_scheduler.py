"""Scheduling policy as data: demands in, grants out; and the promise that the oldest advances."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from effuse.decode_worker.scheduler import (
    UNDER_WAY,
    DecodeLimits,
    Demand,
    Footprint,
    Schedule,
    admit,
    check_fits,
    schedule,
)
from effuse.decode_worker.sequence import RequestError
from effuse.kvtransfer.pool import PagePool

LIMITS = DecodeLimits(
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_model_len=200,
    num_pages=10,
    page_size=16,
    block_size=8,
)


def denoise(rows: int, held: int = 2, wanted: int = 2) -> Demand:
    return Demand(rows=rows, least=rows, growth=wanted - held, holds_pages=held > 0)


def prefill(rows: int, least: int = 8, held: int = 2) -> Demand:
    return Demand(rows=rows, least=least, growth=0, holds_pages=held > 0)


def schedule_alone(
    running: list[Demand], num_free: int, held: Sequence[int] | None = None
) -> Schedule:
    """Of requests that share no page, and hold two each if they hold any."""
    pages = held or [2 * demand.holds_pages for demand in running]
    return schedule(
        running,
        num_free=num_free,
        limits=LIMITS,
        count_freed=lambda gone: sum(pages[at] for at in gone),
    )


def test_a_forward_of_a_pipeline_gets_a_part_of_the_requests() -> None:
    """Those that are in another one get no rows, but may lose their pages."""
    running = [UNDER_WAY, denoise(8), denoise(8, wanted=3), denoise(8), UNDER_WAY]
    found = schedule(
        running, num_free=0, limits=LIMITS, count_freed=lambda gone: 2 * len(gone), most_requests=2
    )
    assert (found.rows, found.preempted) == ((0, 8, 8, 0, 0), (4,))


@pytest.mark.parametrize(
    ("running", "num_free", "rows", "preempted"),
    [
        pytest.param([], 10, (), (), id="nothing"),
        pytest.param([denoise(16), denoise(24)], 0, (16, 24), (), id="all-fit"),
        pytest.param([denoise(40), denoise(32), denoise(16)], 0, (40, 0, 16), (), id="budget"),
        pytest.param([denoise(40), prefill(100)], 0, (40, 24), (), id="chunk-takes-the-rest"),
        pytest.param([prefill(100), denoise(16)], 0, (64, 0), (), id="older-prompt-goes-first"),
        pytest.param([denoise(44), prefill(100)], 0, (44, 16), (), id="chunk-cut-at-a-block"),
        pytest.param([denoise(40), prefill(12, least=12)], 0, (40, 12), (), id="odd-last-chunk"),
        pytest.param([denoise(40), prefill(45, least=37)], 0, (40, 0), (), id="unsplittable-waits"),
        pytest.param([prefill(69, least=37)], 0, (61,), (), id="prompt-whole-then-blocks"),
        pytest.param([denoise(16, 2, 3), denoise(16)], 1, (16, 16), (), id="grows"),
        pytest.param([denoise(16, 2, 3), denoise(16)], 0, (16, 0), (1,), id="preempts-youngest"),
        pytest.param(
            [denoise(8, 2, 3), denoise(8), denoise(8)], 0, (8, 8, 0), (2,), id="only-as-needed"
        ),
        pytest.param(
            [denoise(8, 2, 5), denoise(8), denoise(8)], 0, (8, 0, 0), (2, 1), id="two-victims"
        ),
        pytest.param(
            [denoise(8, 2, 2), denoise(8, 2, 3)], 0, (8, 0), (), id="youngest-waits-for-older"
        ),
        pytest.param([denoise(8, 2, 3)], 0, (0,), (), id="waits-for-writers-only"),
        pytest.param(
            [denoise(8, 2, 3), denoise(8), denoise(8, 0, 0)], 0, (8, 0, 8), (1,), id="not-for-none"
        ),
    ],
)
def test_schedule(
    running: list[Demand], num_free: int, rows: tuple[int, ...], preempted: tuple[int, ...]
) -> None:
    result = schedule_alone(running, num_free)
    assert (result.rows, result.preempted) == (rows, preempted)


def test_who_shares_pages_frees_only_its_own() -> None:
    """The two younger ones have both of their pages in common: those are free once both let go."""
    running = [denoise(8, 2, 4), denoise(8), denoise(8)]
    alone = schedule_alone(running, num_free=0)
    assert (alone.rows, alone.preempted) == ((8, 8, 0), (2,))
    pool = PagePool(4)
    shared = pool.allocate_committed(2) or ()
    pool.share(shared)
    pages = [pool.allocate_committed(2) or (), shared, shared]
    result = schedule(
        running,
        num_free=0,
        limits=LIMITS,
        count_freed=lambda gone: pool.count_freed(pages[at] for at in gone),
    )
    assert (result.rows, result.preempted) == ((8, 0, 0), (2, 1))


@pytest.mark.parametrize(
    ("waiting", "holding", "free", "growth", "admitted"),
    [
        pytest.param([], 0, 10, 0, 0, id="nobody"),
        pytest.param([10], 0, 10, 0, 1, id="whole-pool"),
        pytest.param([3, 3, 3], 0, 10, 0, 2, id="headroom-for-those-admitted"),
        pytest.param([0, 0, 0, 0, 0], 0, 10, 0, 4, id="max-num-seqs"),
        pytest.param([1], 4, 10, 0, 0, id="full-house"),
        pytest.param([9, 1], 1, 9, 0, 0, id="first-come-first-served"),
        pytest.param([4], 1, 6, 2, 0, id="growth-comes-first"),
        pytest.param([3], 1, 6, 2, 1, id="beside-growth"),
    ],
)
def test_admit(waiting: list[int], holding: int, free: int, growth: int, admitted: int) -> None:
    result = admit(waiting, num_holding=holding, num_free=free, growth=growth, limits=LIMITS)
    assert result == admitted


def footprint(cached: int = 8, rows: int = 16, chunk: int = 8) -> Footprint:
    return Footprint(most_cached=cached, most_rows=rows, first_chunk=chunk)


@pytest.mark.parametrize(
    ("asked", "numbers", "field"),
    [
        pytest.param(footprint(cached=161), ("11 pages of 16", "10"), "prompt", id="pages"),
        pytest.param(footprint(rows=72), ("72", "64"), "decoding.window", id="rows"),
        pytest.param(footprint(chunk=65), ("65", "64"), "prompt", id="prompt-in-one-chunk"),
    ],
)
def test_what_can_never_fit_is_refused_with_numbers(
    asked: Footprint, numbers: tuple[str, ...], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_fits(asked, LIMITS, "decoding.window")
    assert all(number in str(caught.value) for number in numbers)
    assert caught.value.field == field


def test_what_just_fits_is_accepted() -> None:
    check_fits(footprint(cached=160, rows=64, chunk=64), LIMITS, "prompt")


def test_a_prefill_worker_writes_pages_of_each_rank_that_cuts_the_context() -> None:
    limits = replace(LIMITS, context_degree=2)  # so that its pages have 8 tokens
    found = [limits.written_pages(tokens, num_held=1) for tokens in (16, 17, 24, 25, 200)]
    assert found == [0, 1, 1, 2, 23]
    # A bidirectional prompt that is here already may leave its last page to some of the ranks.
    assert [limits.written_pages(tokens, num_held=2) for tokens in (17, 24, 25)] == [0, 0, 0]
    assert LIMITS.written_pages(40, num_held=1) == LIMITS.pages_for(40) - 1


def test_limits_name_the_value_at_fault() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 15 is less than 16"):
        DecodeLimits(
            max_num_batched_tokens=15,
            max_num_seqs=1,
            max_model_len=1,
            num_pages=1,
            page_size=1,
            block_size=8,
        )


@pytest.mark.parametrize("seed", range(200))
def test_the_oldest_always_advances_and_nothing_is_overdrawn(seed: int) -> None:
    draw = random.Random(seed)
    held = [draw.randint(0, 3) for _ in range(draw.randint(1, 6))]
    running = [
        denoise(draw.choice((8, 16, 40)), pages, pages + draw.randint(0, 2))
        if draw.random() < 0.6
        else prefill(draw.choice((8, 24, 100)), held=pages)
        for pages in held
    ]
    num_free = draw.randint(0, 2) if len(running) > 1 else 2
    result = schedule_alone(running, num_free, held)
    grown = sum(demand.growth for demand, rows in zip(running, result.rows, strict=True) if rows)
    freed = sum(held[index] for index in result.preempted)
    assert sum(result.rows) <= LIMITS.max_num_batched_tokens
    assert grown <= num_free + freed
    assert not any(result.rows[index] for index in result.preempted)
    reachable = num_free + sum(held[1:])
    if running[0].growth <= reachable:
        assert result.rows[0]
