"""Owners of pages: states, generations and conservation of pages. No memory, no I/O.

A page into which a writer may still write is never free. It is quarantined until the writer is
fenced, that is, until it has finished, has acknowledged an abort, or is proven dead. A shared page
is free once its last reader has released it.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from enum import Enum, auto
from typing import Protocol

from effuse.kvtransfer.messages import PageRef


class PageState(Enum):
    FREE = auto()
    RESERVED = auto()  # held; no writer knows of it
    RECEIVING = auto()  # a remote writer may write at any time
    COMMITTED = auto()  # read by its holders; no remote writer is left
    QUARANTINED = auto()  # abandoned while a writer may still reach it


class PageEvent(Enum):
    RESERVE = auto()
    TAKE = auto()  # by a local writer
    OPEN = auto()  # to a remote writer
    COMMIT = auto()
    QUARANTINE = auto()
    FENCE = auto()  # the remote writer can write no more
    SHARE = auto()  # one more holder
    LEAVE = auto()  # one holder leaves, others remain
    RELEASE = auto()  # the last holder leaves


TRANSITIONS: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.RESERVE): PageState.RESERVED,
    (PageState.FREE, PageEvent.TAKE): PageState.COMMITTED,
    (PageState.RESERVED, PageEvent.OPEN): PageState.RECEIVING,
    (PageState.RESERVED, PageEvent.RELEASE): PageState.FREE,
    (PageState.RECEIVING, PageEvent.COMMIT): PageState.COMMITTED,
    (PageState.RECEIVING, PageEvent.QUARANTINE): PageState.QUARANTINED,
    (PageState.QUARANTINED, PageEvent.FENCE): PageState.FREE,
    (PageState.COMMITTED, PageEvent.SHARE): PageState.COMMITTED,
    (PageState.COMMITTED, PageEvent.LEAVE): PageState.COMMITTED,
    (PageState.COMMITTED, PageEvent.RELEASE): PageState.FREE,
}


class PageError(RuntimeError):
    """A bug with a page: an illegal transition, or a stale reference."""


class Spare(Protocol):
    """A holder of committed pages that evicts them when others need room."""

    @property
    def num_pages(self) -> int:
        """Pages that become free once it has given up all that it can."""

    @property
    def held(self) -> Container[int]:
        """Ids of all its pages. One is free for others once it is the only holder."""

    def give_up(self) -> Sequence[PageRef]:
        """Forgets some of these pages, the least useful ones, and returns them for release."""


class PagePool:
    """Pure accounting of `num_pages` pages. Not thread-safe: one engine thread owns it.

    `spare` pages count as free, and are taken once no others are left.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self.spare: Spare | None = None
        self._states = [PageState.FREE] * num_pages
        self._generations = [0] * num_pages
        # holders beyond the first; only of shared pages
        self._more_holders: Counter[int] = Counter()
        self._free = FreeRuns(num_pages)
        self._counts = Counter({PageState.FREE: num_pages})

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return self._counts[PageState.FREE] + (self.spare.num_pages if self.spare else 0)

    def count(self, state: PageState) -> int:
        return self._counts[state]

    def allocate(self, count: int) -> tuple[PageRef, ...] | None:
        """Reserves pages for a remote writer, in few runs; None if too few are free."""
        return self._enter(count, PageEvent.RESERVE)

    @property
    def num_lendable(self) -> int:
        """Pages that a rehearsal of a handoff may have: half of the free ones, or a pool's only
        one."""
        return self.num_free // 2 or int(self.num_free == self.num_pages)

    def allocate_committed(self, count: int) -> tuple[PageRef, ...] | None:
        """Takes pages that only this process writes; None if too few are free."""
        return self._enter(count, PageEvent.TAKE)

    def open(self, pages: Sequence[PageRef]) -> None:
        """A remote writer is about to receive these reserved pages."""
        self._apply(pages, PageEvent.OPEN)

    def commit(self, pages: Sequence[PageRef]) -> None:
        """The remote writer has finished and its bytes were verified."""
        self._apply(pages, PageEvent.COMMIT)

    def quarantine(self, pages: Sequence[PageRef]) -> None:
        """Abandons pages into which a remote writer may still write."""
        self._apply(pages, PageEvent.QUARANTINE)

    def fence(self, pages: Sequence[PageRef]) -> None:
        """Frees quarantined pages: their writer can write no more."""
        self._apply(pages, PageEvent.FENCE)

    def share(self, pages: Sequence[PageRef]) -> None:
        """Adds a holder to these committed pages, who only reads them and also releases them."""
        self._apply(pages, PageEvent.SHARE)
        self._more_holders.update(page.page_id for page in pages)

    def release(self, pages: Sequence[PageRef]) -> None:
        """One holder releases pages that no remote writer knows of (reserved) or still writes
        (committed); pages without other holders become free.
        """
        shared = [page for page in pages if page.page_id in self._more_holders]
        if not shared:
            self._apply(pages, PageEvent.RELEASE)
            return
        own = [page for page in pages if page.page_id not in self._more_holders]
        self._apply(shared, PageEvent.LEAVE)
        self._apply(own, PageEvent.RELEASE)
        self._more_holders -= Counter(page.page_id for page in shared)

    def count_freed(self, holders: Iterable[Sequence[PageRef]]) -> int:
        """How many committed pages become free once all these holders have released theirs. A page
        that only `spare` holds is free.
        """
        let_go = Counter(page.page_id for pages in holders for page in pages)
        held = self.spare.held if self.spare else ()
        return sum(
            count + (page_id in held) > self._more_holders[page_id]
            for page_id, count in let_go.items()
        )

    def _enter(self, count: int, event: PageEvent) -> tuple[PageRef, ...] | None:
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.num_free:
            return None
        while self.spare and self._counts[PageState.FREE] < count:
            self.release(self.spare.give_up())
        pages = []
        for page_id in self._free.take(count):
            self._generations[page_id] = (self._generations[page_id] + 1) & 0xFFFFFFFF
            self._move(page_id, event)
            pages.append(PageRef(page_id, self._generations[page_id]))
        return tuple(pages)

    def _apply(self, pages: Sequence[PageRef], event: PageEvent) -> None:
        for page in pages:
            self._check(page)
            if self._move(page.page_id, event) is PageState.FREE:
                self._free.give(page.page_id)

    def _move(self, page_id: int, event: PageEvent) -> PageState:
        before = self._states[page_id]
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise PageError(f"page {page_id} is {before.name}: {event.name} is not allowed")
        self._states[page_id] = after
        self._counts[before] -= 1
        self._counts[after] += 1
        return after

    def _check(self, page: PageRef) -> None:
        if page.page_id >= self.num_pages:
            raise PageError(f"page {page.page_id} is outside a pool of {self.num_pages} pages")
        current = self._generations[page.page_id]
        if page.generation != current:
            raise PageError(
                f"page {page.page_id} is at generation {current}, the reference is to generation "
                f"{page.generation}"
            )


def room_in(held: Iterable[tuple[int, int]], page_size: int) -> dict[str, int]:
    """Fields of a worker's `Load`, for requests that hold so many pages with so many tokens."""
    tokens = partial = empty = 0
    for num_pages, num_stored in held:
        rest = -num_stored % page_size
        tokens += num_stored
        partial += rest
        empty += num_pages * page_size - num_stored - rest
    return {"kv_tokens": tokens, "kv_room_partial": partial, "kv_room_empty": empty}


class FreeRuns:
    """A set of page ids kept as maximal runs; taking prefers the tightest run that fits."""

    def __init__(self, num_pages: int) -> None:
        self._length_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, start), ascending
        self._count = num_pages
        if num_pages:
            self._put(0, num_pages)

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> list[int]:
        """Removes `count` ids: from the smallest run that fits, otherwise from the longest ones."""
        assert 0 <= count <= self._count, (count, self._count)
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take_from(self._best(count - len(taken)), count - len(taken))
        return taken

    def give(self, page_id: int) -> None:
        """Adds one id, joining it with its neighbours."""
        start, end = page_id, page_id + 1
        if page_id in self._start_of:
            start = self._start_of[page_id]
            self._remove(start)
        if end in self._length_at:
            end += self._remove(end)
        self._put(start, end)
        self._count += 1

    def _best(self, count: int) -> int:
        runs = self._by_length
        index = bisect_left(runs, (count, 0))
        if index == len(runs):
            index = bisect_left(runs, (runs[-1][0], 0))
        return runs[index][1]

    def _take_from(self, start: int, count: int) -> list[int]:
        length = self._remove(start)
        taken = min(count, length)
        if taken < length:
            self._put(start + taken, start + length)
        self._count -= taken
        return list(range(start, start + taken))

    def _put(self, start: int, end: int) -> None:
        self._length_at[start] = end - start
        self._start_of[end] = start
        insort(self._by_length, (end - start, start))

    def _remove(self, start: int) -> int:
        """Forgets the run that begins there; returns its length."""
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length
