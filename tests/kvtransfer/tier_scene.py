"""A pool with host memory and files below it, and requests whose pages have known bytes."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from auditing import audit_cache, audit_pool, cached_pages
from kvtransfer.fake_pool import FakePool, SharedUnits

from effuse.kvtransfer.digest import PieceDigests
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.store_tier import READ_S, StoreCounts, Writing
from effuse.kvtransfer.stores import UnitFacts
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.unit_files import UnitFiles
from effuse.kvtransfer.units import HeldUnits

PAGE_BYTES = 64
TEXTS = [random.Random(number).choices(range(9), k=24) for number in range(4)]


def open_on_full_disk(path: str, flags: int) -> int:
    """Opens a new file on a disk that has no room for its bytes."""
    os.close(os.open(path, flags, 0o600))
    return os.open("/dev/full", os.O_WRONLY)


@dataclass
class Job:
    """A copy that is over after some polls."""

    run: Callable[[], PieceDigests]
    polls: int
    found: PieceDigests | None = None

    def __call__(self) -> PieceDigests | None:
        self.polls -= 1
        if self.polls < 0 and self.found is None:
            self.found = self.run()
        return self.found


class FakeHost:
    """Slots and pages of 64 bytes. Copies take place when they end."""

    def __init__(self, num_pages: int, num_slots: int, polls: Callable[[], int]) -> None:
        self.num_slots, self.page_bytes = num_slots, PAGE_BYTES
        self.pages = np.zeros((num_pages, PAGE_BYTES), np.uint8)
        self.slots = np.zeros((num_slots, PAGE_BYTES), np.uint8)
        self.polls = polls

    def save(self, page_ids: Sequence[int], slots: Sequence[int]) -> Job:
        return Job(lambda: self._copy(self.pages, page_ids, self.slots, slots), self.polls())

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> Job:
        return Job(lambda: self._copy(self.slots, slots, self.pages, page_ids), self.polls())

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.slots[slot]) for slot in slots]

    def _copy(self, rows: Any, sources: Sequence[int], into: Any, targets: Sequence[int]) -> Any:
        into[list(targets)] = rows[list(sources)]
        found = [[xxhash.xxh3_64_intdigest(row.tobytes()) >> 1] for row in rows[list(sources)]]
        return np.array(found, np.int64)


class StuckFiles(UnitFiles):
    """Files whose reads and writes end only when the test says so."""

    is_stuck = False

    def __init__(self, directory: Path, most_bytes: int) -> None:
        super().__init__(directory, most_bytes)
        self.stuck: list[Future[Any]] = []

    def load(self, key: bytes, views: Sequence[memoryview]) -> Future[UnitFacts]:
        return self._hold() if self.is_stuck else super().load(key, views)

    def keep(self, *told: Any) -> Future[int]:
        return self._hold() if self.is_stuck else super().keep(*told)

    def _hold(self) -> Future[Any]:
        self.stuck.append(Future())
        self.stuck[-1].set_running_or_notify_cancel()
        return self.stuck[-1]


@dataclass
class Request:
    """Pages and keys of one request."""

    ids: list[int]
    units: HeldUnits
    pages: list[PageRef] = field(default_factory=list)


class Scene:
    """A pool with pages of two tokens, its tiers, and all that hold pages."""

    def __init__(
        self,
        draw: random.Random,
        *,
        is_causal: bool = True,
        directory: Path | None = None,
        num_pages: int = 24,
        num_slots: int = 20,
        most_file_bytes: int = 1 << 20,
        most_polls: int = 3,
        shared: SharedUnits | None = None,
    ) -> None:
        self.draw, self.time = draw, 100.0
        self.pool = PagePool(num_pages)
        self.host = FakeHost(num_pages, num_slots, lambda: draw.randint(0, most_polls))
        self.files = None if directory is None else StuckFiles(directory, most_file_bytes)
        self.shared = None if shared is None else FakePool(shared)
        stores = [one for one in (self.files, self.shared) if one is not None]
        self.tiers = Tiers(self.host, stores, now=lambda: self.time)
        self.cache = TieredCache(
            self.pool, self.tiers, page_size=2, unit_size=4, is_causal=is_causal
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.compute_s: Callable[[int], float] = lambda _: 0.0

    @property
    def counts(self) -> StoreCounts:
        """Of the only store; zero without one."""
        return next((one.counts for one in self.tiers.stores), StoreCounts())

    @property
    def stuck(self) -> list[Future[Any]]:
        """Reads and writes that end only when the test says so."""
        return [*getattr(self.files, "stuck", ()), *getattr(self.shared, "stuck", ())]

    @property
    def writing(self) -> list[Writing]:
        return [one for tier in self.tiers.stores for one in tier.writing]

    def start(self, ids: list[int], salt: str = "") -> Request:
        self.waiting.append(Request(ids, self.cache.begin(salt, ids, len(ids))))
        return self.waiting[-1]

    def admit(self) -> None:
        """Gives waiting requests their pages; every known page has the right bytes."""
        for one in list(self.waiting):
            count, size = len(one.ids) // 2, len(one.ids)
            asked = one.units, size
            pinned = self.cache.num_pinned(*asked) if self.cache.is_causal else 0
            if count - pinned > self.pool.num_free:
                return
            if self.cache.fetch(*asked, 0, self.compute_s):
                continue
            if self.cache.is_causal:
                known: Sequence[PageRef] = self.cache.take(*asked)
            else:
                unit = self.cache.take_whole(*asked)
                known = () if unit is None else unit.pages
                if unit is not None:
                    assert unit.boundary is not None and unit.boundary.tolist() == [sum(one.ids)]
            for at, page in enumerate(known):
                assert self.host.pages[page.page_id].tobytes() == content(one, at)
            new = self.pool.allocate_committed(count - len(known))
            assert new is not None, "it was counted"
            one.pages = [*known, *new]
            self.waiting.remove(one)
            self.running.append(one)

    def store(self, one: Request) -> None:
        """Computes all of a request's text, and changes nothing that others read."""
        first = one.units.num_found * 2 if self.cache.is_causal else 0
        for at in range(first, len(one.pages)):
            data = np.frombuffer(content(one, at), np.uint8)
            self.host.pages[one.pages[at].page_id] = data
        self.cache.add(one.units, one.pages, len(one.ids))

    def end(self, one: Request, *, is_sound: bool = True) -> None:
        if not is_sound:
            self.cache.drop(one.units)
        boundary = torch.tensor([float(sum(one.ids))])
        self.cache.add_whole(one.units, one.pages, boundary)
        self.cache.end(one.units)
        self.pool.release(one.pages)
        self.running.remove(one)

    def run(self, *texts: list[int]) -> list[int]:
        """Requests one after the other to their ends; tokens that each found."""
        found = []
        for text in texts:
            one, before = self.start(text), self.cache.num_found
            for _ in range(100):
                self.poll()
                self.admit()
                if one in self.running:
                    break
                self.await_reads()
            found.append(self.cache.num_found - before)
            self.store(one)
            self.end(one)
            self.settle()
        return found

    def poll(self) -> None:
        self.cache.poll()
        self.audit()

    def await_reads(self) -> None:
        for coming in self.cache._coming.values():
            for read in coming.reads:
                if read.result not in self.stuck:
                    read.result.exception(10)

    def settle(self) -> None:
        """Polls until nothing moves but stuck files."""
        for _ in range(1000):
            self.await_reads()
            self.poll()
            writes = [one for one in self.writing if one.result not in self.stuck]
            if not self.cache.is_copying and not self.cache._due and not writes:
                return
            for one in writes:
                one.result.exception(10)
            if self.files and self.files.is_stuck:
                return
            if self.cache.is_copying and self.stuck:
                self.time += READ_S

    def empty_pool(self) -> None:
        """Others use all free pages once."""
        pages = self.pool.allocate_committed(self.pool.num_free)
        assert pages is not None
        self.host.pages[[page.page_id for page in pages]] = 255
        self.pool.release(pages)

    def audit(self) -> None:
        audit_cache(self.cache)
        held = [page for one in self.running for page in one.pages]
        audit_pool(self.pool, [*held, *cached_pages(self.cache)])


def content(one: Request, at: int) -> bytes:
    """The bytes of a page: they depend on all tokens before its end."""
    salt, end = one.units.salt, 2 * at + 2
    return hashlib.blake2b(repr((salt, one.ids[:end])).encode(), digest_size=PAGE_BYTES).digest()
