"""Models of one fleet in the queue: each waits for its own workers, all share its places."""

from __future__ import annotations

import asyncio
import random

import pytest

from effuse.protos.errors import Overloaded
from effuse.router.admission import LEAST_HOLDS, Admission, HeldSlots, SlotNeed


async def hold(admission: Admission, release: asyncio.Event, order: list[str], model: str) -> None:
    async with HeldSlots(admission, SlotNeed(model=model)):
        order.append(model)
        await release.wait()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_models_wait_for_their_own_workers() -> None:
    async def main() -> None:
        admission, release, order = Admission(8, 4), asyncio.Event(), list[str]()

        admission.fit_seats({"busy": [1, 1], "idle": [1]})
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(hold(admission, release, order, "busy"))
            await turns()
            group.create_task(hold(admission, release, order, "idle"))
            await turns()
            assert order == ["busy", "busy", "idle"]
            assert admission.running_by_model() == {"busy": 2, "idle": 1}
            assert admission.waiting_by_model() == {"busy": 3, "idle": 0}
            assert (admission.num_running, admission.num_waiting) == (3, 3)
            assert admission.max_running == 3
            release.set()
        assert len(order) == 6
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(main())


def test_one_model_leaves_places_in_the_queue_to_another() -> None:
    async def main() -> None:
        admission, release, order = Admission(8, 3), asyncio.Event(), list[str]()

        admission.fit_seats({"busy": [1], "other": [1]})
        async with asyncio.TaskGroup() as group:
            busy = [asyncio.create_task(hold(admission, release, order, "busy")) for _ in range(4)]
            group.create_task(hold(admission, release, order, "other"))
            await turns()
            with pytest.raises(Overloaded):
                admission.check(SlotNeed(model="busy"))
            group.create_task(hold(admission, release, order, "other"))
            await turns()
            assert admission.waiting_by_model() == {"busy": 2, "other": 1}
            with pytest.raises(Overloaded):
                await busy[-1]
            release.set()
            await asyncio.gather(*busy[:-1])
        assert sorted(order) == ["busy"] * 3 + ["other"] * 2

    asyncio.run(main())


def test_within_the_limit_for_all_the_model_that_has_least_is_next() -> None:
    async def main() -> None:
        admission, order = Admission(4, 9), list[str]()
        releases = [asyncio.Event() for _ in range(8)]

        admission.fit_seats({"busy": [8], "other": [8]})
        async with asyncio.TaskGroup() as group:
            for model, release in zip(["busy"] * 6 + ["other"] * 2, releases, strict=True):
                group.create_task(hold(admission, release, order, model))
            await turns()
            assert order == ["busy"] * 4
            for release in releases[:2]:
                release.set()
                await turns()
            assert order == ["busy"] * 4 + ["other"] * 2
            for release in releases:
                release.set()
        assert admission.num_running == 0

    asyncio.run(main())


def test_requests_of_a_model_without_workers_wait_in_the_queue_and_hold_no_slot() -> None:
    async def main() -> None:
        admission, release, order = Admission(8, 9), asyncio.Event(), list[str]()

        admission.fit_seats({"lost": [2], "well": [3]})
        admission.fit_seats({"well": [3]})
        async with asyncio.TaskGroup() as group:
            for model in ["well"] * 3 + ["lost"] * 9:
                group.create_task(hold(admission, release, order, model))
            await turns()
            assert admission.running_by_model() == {"lost": 0, "well": 3}
            assert admission.num_waiting == 9, "and one that comes beyond it is refused"
            admission.fit_seats({"lost": [2], "well": [3]})
            await turns()
            assert admission.running_by_model() == {"lost": 2, "well": 3}
            release.set()

    asyncio.run(main())


def test_two_models_without_workers_leave_others_their_seats_too() -> None:
    async def main() -> None:
        admission, release, order = Admission(8, 19), asyncio.Event(), list[str]()

        admission.fit_seats({"lost": [2], "gone": [2], "well": [3]})
        admission.fit_seats({"well": [3]})
        async with asyncio.TaskGroup() as group:
            for model in ["lost"] * 6 + ["gone"] * 4 + ["well"] * 4:
                group.create_task(hold(admission, release, order, model))
            await turns()
            assert admission.running_by_model() == {"lost": 0, "gone": 0, "well": 3}
            admission.fit_seats({"lost": [2], "gone": [2], "well": [3]})
            release.set()
        assert sorted(order) == ["gone"] * 4 + ["lost"] * 6 + ["well"] * 4

    asyncio.run(main())


def test_who_waits_for_a_prompt_to_be_computed_lacks_no_seat() -> None:
    """A decode worker prefills few prompts at a time: its seats may still be free."""
    admission = Admission(8, 9)
    admission.fit_seats({"one": [4]})
    with admission.without_seat("one"), admission.without_seat("one"):
        for running, lacking in ((4, 0), (5, 1), (7, 2)):
            admission.slots_of("one").running = running
            assert admission.lacking_by_model() == {"one": lacking}
    assert admission.lacking_by_model() == {"one": 0}


def test_what_is_known_of_one_model_says_nothing_of_another() -> None:
    admission = Admission(8, 9)
    admission.fit_seats({"slow": [1], "fast": [1]})
    for _ in range(LEAST_HOLDS):
        admission.slots_of("slow").holds.add(60.0, 1, is_answered=True)
    admission.slots_of("slow").running = admission.slots_of("fast").running = 1
    with pytest.raises(Overloaded, match="after its deadline"):
        admission.check(SlotNeed(model="slow", left_s=5.0))
    admission.check(SlotNeed(model="fast", left_s=5.0))
    admission.check(SlotNeed(model="of which nobody has heard", left_s=5.0))
    assert admission.only_model == ""


def test_whatever_comes_no_slot_or_place_is_lost_between_models() -> None:
    """Requests of three models and tenants, cancelled, refused and admitted as seats change."""

    async def main() -> None:
        draw = random.Random(5)
        for _ in range(150):
            admission, release = Admission(draw.randint(1, 6), draw.randint(0, 6)), asyncio.Event()

            async def one(
                need: SlotNeed, admission: Admission = admission, release: asyncio.Event = release
            ) -> None:
                async with HeldSlots(admission, need):
                    await release.wait()

            tasks = []
            for _ in range(40):
                action = draw.choice(["ask", "ask", "cancel", "seats", "turn"])
                model, tenant = draw.choice("abc"), draw.choice("xyz")
                if action == "ask":
                    need = SlotNeed(model=model, tenant=tenant, num_answers=draw.randint(1, 3))
                    tasks.append(asyncio.create_task(one(need)))
                elif action == "cancel" and tasks:
                    draw.choice(tasks).cancel()
                elif action == "seats":
                    models = draw.sample("abc", draw.randint(0, 3))
                    admission.fit_seats({name: [draw.randint(0, 3)] for name in models})
                else:
                    await turns(draw.randint(1, 4))
                assert admission.num_running == sum(admission.running_by_model().values())
                assert admission.num_waiting == sum(admission.waiting_by_model().values())
                if not tasks:
                    continue
                free = admission.num_running < admission.most_running
                for name, waiting in admission.waiting_by_model().items():
                    slots = admission.slots_of(name)
                    has_free = slots.running < slots.max_running
                    assert not (waiting and free and has_free), name
            admission.fit_seats({name: [9] for name in "abc"})
            release.set()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, Overloaded | asyncio.CancelledError | None) for end in ends)
            assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(main())
