"""Who may run now, who waits, who is refused: a bounded queue in front of the fleet.

As many requests run at once as live decode workers have seats, within a limit; one for several
answers counts as often as it has answers. What is beyond that waits here, where it holds nothing
and has its turn with any worker, and not in the queue of one of them; first come, first served, but
for what a request's class adds to its waiting, and tenants by turns (`fair_queue.py`). A
waiting request is bounded by its own deadline, and refused where that cannot be met (`HoldTimes`).
Not here: where a request goes (`policy.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from effuse.client.params import Priority
from effuse.protos.errors import Overloaded
from effuse.router.tenants import FairQueue
from effuse.router.validation import Asked

LEAST_RETRY_S: Final = 0.1
"""What a request that was refused for its deadline is told to wait at least."""
LEAST_HOLDS: Final = 8
"""Ended requests without which nothing is predicted."""

GAIN: Final = 1 / 16
"""Weight of the latest hold: the last thirty or so count, through which a fleet's pace changes."""

MARGIN: Final = 2.0
"""Mean deviations that a request is given beyond the mean hold, as half of them take longer: few
are refused for it, and nearly all that are let in are answered."""
TURN_MARGIN: Final = 1.0
"""The same at its turn. Where too little is left for more than every other answer, whoever is next
makes more of the slot."""


def count_seats(seats: Sequence[int], most: int) -> int:
    """Requests that may run at once on live decode workers, each with so many seats for us, `most`
    at most. Without workers it is `most`: nobody should wait to be told that there are none."""
    return min(most, sum(seats)) if seats else most


AHEAD_S: Final[Mapping[Priority, float]] = {"low": -30.0, "normal": 0.0, "high": 30.0}
"""By how much earlier a class counts as having come. So waiting makes up for any class, and whoever
waits for the difference goes before all of its tenant that come then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNeed:
    """What a request needs a slot for."""

    place: float = 0.0  # the time of coming, or what counts as such; smaller ones go first
    tenant: str = ""
    size: int = 1  # tokens of an answer at most
    num_answers: int = 1  # seats, of which it waits for the first alone
    left_s: float = math.inf  # until its deadline

    @classmethod
    def of(cls, asked: Asked, tenant: str, arrived: float, left_s: float) -> SlotNeed:
        """That of a client's request, which counts as having come earlier or later by its class."""
        place = arrived - AHEAD_S[asked.priority]
        return cls(
            place=place,
            tenant=tenant,
            size=asked.most_tokens,
            num_answers=asked.num_answers,
            left_s=left_s,
        )


ANY: Final = SlotNeed()
"""A request that takes whatever time there is."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request in the queue."""

    comes: asyncio.Future[None]
    num_answers: int


class HeldSlots:
    """Those of an admitted request: one for each of its answers that has not ended."""

    def __init__(self, admission: Admission, need: SlotNeed, began: float) -> None:
        self._admission = admission
        self._need = need
        self._began = began
        self._num_left = need.num_answers

    def end_answer(self, began: float, *, is_answered: bool = True) -> None:
        """Frees the slot of an answer that has ended. It had a seat since `began`, where it had to
        wait for one after the request was admitted."""
        self._num_left -= 1
        began = max(self._began, began)
        self._admission.end_answer(began, self._need.size, is_answered=is_answered)

    def end_all(self, *, is_answered: bool) -> None:
        """Frees what is left of them."""
        while self._num_left:
            self.end_answer(self._began, is_answered=is_answered)


class Admission:
    """`max_running` answers at once, `most_running` at most; `max_waiting` behind them, those of a
    tenant by their places. One free slot, or one free place in the queue, is enough for a request
    with all its answers: none is for ever too large. `now` is a monotonic clock in seconds."""

    def __init__(
        self, most_running: int, max_waiting: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_running = most_running
        self.max_running = most_running
        self.max_waiting = max_waiting
        self.knows_seats = False  # of a live decode worker
        self.holds = HoldTimes()
        self.num_shed = 0
        self._now = now
        self._running = 0
        self._waiting: FairQueue[Turn] = FairQueue()

    @property
    def num_running(self) -> int:
        """Slots that requests hold: one for each answer that has not ended."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Answers that requests in the queue are to have."""
        return len(self._waiting)

    def fit_seats(self, seats: Sequence[int]) -> None:
        """From now on as many at once as live decode workers have seats for us."""
        self.knows_seats = bool(seats)
        num_seats = count_seats(seats, self.most_running)
        if num_seats != self.max_running:
            self.resize(num_seats)

    def resize(self, max_running: int) -> None:
        """From now on `max_running` at once; what runs beyond it is left to end."""
        self.max_running = max_running
        self._admit_next()

    @asynccontextmanager
    async def slot(self, need: SlotNeed = ANY) -> AsyncIterator[HeldSlots]:
        """Holds a slot for each answer, until that has ended; it waits for one, and its answers
        wait for workers' seats by themselves. Waits in the queue, before those of the same tenant
        of a larger place; the caller bounds how long.

        Raises `Overloaded` before anything is held: at once; as it waits, where the queue is full
        and another tenant has less in it; at its turn, if its deadline cannot be met any more."""
        self.check(need)
        deadline = self._now() + need.left_s
        has_waited = await self._take_slot(need)
        began, is_answered = self._now(), False
        held = HeldSlots(self, need, began)
        try:
            if has_waited:
                self._check_turn(deadline - began, need.size)
            yield held
            is_answered = True
        finally:
            held.end_all(is_answered=is_answered)

    def end_answer(self, began: float, size: int, *, is_answered: bool) -> None:
        """Frees a slot, which an answer of this size has held since `began`, for who is next."""
        self.holds.add(self._now() - began, size, is_answered=is_answered)
        self._running -= 1
        self._admit_next()

    def check(self, need: SlotNeed = ANY) -> None:
        """Raises where a request would be refused now; costs nothing."""
        if self._running + need.num_answers <= self.max_running and not self._waiting:
            return
        if self._running >= self.max_running and not self._has_place(need):
            raise self._refusal()
        ahead = self._waiting.ahead_of(need.tenant, need.place, need.num_answers)
        behind = self._num_beyond() + ahead + need.num_answers
        late_s = self.holds.late_s(need.left_s, need.size, behind, self.max_running)
        if behind > 0 and late_s > 0:
            own = "" if need.num_answers == 1 else f" and it has {need.num_answers} answers"
            raise self._shed(f"{ahead} requests wait before it{own}", need.left_s, late_s)

    def _num_beyond(self) -> int:
        """Slots held beyond those that there are, by answers without a seat yet; below 0 as many
        are free."""
        return self._running - self.max_running

    def _check_turn(self, left_s: float, size: int) -> None:
        """Raises where a request whose turn has come has too little time left for it, or for the
        answers that wait for seats."""
        wait_s = self.holds.wait_s(self._num_beyond(), self.max_running)
        late_s = self.holds.hold_s(size, TURN_MARGIN) + wait_s - left_s
        if late_s > 0:
            raise self._shed("its turn came late", left_s, late_s)

    def _shed(self, why: str, left_s: float, late_s: float) -> Overloaded:
        self.num_shed += 1
        return Overloaded(
            f"{why}, and it would end some {late_s:.2g} s after its deadline, which is in "
            f"{left_s:.3g} s; try again later",
            retry_after_s=max(LEAST_RETRY_S, late_s),
        )

    def _refusal(self) -> Overloaded:
        return Overloaded(
            f"{self._running} requests are running and {len(self._waiting)} are waiting, which "
            "is all this router takes; try again later",
            retry_after_s=1.0,
        )

    def _has_place(self, need: SlotNeed) -> bool:
        """Whether the queue has a free place, or one once the newest requests of tenants that have
        more in it than this one would have give way."""
        too_many = len(self._waiting) + 1 - self.max_waiting
        most = self._waiting.length_of(need.tenant) + need.num_answers
        return too_many <= 0 or self._waiting.count_beyond(most) >= too_many

    async def _take_slot(self, need: SlotNeed) -> bool:
        """Whether it had to wait for it."""
        if self._running < self.max_running and not self._waiting:
            self._running += need.num_answers
            return False
        while self._waiting and len(self._waiting) >= self.max_waiting:
            refused = self._waiting.pop_last(self._waiting.longest())
            if not refused.comes.done():
                refused.comes.set_exception(self._refusal())
        turn = Turn(asyncio.get_running_loop().create_future(), need.num_answers)
        cost = need.size * need.num_answers
        self._waiting.push(need.tenant, cost, turn, need.place, need.num_answers)
        try:
            await turn.comes
        except asyncio.CancelledError:
            comes = turn.comes
            if comes.done() and not comes.cancelled() and comes.exception() is None:
                self._running -= need.num_answers  # its turn came in the same moment
                self._admit_next()
            else:
                self._waiting.remove(need.tenant, turn)
            raise
        return True

    def _admit_next(self) -> None:
        while self._waiting and self._running < self.max_running:
            turn = self._waiting.pop()
            if not turn.comes.done():
                self._running += turn.num_answers
                turn.comes.set_result(None)


class HoldTimes:
    """How long answers hold a slot, in seconds: mean and mean deviation, weighted as round-trip
    times are (RFC 6298), and what size, the most tokens of an answer, they have on average.

    What a fleet under too much load answers too late is work for nothing, and the more comes the
    more of it there is. So a request whose deadline cannot be met behind those that wait is refused
    at once (load shedding)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._size = 0.0

    def add(self, held_s: float, size: int, *, is_answered: bool) -> None:
        """Counts an answer that has left its slot. One that was broken off would have held it for
        longer, and says something only where it had it longer than most."""
        if not is_answered and held_s <= self._mean_s:
            return
        self._count += 1
        gain = max(GAIN, 1 / self._count)  # the first ones count alike
        off_s = held_s - self._mean_s
        if self._count > 1:
            self._deviation_s += gain * (abs(off_s) - self._deviation_s)
        self._mean_s += gain * off_s
        self._size += gain * (size - self._size)

    @property
    def is_known(self) -> bool:
        """Whether enough requests have ended."""
        return self._count >= LEAST_HOLDS

    def hold_s(self, size: int, margin: float = 0.0) -> float:
        """How long an answer of this size may hold its slot, `margin` deviations beyond the mean.
        A smaller one takes less time; a larger one need not take more, as answers may end early."""
        if not self.is_known:
            return 0.0
        return min(1.0, size / max(1.0, self._size)) * (self._mean_s + margin * self._deviation_s)

    def wait_s(self, num: int, slots: int) -> float:
        """How long it takes until so many busy slots have become free."""
        return max(0, num) * self._mean_s / max(1, slots) if self.is_known else 0.0

    def late_s(self, left_s: float, size: int, num: int, slots: int) -> float:
        """By how much a request that has `left_s` seconds would be late, whose last answer begins
        once `num` busy slots have become free; 0 or less where it is in time."""
        return self.wait_s(num, slots) + self.hold_s(size, MARGIN) - left_s
