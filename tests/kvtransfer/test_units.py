"""The books of a pool whose pages outlive their requests, under random operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from auditing import audit_cache, audit_pool, cached_pages

from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.units import HeldUnits, UnitCache


@dataclass
class Request:
    """Pages and keys of one request."""

    ids: list[int]
    units: HeldUnits
    pages: list[PageRef]
    num_stored: int


@dataclass
class Books:
    """A pool, its cache, and all that hold pages."""

    draw: random.Random
    is_causal: bool
    unit_tokens: int = 4
    pool: PagePool = field(default_factory=lambda: PagePool(24))
    requests: list[Request] = field(default_factory=list)
    writers: list[tuple[PageRef, ...]] = field(default_factory=list)  # with reserved pages
    quarantined: list[tuple[PageRef, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = UnitCache(
            self.pool,
            page_size=2,
            unit_size=self.unit_tokens,
            is_causal=self.is_causal,
        )

    def begin(self) -> None:
        text = random.Random(self.draw.randrange(3)).choices(range(9), k=24)
        ids = text[: 4 * self.draw.randint(1, 6)]
        units = self.cache.begin(self.draw.choice(("", "salt")), ids, len(ids))
        needed, free = len(ids) // 2, self.pool.num_free
        if self.is_causal:
            if needed - self.cache.num_pinned(units, len(ids)) > free:
                return
            pages = list(self.cache.take(units, len(ids)))
            stored = units.num_found * self.cache.unit_size
        else:
            if needed > free:
                return
            unit = self.cache.take_whole(units, len(ids))
            pages = [] if unit is None else list(unit.pages)
            stored = len(pages) * 2
        new = self.pool.allocate_committed(needed - len(pages))
        assert new is not None, "it was counted"
        self.requests.append(Request(ids, units, [*pages, *new], stored))

    def join(self) -> None:
        """A second answer to a prompt reads the pages of the first."""
        if not self.requests:
            return
        source = self.draw.choice(self.requests)
        shared = source.pages
        if self.is_causal:
            source.num_stored = len(source.ids)
            self.cache.add(source.units, source.pages, source.num_stored)
            shared = source.pages[: self.cache.num_joint(source.num_stored) // 2]
        units = self.cache.begin(source.units.salt, source.ids, len(source.ids))
        self.cache.join(units, source.units, len(source.ids))
        self.pool.share(shared)
        self.requests.append(Request(source.ids, units, list(shared), source.num_stored))

    def store(self) -> None:
        for one in self.requests[-2:]:
            one.num_stored = self.draw.randint(one.num_stored, len(one.ids))
            self.cache.add(one.units, one.pages, one.num_stored)

    def end(self) -> None:
        if not self.requests:
            return
        one = self.requests.pop(self.draw.randrange(len(self.requests)))
        counted = self.pool.count_freed([one.pages])
        free = self.pool.num_free
        kind = self.draw.random()
        if kind < 0.2:
            self.cache.drop(one.units)
        elif kind < 0.8:
            self.cache.add_whole(one.units, one.pages, None)
        self.cache.end(one.units)
        self.pool.release(one.pages)
        assert self.pool.num_free >= free + counted
        assert kind < 0.2 or self.pool.num_free == free + counted

    def reserve(self) -> None:
        pages = self.pool.allocate(self.draw.randint(1, 6))
        if pages is not None:
            self.pool.open(pages)
            self.writers.append(pages)

    def write(self) -> None:
        if self.writers:
            pages = self.writers.pop()
            if self.draw.random() < 0.5:
                self.pool.commit(pages)
                self.pool.release(pages)
            else:
                self.pool.quarantine(pages)
                self.quarantined.append(pages)

    def fence(self) -> None:
        if self.quarantined:
            self.pool.fence(self.quarantined.pop())

    def check(self) -> None:
        held = [page for one in self.requests for page in one.pages]
        apart = [page for pages in (*self.writers, *self.quarantined) for page in pages]
        audit_cache(self.cache)
        audit_pool(self.pool, [*held, *apart, *cached_pages(self.cache)])
        reachable = {page.page_id for page in apart}
        assert not reachable & self.cache.held.keys(), "a writer reaches a cached page"
        counts = [self.pool.count(state) for state in PageState]
        assert sum(counts) == self.pool.num_pages
        assert self.pool.num_free == self.pool.count(PageState.FREE) + self.cache.num_pages


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("seed", range(20))
def test_the_pages_always_add_up(seed: int, is_causal: bool) -> None:
    books = Books(random.Random(seed), is_causal)
    names = ("begin", "begin", "join", "store", "store", "end", "end", "reserve", "write", "fence")
    for _ in range(300):
        getattr(books, books.draw.choice(names))()
        books.check()
    assert not is_causal or (books.cache.num_found and books.cache.num_evicted)
    while books.requests:
        books.end()
    while books.writers or books.quarantined:
        books.write()
        books.fence()
    books.check()
    assert books.pool.num_free == books.pool.num_pages


def test_the_books_show_a_page_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a unit does not count a second user."""
    use = UnitCache._use

    def forgets(cache: UnitCache, one: HeldUnits, key: bytes, unit: object) -> None:
        use(cache, one, key, unit)  # type: ignore[arg-type]
        unit.num_users = 1  # type: ignore[attr-defined]

    monkeypatch.setattr(UnitCache, "_use", forgets)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            test_the_pages_always_add_up(seed, True)


def test_a_dropped_unit_takes_those_after_it_along() -> None:
    """A longer text was computed from it, and has ended."""
    pool = PagePool(8)
    cache = UnitCache(pool, page_size=4, unit_size=4)
    wrong, longer, other = (cache.begin(salt, range(16), 16) for salt in ("", "", "other"))
    for one, num_stored in ((wrong, 4), (longer, 16), (other, 16)):
        pages = cache.take(one, num_stored)
        new = pool.allocate_committed(num_stored // 4 - len(pages))
        assert new is not None
        cache.add(one, [*pages, *new], num_stored)
        if one is not wrong:
            cache.end(one)
            pool.release([*pages, *new])
    assert cache.num_cached == 8
    cache.drop(wrong)
    assert cache.num_cached == cache.num_pages == 4
    assert len(cache.take(other, 16)) == 4
    assert not cache.take(cache.begin("", range(16), 16), 16)


def test_a_reader_of_a_dropped_unit_leaves_the_one_that_was_stored_after_it() -> None:
    """Else nothing would ever free the later unit's pages."""
    pool = PagePool(8)
    cache = UnitCache(pool, page_size=4, unit_size=4)

    def begin() -> tuple[HeldUnits, list[PageRef]]:
        units = cache.begin("", range(4), 4)
        pages = cache.take(units, 4) or pool.allocate_committed(1)
        assert pages is not None
        cache.add(units, pages, 4)
        return units, list(pages)

    (reader, first), (wrong, same) = begin(), begin()
    cache.drop(wrong)
    later, second = begin()
    cache.end(later)
    second_reader = cache.begin("", range(4), 4)
    cache.join(second_reader, reader, 4)
    pool.share(first)
    assert cache.num_pages == 1
    for one in (reader, second_reader):
        cache.end(one)
    for pages in (first, same, first, second):
        pool.release(pages)
    audit_cache(cache)
    assert pool.num_free == pool.num_pages
