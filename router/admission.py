"""Decides which requests run now, wait or are refused: a bounded queue in front of the fleet.

For each model as many answers run at once as its live decode workers have seats, within a limit for
all models. A request for several answers counts as often as it has answers. Other requests wait
here and hold nothing, so that any worker can take their turn. The one whose first block is due
first goes first, corrected by its priority, and tenants take turns (`tenants.py`). Requests wait
only for workers of their own model. A request waits until its own deadline at most, and is refused
if it cannot meet it (`HoldTimes`). A model without a live decode worker has no slots: its requests
wait until one is live, or until the router gives up (`give_up`). Not here: the choice of a worker
(`policy.py`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from effuse.config.decoding import Priority
from effuse.config.words import counted
from effuse.protos.errors import EffuseError, Overloaded
from effuse.router.tenants import FairQueue, Turn
from effuse.router.validation import Asked

LEAST_RETRY_S: Final = 0.1
"""The shortest time after which a request that was refused because of its deadline may be retried.
"""
TURN_MARGIN: Final = 1.0
"""The same at its turn. If less time is left than nearly every second answer takes, the next
request uses the slot better."""
LEAST_HOLDS: Final = 8
"""Ended requests without which nothing is predicted."""
GAIN: Final = 1 / 16
"""Weight of the latest hold: the last thirty or so count, through which a fleet's pace changes."""
MARGIN: Final = 2.0
"""Mean deviations that a request is given beyond the mean hold, as half of them take longer: few
are refused for it, and nearly all that are let in are answered."""
AHEAD_S: Final[Mapping[Priority, float]] = {"low": -30.0, "normal": 0.0, "high": 30.0}
"""By how much earlier the first block of a priority counts as due. So waiting makes up for any
priority: a request that has waited for the difference goes before all later ones of its tenant."""
LATEST_S: Final = 30.0
"""Seconds after arrival at which a first block is due at the latest, as far as the queue goes. So a
request with a lax objective, or with none, waits behind others for no longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNeed:
    model: str = ""  # the model of the workers
    place: float = 0.0  # when the first block is due, by priority; smaller ones go first
    tenant: str = ""
    size: int = 1  # tokens of an answer at most
    num_answers: int = 1  # seats; it waits only for the first one
    left_s: float = math.inf  # until its deadline

    @classmethod
    def of(cls, asked: Asked, tenant: str, arrived: float, left_s: float) -> SlotNeed:
        """That of a client's request; within a priority the earliest first block goes first."""
        place = arrived + min(LATEST_S, asked.goals.first_block_s) - AHEAD_S[asked.priority]
        return cls(
            model=asked.model.name,
            place=place,
            tenant=tenant,
            size=asked.most_tokens,
            num_answers=asked.num_answers,
            left_s=left_s,
        )


class HoldTimes:
    """How long answers hold a slot, in seconds: mean and mean deviation, weighted like round-trip
    times (RFC 6298), and their mean size, which is the most tokens of an answer.

    An answer that comes too late is wasted work, and an overloaded fleet gives more of them the
    more requests come. So a request that cannot meet its deadline behind those that wait is refused
    at once (load shedding)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._size = 0.0

    def add(self, held_s: float, size: int, *, is_answered: bool) -> None:
        """Counts an answer that has left its slot. One that was broken off would have held it for
        longer, and counts only if it held it longer than the mean."""
        if not is_answered and held_s <= self._mean_s:
            return
        self._count += 1
        gain = max(GAIN, 1 / self._count)  # the first ones have equal weights
        off_s = held_s - self._mean_s
        if self._count > 1:
            self._deviation_s += gain * (abs(off_s) - self._deviation_s)
        self._mean_s += gain * off_s
        self._size += gain * (size - self._size)

    def hold_s(self, size: int, margin: float = 0.0) -> float:
        """How long an answer of this size may hold its slot, `margin` deviations beyond the mean.
        A smaller one takes less time; a larger one need not take more, as answers may end early."""
        if self._count < LEAST_HOLDS:
            return 0.0
        return min(1.0, size / max(1.0, self._size)) * (self._mean_s + margin * self._deviation_s)

    def wait_s(self, num: int, slots: int) -> float:
        """How long it takes until so many busy slots have become free."""
        return max(0, num) * self._mean_s / max(1, slots) if self._count >= LEAST_HOLDS else 0.0

    def late_s(self, left_s: float, size: int, num: int, slots: int) -> float:
        """By how much a request with `left_s` seconds would be late, if its last answer begins once
        `num` busy slots have become free; 0 or less if it is in time."""
        return self.wait_s(num, slots) + self.hold_s(size, MARGIN) - left_s


class ModelSlots:
    """The slots of one model's workers: their number, those in use, and the requests that wait."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.pace = max_running  # the same, and while no worker is live that of the last ones
        self.running = 0
        self.waiting = FairQueue()
        self.without_seat = 0  # answers that hold a slot and wait; some only for a prefill worker
        self.holds = HoldTimes()


class HeldSlots:
    """Holds a slot for each answer to a request, within `async with`, until that has ended. Waits
    for one in the queue, before those of the same tenant of a larger place; the caller bounds how
    long. The answers wait for workers' seats by themselves.

    Raises `Overloaded` before anything is held: at once; as it waits, if the queue is full and
    another tenant has less in it; at its turn, if its deadline cannot be met any more."""

    def __init__(self, admission: Admission, need: SlotNeed) -> None:
        self._admission = admission
        self._need = need
        self._began = 0.0
        self._num_left = 0

    async def __aenter__(self) -> HeldSlots:
        self._began = await self._admission.take_slot(self._need)
        self._num_left = self._need.num_answers
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        while self._num_left:
            self.end_answer(self._began, is_answered=kind is None)

    def end_answer(self, began: float, *, is_answered: bool = True) -> None:
        """Frees the slot of an answer that has ended. It had a seat since `began`, if it waited for
        one after the request was admitted."""
        self._num_left -= 1
        began = max(self._began, began)
        self._admission.end_answer(began, self._need, is_answered=is_answered)


class Admission:
    """Answers of each model at once as its workers have seats, `most_running` at most of all;
    `max_waiting` behind them, those of a tenant by their places. One free slot, or one free place
    in the queue, is enough for a request with all its answers: none is ever too large. `now` is
    a monotonic clock in seconds."""

    def __init__(
        self,
        most_running: int,
        max_waiting: int,
        now: Callable[[], float] = time.monotonic,
        lacking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """lacking: is entered for each request that waits since its model has no live worker."""
        self.most_running = most_running
        self.max_waiting = max_waiting
        self.num_shed = 0
        self.num_running = 0  # slots that requests hold: one for each answer that has not ended
        self.num_waiting = 0  # answers that requests in the queue are to have
        self._now = now
        self._lacking = lacking
        self._models: dict[str, ModelSlots] = {}  # those that workers had so far
        self._num_early = 0  # requests in the queue whose model is not known yet
        self.knows_seats = False  # whether a decode worker is live
        # The one that decode workers serve, or did last; empty if there are none or several.
        self.only_model = ""
        self._seats_at_first = most_running  # of a model that no request has named before

    @property
    def max_running(self) -> int:
        seats = [slots.max_running for slots in self._models.values()]
        return min(self.most_running, sum(seats)) or self.most_running

    def running_by_model(self) -> dict[str, int]:
        return {name: slots.running for name, slots in tuple(self._models.items())}

    def waiting_by_model(self) -> dict[str, int]:
        """Answers that requests in the queue are to have; "" stands for a model not known yet."""
        early = {"": self._num_early} if self._num_early else {}
        return early | {name: len(slots.waiting) for name, slots in tuple(self._models.items())}

    @contextmanager
    def early(self) -> Iterator[None]:
        """A place in the queue, while this lasts, of a request that comes before any model is
        known. Raises `Overloaded` if no place is free."""
        if self.num_waiting >= self.max_waiting:
            raise self._refusal()
        self.num_waiting += 1
        self._num_early += 1
        try:
            yield
        finally:
            self.num_waiting -= 1
            self._num_early -= 1

    def lacking_by_model(self) -> dict[str, int]:
        """Answers that have no seat: those to requests in the queue, and those that found none."""
        return {
            name: len(one.waiting) + min(one.without_seat, max(0, one.running - one.max_running))
            for name, one in self._models.items()
        }

    @contextmanager
    def without_seat(self, model: str) -> Iterator[None]:
        """An answer that was admitted waits until another one has ended."""
        slots = self.slots_of(model)
        slots.without_seat += 1
        try:
            yield
        finally:
            slots.without_seat -= 1

    def slots_of(self, model: str) -> ModelSlots:
        """Those of one model. Before `fit_seats` was called a model has as many as all together."""
        slots = self._models.get(model)
        if slots is None:
            slots = self._models[model] = ModelSlots(self._seats_at_first)
        return slots

    def fit_seats(self, seats: Mapping[str, Sequence[int]]) -> bool:
        """From now on as many requests run at once as live decode workers of each model have seats
        for this router. Requests beyond that end by themselves. Returns whether that is a change.
        """
        self.knows_seats, self._seats_at_first = bool(seats), 0
        if seats:
            self.only_model = next(iter(seats)) if len(seats) == 1 else ""
        before = [one.max_running for one in self._models.values()]
        for model in self._models.keys() | seats.keys():
            slots = self.slots_of(model)
            slots.max_running = min(self.most_running, sum(seats.get(model, ())))
            slots.pace = slots.max_running or slots.pace
        is_changed = before != [one.max_running for one in self._models.values()]
        if is_changed:
            self._admit_next()
        return is_changed

    def give_up(self, model: str, since: float, error: Callable[[], EffuseError]) -> None:
        """Ends the wait of a model's requests in the queue that came at `since` or before; each of
        them raises an `error` of its own."""
        waiting = self.slots_of(model).waiting
        for turn in waiting.turns():
            if turn.since <= since and waiting.remove(turn):
                self._end_wait(turn, error())

    async def take_slot(self, need: SlotNeed) -> float:
        """Waits for a slot and takes one for each answer; returns when it did. Raises like
        `HeldSlots`."""
        self.check(need)
        deadline = self._now() + need.left_s
        if not await self._wait_for_slot(need):
            return self._now()
        began = self._now()
        slots, left_s = self.slots_of(need.model), deadline - began
        wait_s = slots.holds.wait_s(self._num_beyond(slots), slots.pace)
        late_s = slots.holds.hold_s(need.size, TURN_MARGIN) + wait_s - left_s
        if late_s > 0:  # too little is left for it, or for the answers that wait for seats
            for _ in range(need.num_answers):
                self.end_answer(began, need, is_answered=False)
            raise self._shed("the request waited too long", left_s, late_s)
        return began

    def end_answer(self, began: float, need: SlotNeed, *, is_answered: bool) -> None:
        """Frees a slot for the next request. An answer to this one has held it since `began`."""
        slots = self.slots_of(need.model)
        slots.holds.add(self._now() - began, need.size, is_answered=is_answered)
        self._count_running(slots, -1)
        self._admit_next()

    def check(self, need: SlotNeed) -> None:
        """Raises if a request would be refused now; costs nothing. Its model may be unknown."""
        slots = self._models.get(need.model) or ModelSlots(self._seats_at_first)
        if self._num_beyond(slots) + need.num_answers <= 0 and not slots.waiting:
            return
        # One place is free, or is once the newest requests of tenants that have more in the queue
        # for a model than this one would have give way.
        too_many = self.num_waiting + 1 - self.max_waiting
        if self._num_beyond(slots) >= 0 and too_many > 0:
            most = slots.waiting.length_of(need.tenant) + need.num_answers
            if sum(one.waiting.count_beyond(most) for one in self._models.values()) < too_many:
                raise self._refusal()
        ahead = slots.waiting.ahead_of(need.tenant, need.place, need.num_answers)
        behind = self._num_beyond(slots) + ahead + need.num_answers
        late_s = slots.holds.late_s(need.left_s, need.size, behind, slots.pace)
        if behind > 0 and late_s > 0:
            own = "" if need.num_answers == 1 else f" and it has {need.num_answers} answers"
            wait = "request waits" if ahead == 1 else "requests wait"
            raise self._shed(f"{ahead} {wait} ahead of it{own}", need.left_s, late_s)

    def _num_beyond(self, slots: ModelSlots) -> int:
        """Slots held beyond those that there are, by answers without a seat yet; below 0 as many
        are free."""
        return max(slots.running - slots.max_running, self.num_running - self.most_running)

    def _shed(self, why: str, left_s: float, late_s: float) -> Overloaded:
        self.num_shed += 1
        return Overloaded(
            f"{why}, so that it would end about {late_s:.2g} s after its deadline, which is in "
            f"{left_s:.3g} s; try again later",
            retry_after_s=max(LEAST_RETRY_S, late_s),
        )

    def _refusal(self) -> Overloaded:
        verbs = ["is" if one == 1 else "are" for one in (self.num_running, self.num_waiting)]
        running = f"{counted(self.num_running, 'request')} {verbs[0]} running"
        return Overloaded(
            f"{running} and {self.num_waiting} {verbs[1]} waiting, which is this router's limit; "
            "try again later",
            retry_after_s=1.0,
        )

    async def _wait_for_slot(self, need: SlotNeed) -> bool:
        """Whether it had to wait for it."""
        slots = self.slots_of(need.model)
        if self._num_beyond(slots) < 0 and not slots.waiting:
            self._count_running(slots, need.num_answers)
            return False
        while self.num_waiting and self.num_waiting >= self.max_waiting:
            # The newest request of the tenant that has most in the queue for a model gives way.
            full = [one.waiting for one in self._models.values() if one.waiting]
            waiting = max(full, key=lambda one: one.length_of(one.longest()))
            self._end_wait(waiting.pop_last(waiting.longest()), self._refusal())
        comes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cost = need.size * need.num_answers
        turn = Turn(need.tenant, cost, comes, need.place, need.num_answers, self._now())
        slots.waiting.push(turn)
        self.num_waiting += need.num_answers
        try:
            with nullcontext() if slots.max_running else self._lacking():
                await comes
        except asyncio.CancelledError:
            if comes.done() and not comes.cancelled() and comes.exception() is None:
                self._count_running(slots, -need.num_answers)  # its turn came in the same moment
                self._admit_next()
            elif slots.waiting.remove(turn):
                self.num_waiting -= need.num_answers
            raise
        return True

    def _end_wait(self, turn: Turn, error: EffuseError) -> None:
        self.num_waiting -= turn.num_answers
        if not turn.comes.done():
            turn.comes.set_exception(error)

    def _admit_next(self) -> None:
        """Gives free slots to those that wait: within the limit for all, first of the model that
        has least running."""
        models = self._models.values()
        while ready := [one for one in models if one.waiting and self._num_beyond(one) < 0]:
            slots = min(ready, key=lambda one: one.running)
            turn = slots.waiting.pop()
            self.num_waiting -= turn.num_answers
            if not turn.comes.done():
                self._count_running(slots, turn.num_answers)
                turn.comes.set_result(None)

    def _count_running(self, slots: ModelSlots, num_answers: int) -> None:
        slots.running += num_answers
        self.num_running += num_answers
