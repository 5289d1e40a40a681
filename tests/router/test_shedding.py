"""With three times its sustainable load, a fleet answers as many requests in time as at any load.

The queue is the router's own; requests that hold its slots for a while stand for the fleet.
"""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from router.virtual_time import run_virtually

from effuse.protos.errors import Overloaded
from effuse.router.admission import LEAST_HOLDS, Admission, HeldSlots, HoldTimes, SlotNeed

SLOTS = 8
DEADLINE_S = 3.0  # of requests that take 1 s on average


def _goodput(
    load: float, *, is_known: bool, count: int = 1500, spread: float = 0.5, answers: int = 1
) -> float:
    """Answers to requests in time, divided by those that the slots can give, with `load` times as
    many requests; the router knows deadlines or it does not. `answers`: those of every other
    request, apart from its seats.
    """

    async def offer() -> float:
        loop, draw = asyncio.get_running_loop(), random.Random(7)
        admission, seats = Admission(SLOTS, 8 * count, loop.time), asyncio.Semaphore(SLOTS)
        answered = 0

        async def answer(slots: HeldSlots, takes_s: float) -> None:
            async with seats:
                began = loop.time()
                await asyncio.sleep(takes_s)
                slots.end_answer(began)

        async def ask(takes_s: list[float]) -> None:
            nonlocal answered
            left_s = DEADLINE_S if is_known else math.inf
            need = SlotNeed(left_s=left_s, size=64, num_answers=len(takes_s))
            try:
                async with asyncio.timeout(DEADLINE_S), HeldSlots(admission, need) as slots:
                    await asyncio.gather(*(answer(slots, one) for one in takes_s))
                    answered += len(takes_s)
            except (TimeoutError, Overloaded):
                return

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                wanted = answers if number % 2 else 1
                await asyncio.sleep(draw.expovariate(load * SLOTS / ((answers + 1) / 2)))
                takes_s = [draw.lognormvariate(-(spread**2) / 2, spread) for _ in range(wanted)]
                group.create_task(ask(takes_s))
        assert (admission.num_running, admission.num_waiting) == (0, 0)
        return answered / loop.time() / SLOTS

    return run_virtually(offer())


def test_goodput_at_three_times_the_load_is_that_of_the_peak() -> None:
    peak = max(_goodput(load, is_known=True) for load in (0.7, 0.85, 1.0, 1.2, 1.5))
    assert peak > 0.85
    assert _goodput(2.0, is_known=True) >= 0.95 * peak
    assert _goodput(3.0, is_known=True) >= 0.95 * peak


def test_without_deadlines_known_it_would_collapse() -> None:
    """The shedding is the reason for the first test's result."""
    assert _goodput(3.0, is_known=False) < 0.4


def test_so_it_is_where_requests_have_several_answers() -> None:
    peak = max(_goodput(load, is_known=True, answers=6) for load in (0.7, 1.0, 1.5))
    assert peak > 0.75
    assert _goodput(3.0, is_known=True, answers=6) >= 0.95 * peak
    assert _goodput(3.0, is_known=False, answers=6) < 0.4


def test_a_fleet_that_bears_the_load_refuses_next_to_nobody() -> None:
    assert _goodput(0.6, is_known=True) >= 0.98 * _goodput(0.6, is_known=False)


def _known(*holds: float, size: int = 64) -> HoldTimes:
    times = HoldTimes()
    for held_s in holds:
        times.add(held_s, size, is_answered=True)
    return times


def test_nothing_is_predicted_from_a_few() -> None:
    few = _known(*[100.0] * (LEAST_HOLDS - 1))
    assert few.late_s(0.001, 64, 50, 1) < 0
    few.add(100.0, 64, is_answered=True)
    assert few.late_s(0.001, 64, 50, 1) > 5000


@pytest.mark.parametrize(
    ("num", "slots", "size", "late_s"),
    [
        (1, 1, 64, 2 + 2 - 3),  # one leaves the slot, then it takes as long itself
        (4, 1, 64, 8 + 2 - 3),
        (4, 4, 64, 2 + 2 - 3),
        (1, 4, 64, 0.5 + 2 - 3),
        (1, 4, 32, 0.5 + 1 - 3),  # half as many tokens at most
        (1, 4, 6400, 0.5 + 2 - 3),  # longer ones may end early
        (0, 4, 64, 2 - 3),
        (-2, 4, 64, 2 - 3),  # slots are free
    ],
)
def test_what_is_predicted(num: int, slots: int, size: int, late_s: float) -> None:
    """Holds of 2 s that never deviate."""
    assert _known(*[2.0] * 20).late_s(3.0, size, num, slots) == pytest.approx(late_s)


def test_who_deviates_is_given_more() -> None:
    times = _known(*[1.0, 3.0] * 40)
    assert times.hold_s(64) == pytest.approx(2.0, abs=0.1)
    assert times.hold_s(64, margin=2.0) == pytest.approx(4.0, abs=0.2)


def test_one_that_was_broken_off_counts_if_it_was_long() -> None:
    times = _known(*[2.0] * 20)
    times.add(0.01, 64, is_answered=False)
    assert times.hold_s(64) == 2.0
    times.add(10.0, 64, is_answered=False)
    assert times.hold_s(64) == pytest.approx(2.5)


def test_the_pace_is_that_of_late() -> None:
    times = _known(*[1.0] * 200, *[4.0] * 60)
    assert times.hold_s(64) > 3.8


def test_a_refusal_says_when_to_come_back_and_holds_nothing() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(1, 10, loop.time)
        for _ in range(LEAST_HOLDS):
            async with HeldSlots(admission, SlotNeed()):
                await asyncio.sleep(1.0)
        async with HeldSlots(admission, SlotNeed()):
            with pytest.raises(Overloaded, match=r"1\.5 s after its deadline") as refused:
                async with HeldSlots(admission, SlotNeed(left_s=0.5)):
                    pass
            assert refused.value.retry_after_s == pytest.approx(1.5)
            assert (admission.num_running, admission.num_waiting, admission.num_shed) == (1, 0, 1)
            admission.check(SlotNeed(left_s=2.5))  # one that has the time may wait
        async with HeldSlots(
            admission, SlotNeed(left_s=0.5)
        ):  # and without a queue, no request is refused
            pass

    run_virtually(main())


@pytest.mark.parametrize(("num_answers", "left_s"), [(1, 2.5), (3, 4.5)])
def test_one_whose_turn_comes_too_late_is_not_begun(num_answers: int, left_s: float) -> None:
    """It has 0.5 s left for an answer that takes 1 s, or 2.5 s for three, one after the other."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission, begun = Admission(1, 10, loop.time), []

        async def late() -> None:
            async with HeldSlots(admission, SlotNeed(left_s=left_s, num_answers=num_answers)):
                begun.append(1)

        for _ in range(LEAST_HOLDS):
            async with HeldSlots(admission, SlotNeed()):
                await asyncio.sleep(1.0)
        async with HeldSlots(admission, SlotNeed()):
            waiting = asyncio.create_task(late())
            await asyncio.sleep(2.0)  # twice as long as was to be expected
        with pytest.raises(Overloaded, match="the request waited too long"):
            await waiting
        assert not begun and admission.num_shed == 1
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run_virtually(main())


@pytest.mark.parametrize(("left_s", "is_begun"), [(1.3, False), (1.7, True)])
def test_nor_one_with_too_little_for_what_many_take_longer(left_s: float, is_begun: bool) -> None:
    """Answers take 0.5 s or 1.5 s, equally often; at its turn it has more than the mean of 1 s
    left.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission, begun = Admission(1, 10, loop.time), []

        async def late() -> None:
            async with HeldSlots(admission, SlotNeed(left_s=2.0 + left_s)):
                begun.append(1)

        for hold_s in (0.5, 1.5) * LEAST_HOLDS:
            async with HeldSlots(admission, SlotNeed()):
                await asyncio.sleep(hold_s)
        async with HeldSlots(admission, SlotNeed()):
            waiting = asyncio.create_task(late())
            await asyncio.sleep(2.0)
        await asyncio.gather(waiting, return_exceptions=True)
        assert bool(begun) is is_begun
        assert admission.num_shed == (not is_begun)

    run_virtually(main())


def test_a_request_has_to_wait_for_its_last_answer() -> None:
    """Two slots of three are free, holds take 1 s."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(3, 10, loop.time)
        for _ in range(LEAST_HOLDS):
            async with HeldSlots(admission, SlotNeed()):
                await asyncio.sleep(1.0)
        async with HeldSlots(admission, SlotNeed()):
            admission.check(SlotNeed(num_answers=2, left_s=0.5))  # no request has to wait
            admission.check(SlotNeed(num_answers=5, left_s=2.1))
            with pytest.raises(Overloaded, match=r"0 requests wait .* 5 answers, .* about 0\.1 s"):
                admission.check(SlotNeed(num_answers=5, left_s=1.9))
            async with HeldSlots(admission, SlotNeed(num_answers=5)):  # 6 in 3 slots
                with pytest.raises(Overloaded, match=r"about 0\.1 s after"):
                    admission.check(SlotNeed(left_s=2.23))
                admission.check(SlotNeed(left_s=2.34))

    run_virtually(main())


def test_only_those_who_go_first_count_as_ahead() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(1, 10, loop.time)
        for _ in range(LEAST_HOLDS):
            async with HeldSlots(admission, SlotNeed()):
                await asyncio.sleep(1.0)

        async def wait() -> None:
            async with HeldSlots(admission, SlotNeed(place=5.0)):
                pass

        async with HeldSlots(admission, SlotNeed()):
            waiting = [asyncio.create_task(wait()) for _ in range(4)]
            await asyncio.sleep(0)
            admission.check(SlotNeed(place=4.0, left_s=2.5))
            with pytest.raises(Overloaded, match="4 requests wait ahead of it"):
                admission.check(SlotNeed(place=5.0, left_s=2.5))
            # Of another tenant's it is one, by turns.
            admission.check(SlotNeed(place=5.0, tenant="other", left_s=3.5))
        await asyncio.gather(*waiting)

    run_virtually(main())
