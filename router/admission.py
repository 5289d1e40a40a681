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
from typing import Final

from effuse.client.params import Priority
from effuse.protos.errors import Overloaded
from effuse.router.fair_queue import FairQueue
from effuse.router.shedding import HoldTimes

LEAST_RETRY_S: Final = 0.1
"""What a request that was refused for its deadline is told to wait at least."""


def count_seats(seats: Sequence[int], most: int) -> int:
    """Requests that may run at once on live decode workers, each with so many seats for us, `most`
    at most. Without workers it is `most`: nobody should wait to be told that there are none."""
    return min(most, sum(seats)) if seats else most


AHEAD_S: Final[Mapping[Priority, float]] = {"low": -30.0, "normal": 0.0, "high": 30.0}
"""By how much earlier a class counts as having come. So waiting makes up for any class, and whoever
waits for the difference goes before all of its tenant that come then."""


def place_of(arrived: float, priority: Priority) -> float:
    """The place in the queue of a request that arrived then: the time at which it counts as having
    come."""
    return arrived - AHEAD_S[priority]


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
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
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
    async def slot(
        self, place: float = 0.0, tenant: str = "", *, left_s: float = math.inf, size: int = 1
    ) -> AsyncIterator[None]:
        """Holds a slot for a request of `size` tokens at most that has `left_s` seconds. Waits in
        the queue, before those of the same tenant of a larger `place`: the time of coming, or what
        counts as such. The caller bounds how long.

        Raises `Overloaded` before anything is held: at once, or as it waits, where the queue is
        full and another tenant has less in it, or where its deadline cannot be met any more."""
        self.check(place, tenant, left_s=left_s, size=size)
        deadline = self._now() + left_s
        has_waited = await self._take_slot(place, tenant, size)
        began, is_answered = self._now(), False
        try:
            if has_waited:
                self._check_turn(deadline - began, size)
            yield
            is_answered = True
        finally:
            self.holds.add(self._now() - began, size, is_answered=is_answered)
            self._free_slot()

    def check(
        self, place: float = 0.0, tenant: str = "", *, left_s: float = math.inf, size: int = 1
    ) -> None:
        """Raises where a request of `size` tokens at most that has `left_s` seconds would be
        refused now; costs nothing."""
        if self._running < self.max_running and not self._waiting:
            return
        if len(self._waiting) >= self.max_waiting and not self._may_displace(tenant):
            raise self._refusal()
        ahead = self._waiting.num_before(tenant, place)
        late_s = self.holds.late_s(left_s, size, ahead, self.max_running)
        if late_s > 0:
            raise self._shed(f"{ahead} requests wait before it", left_s, late_s)

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

    async def _take_slot(self, place: float, tenant: str, size: int) -> bool:
        """Whether it had to wait for it."""
        if self._running < self.max_running and not self._waiting:
            self._running += 1
            return False
        if len(self._waiting) >= self.max_waiting and self._may_displace(tenant):
            refused = self._waiting.pop_last(self._waiting.longest())
            if not refused.done():
                refused.set_exception(self._refusal())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, size, turn, place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free_slot()  # its turn came in the same moment
            else:
                self._waiting.remove(tenant, turn)
            raise
        return True

    def _free_slot(self) -> None:
        """Frees a slot, for who is next."""
        self._running -= 1
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting and self._running < self.max_running:
            turn = self._waiting.pop()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
