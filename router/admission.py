"""Who may run now, who waits, who is refused: a bounded queue in front of the fleet.

As many requests run at once as live decode workers have seats, within a limit. What is beyond that
waits here, where it holds nothing and has its turn with any worker, and not in the queue of one of
them; first come, first served, but for what a request's class adds to its waiting, and tenants by
turns (`fair_queue.py`). A waiting request is bounded by its own deadline, and refused where that
cannot be met (`shedding.py`). Not here: where a request goes (`policy.py`).
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
from effuse.router.fair_queue import FairQueue
from effuse.router.shedding import HoldTimes
from effuse.router.validation import Asked

LEAST_RETRY_S: Final = 0.1
"""What a request that was refused for its deadline is told to wait at least."""


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


class Admission:
    """`max_running` requests at once, `most_running` at most; `max_waiting` behind them, those of a
    tenant by their places. `now` is a monotonic clock in seconds."""

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
        """Slots that requests hold: one for each answer."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
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
    async def slot(self, need: SlotNeed = ANY) -> AsyncIterator[None]:
        """Holds a slot for each answer; it waits for one, and its answers wait for workers' seats
        by themselves. Waits in the queue, before those of the same tenant of a larger place; the
        caller bounds how long.

        Raises `Overloaded` before anything is held: at once; as it waits, where the queue is full
        and another tenant has less in it; at its turn, if its deadline cannot be met any more."""
        self.check(need)
        deadline = self._now() + need.left_s
        has_waited = await self._take_slot(need)
        began, is_answered = self._now(), False
        try:
            if has_waited:
                self._check_turn(deadline - began, need.size)
            yield
            is_answered = True
        finally:
            self.holds.add(self._now() - began, need.size, is_answered=is_answered)
            self._free_slots(need.num_answers)

    def check(self, need: SlotNeed = ANY) -> None:
        """Raises where a request would be refused now; costs nothing."""
        if self._running < self.max_running and not self._waiting:
            return
        is_full = self._running >= self.max_running and len(self._waiting) >= self.max_waiting
        if is_full and not self._may_displace(need.tenant):
            raise self._refusal()
        ahead = self._waiting.ahead_of(need.tenant, need.place)
        late_s = self.holds.late_s(need.left_s, need.size, ahead, self.max_running)
        if late_s > 0:
            raise self._shed(f"{ahead} requests wait before it", need.left_s, late_s)

    def _check_turn(self, left_s: float, size: int) -> None:
        """Raises where a request whose turn has come has too little time left for it."""
        late_s = self.holds.hold_s(size) - left_s
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

    def _may_displace(self, tenant: str) -> bool:
        """Whether another tenant has so much more in a full queue that its newest request is to
        give way."""
        if not self._waiting:
            return False
        waiting = self._waiting
        return waiting.length_of(waiting.longest()) > waiting.length_of(tenant) + 1

    async def _take_slot(self, need: SlotNeed) -> bool:
        """Whether it had to wait for it."""
        if self._running < self.max_running and not self._waiting:
            self._running += need.num_answers
            return False
        if len(self._waiting) >= self.max_waiting and self._may_displace(need.tenant):
            refused = self._waiting.pop_last(self._waiting.longest())
            if not refused.comes.done():
                refused.comes.set_exception(self._refusal())
        turn = Turn(asyncio.get_running_loop().create_future(), need.num_answers)
        self._waiting.push(need.tenant, need.size * need.num_answers, turn, need.place)
        try:
            await turn.comes
        except asyncio.CancelledError:
            comes = turn.comes
            if comes.done() and not comes.cancelled() and comes.exception() is None:
                self._free_slots(need.num_answers)  # its turn came in the same moment
            else:
                self._waiting.remove(need.tenant, turn)
            raise
        return True

    def _free_slots(self, count: int) -> None:
        """Frees slots, for who is next."""
        self._running -= count
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting and self._running < self.max_running:
            turn = self._waiting.pop()
            if not turn.comes.done():
                self._running += turn.num_answers
                turn.comes.set_result(None)
