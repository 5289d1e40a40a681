"""Units of KV outside of a pool: in host memory, and in stores below it.

The host's least recently used units go to files before their room is needed, and all units go to a
store of several workers. Accounting and policy: `host_pages.py` copies, `store_tier.py` follows
each store, and `tiered_cache.py` moves units from and to the pool.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import torch
from torch import Tensor

from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.pool import FreeRuns
from effuse.kvtransfer.store_tier import HostUnit, Read, Search, StoreTier
from effuse.kvtransfer.stores import UnitStore
from effuse.kvtransfer.units import Key, Rate

_FREE_SHARE: Final = 8  # of the host's slots, one in so many is kept free by writing to files
_LOOKED_AT: Final = 16  # units that leave the host next


class Host(Protocol):
    """Slots of a page each, and copies from and to the pool's pages."""

    num_slots: int
    page_bytes: int

    def save(self, page_ids: Sequence[int], slots: Sequence[int]) -> DigestJob:
        """Starts to copy pages to slots."""

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> DigestJob:
        """Starts to copy slots to pages."""

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Writable bytes of slots."""


@dataclass(slots=True)
class TierCounts:
    """Bytes of KV that have moved between pool and host memory so far, and faults."""

    saved: int = 0  # to host memory
    loaded: int = 0  # into the pool
    corrupt: int = 0  # units whose digest was wrong


class Tiers:
    """Units in host memory and stores, by key."""

    def __init__(
        self,
        host: Host,
        stores: Iterable[UnitStore] = (),
        *,
        now: Callable[[], float],
        row_dtype: torch.dtype = torch.float32,
        row_device: torch.device | str = "cpu",
    ) -> None:
        """The first of the stores that has a unit is read. Rows are boundary rows; theirs in stores
        become tensors of this type, on this device."""
        self.host = host
        self.counts = TierCounts()
        # Seconds of bytes. Copies to the host do not count: most are small, and seen to end late.
        self.copying = Rate()
        self.kept: OrderedDict[Key, HostUnit] = OrderedDict()  # least recently used first
        self.now = now
        self.stores = [StoreTier(store, now) for store in stores]
        self._row_dtype, self._row_device = row_dtype, row_device
        self._free = FreeRuns(host.num_slots)

    def __contains__(self, key: Key) -> bool:
        return key in self.kept or self._store_of(key) is not None

    def figures(self) -> dict[str, int]:
        """Fields of a worker's `Load`."""
        counts = self.counts
        found = {
            "pages": self.host.num_slots - len(self._free),
            "saved": counts.saved,
            "loaded": counts.loaded,
            "corrupt": counts.corrupt + sum(one.counts.corrupt for one in self.stores),
        }
        for one in self.stores:
            if one.store.kind == "file":
                found["file_bytes"] = one.store.num_bytes
            else:
                found["pool"] = one.store.number * one.is_writable
            for name in ("kept", "read", "failures"):
                found[f"{one.store.kind}_{name}"] = getattr(one.counts, name)
        return found

    def await_stores(self, seconds: float) -> None:
        """Returns once all stores are open or have failed, or after so many seconds."""
        wait([one.opening for one in self.stores if one.opening is not None], seconds)

    @property
    def pool(self) -> StoreTier | None:
        """The store of several workers."""
        return next((one for one in self.stores if one.store.keeps_all), None)

    def close(self) -> None:
        """Waits for no store."""
        for one in self.stores:
            one.store.close()

    def _store_of(self, key: Key) -> StoreTier | None:
        return next((one for one in self.stores if key in one), None)

    # Host memory.

    def take_slots(self, count: int) -> tuple[int, ...] | None:
        """Slots, for which the least recently used units leave; None if there are too few now."""
        if count > self.host.num_slots:
            return None
        while len(self._free) < count:
            key = next((key for key, kept in self.kept.items() if not kept.num_readers), None)
            if key is None:
                return None
            if self._write(key):
                return None
            self._leave_host(key)
        return tuple(self._free.take(count))

    def give_slots(self, slots: Iterable[int]) -> None:
        """The slots have no unit."""
        for slot in slots:
            self._free.give(slot)

    def keep(self, key: Key, kept: HostUnit) -> None:
        """A unit is in host memory. It may have come there from pool and files at the same time:
        then the first one stays."""
        if key in self.kept:
            self.give_slots(kept.slots)
            return
        self.kept[key] = kept
        self.owe(key)

    def owe(self, key: Key) -> None:
        """The pool gets a unit of the host if it is not known to have it."""
        if (pool := self.pool) is not None and key not in pool.store:
            pool.due[key] = None

    def use(self, key: Key) -> HostUnit:
        """A unit of the host, whose slots have one more reader."""
        kept = self.kept[key]
        kept.num_readers += 1
        self.kept.move_to_end(key)
        return kept

    def unread(self, kept: HostUnit) -> None:
        """One reader less."""
        kept.num_readers -= 1
        if kept.is_forgotten and not kept.num_readers:
            self.give_slots(kept.slots)

    def befores(self) -> Iterator[tuple[Key, Key]]:
        """Each unit, and the unit before it; some twice."""
        for one in self.stores:
            yield from one.store.befores()
        yield from ((key, kept.before) for key, kept in self.kept.items())

    def forget(self, key: Key) -> None:
        """No request finds the unit any more."""
        if key in self.kept:
            self._leave_host(key)
        for one in self.stores:
            one.store.forget(key)

    def _leave_host(self, key: Key) -> None:
        kept = self.kept.pop(key)
        for one in self.stores:
            one.due.pop(key, None)
        kept.is_forgotten = True
        if not kept.num_readers:
            self.give_slots(kept.slots)

    # To and from stores.

    def poll(self) -> list[Key]:
        """Goes on with stores; waits for none. Returns units that they had, and have no more."""
        lost: list[Key] = []
        for one in self.stores:
            written, slots = one.poll()
            self.give_slots(slots)
            for kept in written:
                self.unread(kept)
            lost, one.lost = lost + one.lost, []
        for key in filter(self.kept.__contains__, lost):
            self.owe(key)
        self._write_ahead()
        return lost

    def _write_ahead(self) -> None:
        """Writes what stores have yet to keep and, while some of the host's room is left, units
        that will leave it next."""
        for one in self.stores:
            while one.due and one.may_write:
                self._write_to(one, one.due.popitem(last=False)[0])
        if len(self._free) < self.host.num_slots // _FREE_SHARE:
            for key, kept in list(islice(self.kept.items(), _LOOKED_AT)):
                if not kept.num_readers:
                    self._write(key)

    def _write(self, key: Key) -> bool:
        """Starts to write a unit of the host to stores that lack it, or may do so later; False if
        there is none."""
        return sum(self._write_to(one, key) for one in self.stores) > 0

    def _write_to(self, one: StoreTier, key: Key) -> bool:
        kept = self.kept[key]
        num_row = 0 if kept.boundary is None else kept.boundary.nbytes
        if not one.lacks(key, len(kept.slots) * self.host.page_bytes + num_row):
            return False
        if one.may_write:
            one.write(key, kept, self.host.views(kept.slots))
        return True

    def seek(self, units: Mapping[Key, Key]) -> list[Search]:
        """Starts to look for successive units that no tier is known to have, each with the one
        before it. Results come with `poll`."""
        return [search for one in self.stores if (search := one.seek(units)) is not None]

    @property
    def searches(self) -> list[Search]:
        """Those that are not over."""
        return [search for one in self.stores for search in one.searches]

    def ways(self, keys: Iterable[Key], num_bytes: int) -> list[tuple[Rate, int]]:
        """Rates of reading units of so many bytes each from their stores, with the bytes."""
        found = [one for key in keys if key not in self.kept and (one := self._store_of(key))]
        return [(one.reading, found.count(one) * num_bytes) for one in dict.fromkeys(found)]

    def begin_read(self, key: Key, count: int) -> Read | None:
        """Starts to read a unit of so many pages; None if that cannot be now."""
        slots, one = self.take_slots(count), self._store_of(key)
        if slots is None or one is None:
            self.give_slots(slots or ())
            return None
        return one.read(key, slots, self.host.views(slots))

    def end_read(self, read: Read) -> bool:
        """A read is not awaited any more: whether the unit is in host memory now."""
        facts = read.tier.end_read(read, len(read.slots) * self.host.page_bytes)
        if facts is not None:
            before, row = read.tier.store.before(read.key), self._row(facts.boundary)
            self.keep(read.key, HostUnit(read.slots, facts.digest, before, row))
        elif not read.tier.is_late(read):
            self.give_slots(read.slots)
        return facts is not None

    def _row(self, raw: bytes) -> Tensor | None:
        if not raw:
            return None
        return torch.frombuffer(bytearray(raw), dtype=self._row_dtype).to(self._row_device)
