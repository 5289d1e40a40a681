"""Who is next among tenants that wait: a queue for each, served by deficit round robin.

Each tenant in turn may spend `QUANTUM` tokens, and saves what is left of them while it waits, so
that all get the same share of tokens however many requests each has, and however long they are.
M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", 1996. A table
without I/O and without a clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

QUANTUM: Final = 256
"""Tokens that a tenant may spend in a turn: an answer of the length that is usual."""

Item = TypeVar("Item")


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
    """Items of tenants, each with what it costs in tokens."""

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

    def num_before(self, tenant: str, place: float) -> int:
        """Items that would be taken out before one of `tenant` at this place, if all cost the same:
        those of its own before it, and of each other tenant as many and one more, if it has them.
        """
        line = self._lines.get(tenant)
        own = 0 if line is None else bisect_right(line.waiting, place, key=lambda one: one.place)
        others = (name for name in self._lines if name != tenant)
        return own + sum(min(self.length_of(name), own + 1) for name in others)

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
