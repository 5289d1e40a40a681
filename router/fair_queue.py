"""Turns among tenants, by tokens: what waits in the router's queue, and whose comes next.

Pure: no I/O and no clock. Not here: how long the queue may be, and who need not wait in it
(`admission.py`).
"""

from __future__ import annotations

from bisect import insort
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
    count: int = field(compare=False)
    item: Item = field(compare=False)


@dataclass(slots=True)
class _Line(Generic[Item]):
    """What one tenant waits with, the next one first, what that counts as, and tokens that it has
    saved."""

    waiting: list[_Entry[Item]] = field(default_factory=list)
    length: int = 0
    saved: int = 0


class FairQueue(Generic[Item]):
    """Items of tenants, each with what it costs in tokens, and counted as one or several.

    Each tenant in turn may spend `QUANTUM` tokens, and saves what is left of them while it waits,
    so that all get the same share of tokens however many requests each has, and however long they
    are. M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", 1996.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}  # none is empty
        self._turns: deque[str] = deque()  # the tenant whose turn it is stands first
        self._size = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._size

    def length_of(self, tenant: str) -> int:
        """What one tenant's items count as."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.length

    def count_beyond(self, most: int) -> int:
        """What items count as beyond `most` of each tenant."""
        return sum(max(0, line.length - most) for line in self._lines.values())

    def ahead_of(self, tenant: str, place: float, count: int = 1) -> int:
        """What the items count as that would be taken out before another one, where all cost as
        they count: those of its tenant with no larger place, and of each other tenant as many and
        as many as the other one counts."""
        line = self._lines.get(tenant)
        before = () if line is None else line.waiting
        own = sum(entry.count for entry in before if entry.place <= place)
        others = (one.length for name, one in self._lines.items() if name != tenant)
        return own + sum(min(length, own + count) for length in others)

    def longest(self) -> str:
        """The tenant with most in it; of an empty queue there is none (ValueError)."""
        return max(self._lines, key=self.length_of)

    def push(self, tenant: str, cost: int, item: Item, place: float = 0.0, count: int = 1) -> None:
        """Adds an item behind those of its tenant that have no larger place; one that costs less
        than a token costs one."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self._turns.append(tenant)
        self._num_pushed += 1
        insort(line.waiting, _Entry(place, self._num_pushed, max(1, cost), count, item))
        line.length += count
        self._size += count

    def pop(self) -> Item:
        """Takes out the item that is next. Raises IndexError where there is none."""
        while True:
            tenant = self._turns[0]
            line = self._lines[tenant]
            first = line.waiting[0]
            if first.cost <= line.saved:
                line.saved -= first.cost
                del line.waiting[0]
                self._forget(tenant, first)
                return first.item
            line.saved += QUANTUM
            self._turns.rotate(-1)

    def pop_last(self, tenant: str) -> Item:
        """Takes out what stands last of a tenant's. Raises KeyError where it has nothing."""
        entry = self._lines[tenant].waiting.pop()
        self._forget(tenant, entry)
        return entry.item

    def remove(self, tenant: str, item: Item) -> None:
        """Takes out one item of a tenant, if it is there."""
        line = self._lines.get(tenant)
        for entry in () if line is None else tuple(line.waiting):
            if entry.item is item:
                assert line is not None
                line.waiting.remove(entry)
                self._forget(tenant, entry)
                return

    def _forget(self, tenant: str, gone: _Entry[Item]) -> None:
        """An item has gone. Who has nothing to wait for saves nothing."""
        self._size -= gone.count
        self._lines[tenant].length -= gone.count
        if not self._lines[tenant].waiting:
            del self._lines[tenant]
            self._turns.remove(tenant)
