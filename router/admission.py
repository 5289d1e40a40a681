"""Who may run now, who waits, who is refused: a bounded queue in front of the fleet.

As many requests run at once as live decode workers have seats, within a limit. What is beyond that
waits here, where it holds nothing and has its turn with any worker, and not in the queue of one of
them; first come, first served, but for what a request's class adds to its waiting, and tenants by
turns (`FairQueue`). A waiting request is bounded by its own deadline, and refused where that
cannot be met (`HoldTimes`). Not here: where a request goes (`policy.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from effuse.client.params import Priority
from effuse.protos.errors import Overloaded
from effuse.router.validation import Asked

LEAST_RETRY_S: Final = 0.1
"""What a request that was refused for its deadline is told to wait at least."""
QUANTUM: Final = 256
"""Tokens that a tenant may spend in a turn: an answer of the length that is usual."""

Item = TypeVar("Item")
LEAST_HOLDS: Final = 8
"""Ended requests without which nothing is predicted."""

GAIN: Final = 1 / 16
"""Weight of the latest hold: the last thirty or so count, through which a fleet's pace changes."""

MARGIN: Final = 2.0
"""Mean deviations that a request is given beyond the mean hold, as half of them take longer: few
are refused for it, and nearly all that are let in are answered."""


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


@dataclass(frozen=True, slots=True, order=True)
class _Entry(Generic[Item]):
    """One item of a line, in its order."""

    place: float
    number: int  # first come, first served among equals
    cost: int = field(compare=False)
    item: Item = field(compare=False)


@dataclass(slots=True)
class _Line(Generic[Item]):
    """What one tenant waits with, the next one first, and tokens that it has saved."""

    waiting: list[_Entry[Item]] = field(default_factory=list)
    saved: int = 0


class FairQueue(Generic[Item]):
    """Items of tenants, each with what it costs in tokens.

    Each tenant in turn may spend `QUANTUM` tokens, and saves what is left of them while it waits,
    so that all get the same share of tokens however many requests each has, and however long they
    are. M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", 1996. No
    I/O and no clock.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}  # none is empty
        self._turns: deque[str] = deque()  # the tenant whose turn it is stands first
        self._size = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._size

    def length_of(self, tenant: str) -> int:
        """Items of one tenant."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.waiting)

    def ahead_of(self, tenant: str, place: float) -> int:
        """Items that would be taken out before another one, where all cost the same: those of its
        tenant with no larger place, and of each other tenant as many and one."""
        line = self._lines.get(tenant)
        own = 0 if line is None else sum(entry.place <= place for entry in line.waiting)
        others = (len(one.waiting) for name, one in self._lines.items() if name != tenant)
        return own + sum(min(count, own + 1) for count in others)

    def longest(self) -> str:
        """The tenant with most items; of an empty queue there is none (ValueError)."""
        return max(self._lines, key=self.length_of)

    def push(self, tenant: str, cost: int, item: Item, place: float = 0.0) -> None:
        """Adds an item behind those of its tenant that have no larger place; one that costs less
        than a token costs one."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self._turns.append(tenant)
        self._num_pushed += 1
        insort(line.waiting, _Entry(place, self._num_pushed, max(1, cost), item))
        self._size += 1

    def pop(self) -> Item:
        """Takes out the item that is next. Raises IndexError where there is none."""
        while True:
            tenant = self._turns[0]
            line = self._lines[tenant]
            first = line.waiting[0]
            if first.cost <= line.saved:
                line.saved -= first.cost
                del line.waiting[0]
                self._forget_if_empty(tenant)
                return first.item
            line.saved += QUANTUM
            self._turns.rotate(-1)

    def pop_last(self, tenant: str) -> Item:
        """Takes out what stands last of a tenant's. Raises KeyError where it has nothing."""
        entry = self._lines[tenant].waiting.pop()
        self._forget_if_empty(tenant)
        return entry.item

    def remove(self, tenant: str, item: Item) -> None:
        """Takes out one item of a tenant, if it is there."""
        line = self._lines.get(tenant)
        for entry in () if line is None else tuple(line.waiting):
            if entry.item is item:
                assert line is not None
                line.waiting.remove(entry)
                self._forget_if_empty(tenant)
                return

    def _forget_if_empty(self, tenant: str) -> None:
        """An item has gone. Who has nothing to wait for saves nothing."""
        self._size -= 1
        if not self._lines[tenant].waiting:
            del self._lines[tenant]
            self._turns.remove(tenant)


class HoldTimes:
    """How long requests hold a slot, in seconds: mean and mean deviation, weighted as round-trip
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
        """Counts a request that has left its slot. One that was broken off would have held it for
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
        """How long a request of this size may hold its slot, `margin` deviations beyond the mean.
        A smaller one takes less time; a larger one need not take more, as answers may end early."""
        if not self.is_known:
            return 0.0
        return min(1.0, size / max(1.0, self._size)) * (self._mean_s + margin * self._deviation_s)

    def wait_s(self, ahead: int, slots: int) -> float:
        """How long it takes until `ahead` others and one more have got one of the busy slots."""
        return (ahead + 1) * self._mean_s / max(1, slots) if self.is_known else 0.0

    def late_s(self, left_s: float, size: int, ahead: int, slots: int) -> float:
        """By how much a request that has `left_s` seconds and as many others ahead of it would be
        late; 0 or less where it is in time."""
        return self.wait_s(ahead, slots) + self.hold_s(size, MARGIN) - left_s
