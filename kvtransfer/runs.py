"""Free pages as maximal runs of consecutive ids, so that an allocation can stay in one piece.

Consecutive pages move as one piece: the cost of a transfer is per piece, not per byte.
"""

from __future__ import annotations


class FreeRuns:
    """A set of page ids kept as maximal runs; taking prefers the tightest run that fits."""

    def __init__(self, num_pages: int) -> None:
        self._length_at: dict[int, int] = {0: num_pages} if num_pages else {}
        self._start_of: dict[int, int] = {num_pages: 0} if num_pages else {}
        self._count = num_pages

    def __len__(self) -> int:
        return self._count

    def ids(self) -> list[int]:
        """Every free id, ascending."""
        return [
            i
            for start in sorted(self._length_at)
            for i in range(start, start + self._length_at[start])
        ]

    def take(self, count: int) -> list[int]:
        """Removes `count` ids: from the smallest run that fits, else from the longest ones."""
        assert 0 <= count <= self._count, (count, self._count)
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take_from(self._best(count - len(taken)), count - len(taken))
        return taken

    def give(self, page_id: int) -> None:
        """Returns one id, joining it with its neighbours."""
        start, end = page_id, page_id + 1
        if page_id in self._start_of:
            start = self._start_of.pop(page_id)
            del self._length_at[start]
        if end in self._length_at:
            length = self._length_at.pop(end)
            del self._start_of[end + length]
            end += length
        self._put(start, end)
        self._count += 1

    def _best(self, count: int) -> int:
        fitting = [(length, start) for start, length in self._length_at.items() if length >= count]
        if fitting:
            return min(fitting)[1]
        return min((-length, start) for start, length in self._length_at.items())[1]

    def _take_from(self, start: int, count: int) -> list[int]:
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        taken = min(count, length)
        if taken < length:
            self._put(start + taken, start + length)
        self._count -= taken
        return list(range(start, start + taken))

    def _put(self, start: int, end: int) -> None:
        self._length_at[start] = end - start
        self._start_of[end] = start
