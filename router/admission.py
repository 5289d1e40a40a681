"""Who may run now, who waits, who is refused: a bounded queue in front of the fleet.

As many requests run at once as live decode workers have seats, within a limit. What is beyond that
waits here, where it holds nothing and has its turn with any worker, and not in the queue of one of
them; first come, first served, but for what a request's class adds to its waiting, and tenants by
turns (`fair_queue.py`). A waiting request is bounded by its own deadline. Not here: where a request
goes (`policy.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from effuse.client.params import Priority
from effuse.protos.errors import Overloaded
from effuse.router.fair_queue import FairQueue


def count_seats(seats: Sequence[int], most: int) -> int:
    """Requests that may run at once on live decode workers, each with so many seats for us, `most`
    at most. Without workers it is `most`: nobody should wait to be told that there are none."""
    return min(most, sum(seats)) if seats else most


AHEAD_S: Final[Mapping[Priority, float]] = {"low": -30.0, "normal": 0.0, "high": 30.0}
"""By how much earlier a class counts as having come. So waiting makes up for any class, and whoever
waits for the difference goes before all of its tenant that come then."""


class Admission:
    """`max_running` requests at once, `most_running` at most; `max_waiting` behind them, those of a
    tenant by their places."""

    def __init__(self, most_running: int, max_waiting: int) -> None:
        self.most_running = most_running
        self.max_running = most_running
        self.max_waiting = max_waiting
        self.knows_seats = False  # of a live decode worker
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
        self, place: float = 0.0, tenant: str = "", cost: int = 1
    ) -> AsyncIterator[None]:
        """Holds a slot, for a request of `cost` tokens. Waits in the queue, before those of the
        same tenant of a larger `place`: the time of coming, or what counts as such. The caller
        bounds how long.

        Raises `Overloaded` at once, before anything is held, or as it waits, where the queue is
        full and another tenant has less in it."""
        self.check(tenant)
        await self._take_slot(place, tenant, cost)
        try:
            yield
        finally:
            self._free_slot()

    def check(self, tenant: str = "") -> None:
        """Raises where a request of `tenant` would be refused now; costs nothing."""
        if self._running < self.max_running or len(self._waiting) < self.max_waiting:
            return
        if not self._may_displace(tenant):
            raise self._refusal()

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

    async def _take_slot(self, place: float, tenant: str, cost: int) -> None:
        if self._running < self.max_running and not self._waiting:
            self._running += 1
            return
        if len(self._waiting) >= self.max_waiting and self._may_displace(tenant):
            refused = self._waiting.pop_last(self._waiting.longest())
            if not refused.done():
                refused.set_exception(self._refusal())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, cost, turn, place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free_slot()  # its turn came in the same moment
            else:
                self._waiting.remove(tenant, turn)
            raise

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
