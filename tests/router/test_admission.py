"""The queue in front of the fleet: bounded, in order, and exact when turns meet cancellations."""

from __future__ import annotations

import asyncio
import random

import pytest

from effuse.config.decoding import Priority
from effuse.protos.errors import Overloaded
from effuse.router.admission import AHEAD_S, Admission, HeldSlots, SlotNeed


async def hold(
    admission: Admission, release: asyncio.Event, order: list[int], at: int, place: float = 0.0
) -> None:
    async with HeldSlots(admission, SlotNeed(place=place)):
        order.append(at)
        await release.wait()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_first_come_first_served_and_bounded() -> None:
    async def main() -> None:
        admission, release, order = Admission(2, 3), asyncio.Event(), list[int]()
        async with asyncio.TaskGroup() as group:
            for at in range(5):
                group.create_task(hold(admission, release, order, at))
            await turns()
            assert (order, admission.num_running, admission.num_waiting) == ([0, 1], 2, 3)
            with pytest.raises(Overloaded, match="2 requests are running and 3") as caught:
                async with HeldSlots(admission, SlotNeed()):
                    pass
            assert caught.value.retry_after_s
            release.set()
        assert order == [0, 1, 2, 3, 4]
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(main())


def test_a_queue_of_none() -> None:
    async def main() -> None:
        admission = Admission(1, 0)
        async with HeldSlots(admission, SlotNeed()):
            with pytest.raises(Overloaded):
                admission.check(SlotNeed())
        async with HeldSlots(admission, SlotNeed()):
            pass

    asyncio.run(main())


def test_a_deadline_in_the_queue_gives_the_place_back() -> None:
    async def main() -> None:
        admission, release = Admission(1, 1), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(admission, release, [], 0))
            await turns()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0), HeldSlots(admission, SlotNeed()):
                    pass
            assert admission.num_waiting == 0
            release.set()
        assert admission.num_running == 0

    asyncio.run(main())


def test_no_slot_is_lost_whenever_cancelled() -> None:
    async def main() -> None:
        draw = random.Random(3)
        for _ in range(300):
            admission, release = Admission(2, 8), asyncio.Event()
            tasks = [asyncio.create_task(hold(admission, release, [], at)) for at in range(8)]
            for _ in range(draw.randrange(12)):
                action = draw.choice(["cancel", "turn", "release"])
                if action == "cancel":
                    draw.choice(tasks).cancel()
                elif action == "turn":
                    await asyncio.sleep(0)
                else:
                    release.set()
            release.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(main())


def test_new_slots_go_to_those_who_wait_and_lost_ones_are_not_filled() -> None:
    async def main() -> None:
        admission, order = Admission(9, 9), list[int]()
        admission.fit_seats({"": [1]})
        releases = [asyncio.Event() for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            for at, release in enumerate(releases):
                group.create_task(hold(admission, release, order, at))
            await turns()
            admission.fit_seats({"": [3]})
            await turns()
            assert (order, admission.num_running) == ([0, 1, 2], 3)
            admission.fit_seats({"": [1]})
            for release in releases[:2]:
                release.set()
            await turns()
            assert (order, admission.num_running) == ([0, 1, 2], 1)
            releases[2].set()
            await turns()
            assert order == [0, 1, 2, 3]
            releases[3].set()
        assert admission.num_running == 0

    asyncio.run(main())


def test_a_class_is_ahead_by_seconds_of_waiting_and_nobody_is_starved() -> None:
    """A low request that arrives at 10 s counts as one that arrives at 40 s: later ones follow
    it.
    """
    come: list[tuple[Priority, float]] = [
        ("low", 10.0),
        ("normal", 12.0),
        ("high", 41.0),
        ("normal", 39.0),
        ("normal", 40.5),
    ]

    async def main() -> None:
        admission, release, order = Admission(1, 9), asyncio.Event(), list[int]()
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(admission, release, order, -1))
            await turns()
            for at, (name, when) in enumerate(come):
                group.create_task(hold(admission, release, order, at, when - AHEAD_S[name]))
            await turns()
            release.set()
        assert order == [-1, 2, 1, 3, 0, 4]

    asyncio.run(main())


def test_a_request_for_several_answers_waits_for_one_seat_and_counts_all() -> None:
    async def main() -> None:
        admission = Admission(2, 4)
        async with asyncio.TaskGroup() as group, HeldSlots(admission, SlotNeed()):
            release, order = asyncio.Event(), list[int]()

            async def several(at: int) -> None:
                async with HeldSlots(admission, SlotNeed(num_answers=3)):
                    order.append(at)
                    await release.wait()

            group.create_task(several(0))
            await turns()
            waiting = group.create_task(several(1))
            await turns()
            assert (order, admission.num_running, admission.num_waiting) == ([0], 4, 3)
            release.set()
            await turns()
            assert (order, admission.num_running) == ([0, 1], 1)
            assert waiting.done()
        assert admission.num_running == 0

    asyncio.run(main())


def test_an_answer_that_ends_makes_room_although_others_to_its_request_go_on() -> None:
    async def main() -> None:
        admission, release, order = Admission(2, 4), asyncio.Event(), list[int]()
        async with asyncio.TaskGroup() as group:
            async with HeldSlots(admission, SlotNeed(num_answers=3)) as slots:
                group.create_task(hold(admission, release, order, 1))
                await turns()
                slots.end_answer(0.0)  # whose seat is the third answer's
                await turns()
                assert (order, admission.num_running, admission.num_waiting) == ([], 2, 1)
                slots.end_answer(0.0)
                await turns()
                assert (order, admission.num_running, admission.num_waiting) == ([1], 2, 0)
            assert admission.num_running == 1
            release.set()
        assert admission.num_running == 0

    asyncio.run(main())


def test_a_queue_is_full_of_answers() -> None:
    async def main() -> None:
        admission, release, order = Admission(1, 4), asyncio.Event(), list[int]()

        async def wait(tenant: str, count: int, at: int) -> None:
            async with HeldSlots(admission, SlotNeed(tenant=tenant, num_answers=count)):
                order.append(at)

        async with asyncio.TaskGroup() as group:
            group.create_task(hold(admission, release, [], 0))
            await turns()
            group.create_task(wait("a", 3, 1))
            await turns()
            admission.check(SlotNeed(tenant="a", num_answers=3))  # one place is enough
            late = asyncio.create_task(wait("a", 3, 2))
            await turns()
            assert admission.num_waiting == 6
            with pytest.raises(Overloaded, match="1 request is running and 6 are waiting"):
                admission.check(SlotNeed(tenant="a"))
            with pytest.raises(Overloaded):  # it would have as many itself
                admission.check(SlotNeed(tenant="b", num_answers=4))
            # the newest request of the tenant with most gives way
            group.create_task(wait("b", 2, 3))
            await turns()
            with pytest.raises(Overloaded):
                await late
            assert admission.num_waiting == 5
            release.set()
        assert sorted(order) == [1, 3]

    asyncio.run(main())


def test_tenants_share_by_all_answers_that_they_ask_for() -> None:
    """Requests for four answers come once in four of those for one."""

    async def main() -> None:
        admission, release, order = Admission(1, 64), asyncio.Event(), list[int]()

        async def wait(num_answers: int) -> None:
            need = SlotNeed(tenant=f"{num_answers}", size=256, num_answers=num_answers)
            async with HeldSlots(admission, need):
                order.append(num_answers)

        async with asyncio.TaskGroup() as group:
            group.create_task(hold(admission, release, [], 0))
            await turns()
            for num_answers in (4,) * 2 + (1,) * 8:
                group.create_task(wait(num_answers))
            await turns()
            release.set()
        assert order in ([1, 1, 1, 4, 1, 1, 1, 1, 4, 1], [1, 1, 1, 1, 4, 1, 1, 1, 1, 4])

    asyncio.run(main())


def test_a_turn_that_comes_as_its_request_is_cancelled_is_given_back_whole() -> None:
    async def main() -> None:
        admission = Admission(1, 4)
        async with HeldSlots(admission, SlotNeed()):
            late = asyncio.create_task(_hold_three(admission))
            await turns()
        late.cancel()  # its turn has come in the same moment
        await asyncio.wait({late})
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(main())


async def _hold_three(admission: Admission) -> None:
    async with HeldSlots(admission, SlotNeed(num_answers=3)):
        await asyncio.Event().wait()
