"""A cache whose units also live in host memory and in stores: files, and a pool of several workers.

A unit is copied to host memory once it has no user, while its pages are still in the pool, so that
the pool can evict them at any time. Units come back before their request begins if that is faster
than computing them, by measured times. Bytes that arrive are digested in their pages; a wrong unit
is forgotten and computed again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from typing import Final

from torch import Tensor

from effuse.kvtransfer.digest import DigestJob, PieceDigests, pages_digest
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.store_tier import AGAIN_S, HostUnit, Read
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.units import HeldUnits, Key, Unit, UnitCache

LOG = logging.getLogger(__name__)

_SAVED_SHARE: Final = 16  # of the pool's pages, at most one in so many is being saved
_SAVED_BYTES: Final = 256 << 20  # at most at once; some 5 ms on a GPU's bus
_SAVED_UNITS: Final = 64  # at most in one copy, whose begin and end then take a step 1 ms or less


@dataclass(slots=True, eq=False)
class Saving:
    """Units on their way to host memory."""

    units: list[tuple[Key, Unit, tuple[int, ...]]]  # with their slots
    job: DigestJob


@dataclass(slots=True, eq=False)
class Coming:
    """Successive units of a text on their way into the pool."""

    units: dict[Key, Unit]  # with their new pages
    began_s: float  # of them all, then of the copy
    kept: dict[Key, HostUnit] = field(default_factory=dict)  # those that are in host memory by now
    reads: list[Read] = field(default_factory=list)  # of the others, in order
    job: DigestJob | None = None  # the copy, once all were read


class TieredCache(UnitCache):
    """A cache whose units move between the pool, host memory and stores."""

    def __init__(
        self,
        pool: PagePool,
        tiers: Tiers,
        *,
        page_size: int,
        unit_size: int,
        is_causal: bool,
    ) -> None:
        super().__init__(pool, page_size=page_size, unit_size=unit_size, is_causal=is_causal)
        self.tiers = tiers
        self._host, self._now = tiers.host, tiers.now
        self._due: OrderedDict[Key, None] = OrderedDict()  # units to save: without a user, or all
        self._pins = HeldUnits()  # the cache's own use of units that are being saved
        self._saving: list[Saving] = []
        self._coming: dict[Key, Coming] = {}

    @property
    def is_copying(self) -> bool:
        """Whether units are on their way from or to the pool, or are looked for."""
        return bool(self._saving or self._coming or self.tiers.searches)

    def figures(self) -> dict[str, int]:
        outside = self.tiers.figures()
        return super().figures() | {f"offload_{name}": count for name, count in outside.items()}

    def close(self) -> None:
        """Waits for no store."""
        self.tiers.close()

    def poll(self) -> bool:
        """Goes on with all that moves, and waits for nothing. True if something began or ended."""
        before = self._moving()
        self._end_saves()
        for coming in dict.fromkeys(self._coming.values()):
            self._follow(coming)
        self._offer(self.tiers.poll())
        self._save_due()
        return before != self._moving()

    def _moving(self) -> tuple[int, ...]:
        counts = map(len, (self._coming, self._saving, self.tiers.searches))
        return self.tiers.counts.saved, *counts

    # From the pool to the host.

    def swap_out(self, one: HeldUnits, compute_s: Callable[[int], float]) -> None:
        """A request has lost its pages, which others take at once: saves its units first if that,
        and loading them, is faster than computing them. Waits for the copies."""
        keys = [key for key in one.keys if key in self._due and key in self._idle]
        num_pages = sum(len(self._idle[key].pages) for key in keys)
        both_s = 2 * self.tiers.copying.seconds(num_pages * self._host.page_bytes)
        if not keys or 0 < compute_s(num_pages * self._page_size) < both_s:
            return
        for key in keys:
            self._due.move_to_end(key, last=False)
        self._save_due(num_pages)
        while self._saving:
            self._end_saves()

    def add(self, one: HeldUnits, pages: Sequence[PageRef], num_stored: int) -> None:
        first = one.num_seen
        super().add(one, pages, num_stored)
        self._offer(one.keys[first : one.num_seen])

    def add_whole(self, one: HeldUnits, pages: Sequence[PageRef], boundary: Tensor | None) -> None:
        super().add_whole(one, pages, boundary)
        self._offer(one.keys)

    def _offer(self, keys: Iterable[Key]) -> None:
        """Other workers find units in a pool while their request still runs here."""
        if self.tiers.pool is not None:
            for key in keys:
                if (unit := self._units.get(key)) is not None:
                    self._note_due(key, unit)

    @property
    def has_pool(self) -> bool:
        pool = self.tiers.pool
        return pool is not None and pool.is_writable

    def pooled(self, one: HeldUnits, since_s: float | None = None) -> bool | None:
        pool, keys = self.tiers.pool, one.keys
        if pool is None:
            return False
        if since_s is None and self._is_sought(one, len(keys), is_sure=False):
            return None
        if all(map(pool.store.__contains__, keys)):  # for many prompts a turn
            return pool.is_usable
        unit = self._units.get(keys[0])
        count = 0 if unit is None else len(unit.pages)
        fits = count <= self._host.num_slots
        fits &= pool.store.has_room_for(count * self._host.page_bytes)
        return None if fits and since_s is not None and pool.goes_on(since_s) else False

    def end(self, one: HeldUnits) -> None:
        super().end(one)
        one.is_fetched = False
        one.searches = None

    def _befores(self) -> Iterator[tuple[Key, Key]]:
        return chain(super()._befores(), self.tiers.befores())

    def _forget(self, key: Key) -> None:
        super()._forget(key)
        self.tiers.forget(key)

    def _leave(self, key: Key, unit: Unit) -> None:
        super()._leave(key, unit)
        if key in self._idle:
            self._note_due(key, unit)

    def _note_due(self, key: Key, unit: Unit) -> None:
        if key in self.tiers.kept:
            self.tiers.kept.move_to_end(key)
            self.tiers.owe(key)
        elif len(unit.pages) <= self._host.num_slots:
            self._due[key] = None
            self._due.move_to_end(key)

    def _save_due(self, most: int | None = None) -> None:
        """Starts to save units, by default a few, at most so many pages of them."""
        limit = self._host.num_slots if most else _SAVED_UNITS
        if most is None:
            moving = sum(len(unit.pages) for one in self._saving for _, unit, _ in one.units)
            room = min(self._pool.num_pages // _SAVED_SHARE, _SAVED_BYTES // self._host.page_bytes)
            most = room - moving
        units: list[tuple[Key, Unit, tuple[int, ...]]] = []
        while self._due and len(units) < limit and (most > 0 or not (units or self._saving)):
            key = next(iter(self._due))
            unit = self._units.get(key)
            if unit is not None and self._pins.held.get(key) is not unit:
                if (slots := self.tiers.take_slots(len(unit.pages))) is None:
                    break
                self._use(self._pins, key, unit)
                units.append((key, unit, slots))
                most -= len(slots)
            del self._due[key]
        if units:
            pages = [page for _, unit, _ in units for page in unit.pages]
            self._pool.share(pages)
            page_ids = [page.page_id for page in pages]
            job = self._host.save(page_ids, [slot for *_, slots in units for slot in slots])
            self._saving.append(Saving(units, job))

    def _end_saves(self) -> None:
        left = []
        for saving in self._saving:
            if (found := saving.job()) is None:
                left.append(saving)
                continue
            self.tiers.counts.saved += len(found) * self._host.page_bytes
            self._take_saved(saving, found)
        self._saving = left

    def _take_saved(self, saving: Saving, found: PieceDigests) -> None:
        self._pool.release([page for _, unit, _ in saving.units for page in unit.pages])
        at = 0
        for key, unit, slots in saving.units:
            digest = pages_digest(found[at : at + len(slots)])
            at += len(slots)
            if self._units.get(key) is unit:
                self.tiers.keep(key, HostUnit(slots, digest, unit.before, unit.boundary))
            else:  # it was dropped meanwhile
                self.tiers.give_slots(slots)
            self._pins.held.pop(key, None)  # of a second copy, if this unit was dropped meanwhile
            self._leave(key, unit)
        self._keep_beginnings(unit for _, unit, _ in saving.units)

    def _keep_beginnings(self, units: Iterable[Unit]) -> None:
        """The units before these, which were used just now, leave every tier later than these."""
        seen: set[Key] = set()
        for unit in units:
            key = unit.before
            # Those that are saved later are touched then.
            while key and not (key in seen or key in self._due or key in self._pins.held):
                seen.add(key)
                for tier in (self._idle, self.tiers.kept):
                    if key in tier:
                        tier.move_to_end(key)
                one = self._units.get(key) or self.tiers.kept.get(key)
                key = one.before if one else b""

    # Back into the pool.

    def fetch(
        self, one: HeldUnits, num_tokens: int, rest: int, compute_s: Callable[[int], float]
    ) -> bool:
        """Whether units among a request's first tokens are on their way into the pool, so that it
        should wait. Starts that once for a request that is about to begin. Arguments as of `take`;
        `compute_s` gives the seconds to compute so many tokens, 0 if unknown."""
        if self._coming and any(key in self._coming for key in one.keys):
            return True
        if not self.is_causal and any(key in self._pins.held for key in one.keys):
            return True  # a whole prompt can only be taken once it was saved
        if one.is_fetched or not one.keys:
            return False
        end = max(0, num_tokens - rest) // self.unit_size if self.is_causal else 1
        if self._is_sought(one, end):
            return True
        one.is_fetched = True
        keys = self._elsewhere(one, end)
        per_unit = self._pages_per_unit if self.is_causal else -(-num_tokens // self._page_size)
        keys = keys[: self._num_worthwhile(keys, per_unit, compute_s)]
        return bool(keys) and self._begin(keys, per_unit)

    def _is_sought(self, one: HeldUnits, end: int, *, is_sure: bool = True) -> bool:
        """Whether stores still look for units that no tier is known to have, or for all if that is
        not sure. Asks them once."""
        if one.searches is None:
            at = len(self._reachable(one, end)) if is_sure else 0
            pairs = list(pairwise([b"", *one.keys[:end]]))[at:]
            one.searches = self.tiers.seek({key: before for before, key in pairs})
            if self.tiers.pool is not None:
                self.tiers.pool.confirm(one.keys[:at])
        return any(search in self.tiers.searches for search in one.searches)

    def _reachable(self, one: HeldUnits, end: int) -> list[Key]:
        """The units of any tier among the first ones, as far as none is missing."""
        return list(takewhile(lambda key: key in self._units or key in self.tiers, one.keys[:end]))

    def _elsewhere(self, one: HeldUnits, end: int) -> list[Key]:
        """The units that only other tiers have, as far as none is missing. Those that the pool has
        leave it later than all others."""
        found = self._reachable(one, end)
        for key in reversed(found):
            if key in self._idle:
                self._idle.move_to_end(key)
        return [key for key in found if key not in self._units]

    def _num_worthwhile(
        self, keys: Sequence[Key], per_unit: int, compute_s: Callable[[int], float]
    ) -> int:
        """How many of these units come back faster than they are computed: all, or those in host
        memory, or none."""
        in_host = self.tiers.kept.__contains__
        for count in (len(keys), len(list(takewhile(in_host, keys)))):
            if count and self._is_faster(keys[:count], per_unit, compute_s):
                return count
        return 0

    def _is_faster(
        self, keys: Sequence[Key], per_unit: int, compute_s: Callable[[int], float]
    ) -> bool:
        """Whether these units of so many pages come faster than they are computed, or that should
        be measured."""
        unit_bytes = per_unit * self._host.page_bytes
        ways = [(self.tiers.copying, len(keys) * unit_bytes), *self.tiers.ways(keys, unit_bytes)]
        load_s = sum(rate.seconds(num_bytes) for rate, num_bytes in ways)
        compute = compute_s(len(keys) * per_unit * self._page_size)
        measured_s = min(rate.measured_s for rate, _ in ways)
        return not compute or load_s < compute or self._now() - measured_s > AGAIN_S

    def _begin(self, keys: Sequence[Key], per_unit: int) -> bool:
        """Starts to bring units into new pages; False if none can come."""
        pages = self._pool.allocate_committed(len(keys) * per_unit)
        if pages is None:
            return False
        cuts = range(0, len(pages), per_unit)
        units = [Unit(pages[at : at + per_unit]) for at in cuts]
        coming = Coming(dict(zip(keys, units, strict=True)), self._now())
        self._coming.update(dict.fromkeys(keys, coming))
        in_host = [key for key in keys if key in self.tiers.kept]
        coming.kept = {key: self.tiers.use(key) for key in in_host}
        for key in keys:
            if key in coming.kept:
                continue
            if (read := self.tiers.begin_read(key, per_unit)) is None:
                self._cut(coming, key)
                break
            coming.reads.append(read)
        self._follow(coming)
        return any(key in self._coming for key in keys)

    def _follow(self, coming: Coming) -> None:
        """The next part of units' way, if the one before is over."""
        if coming.job is None:
            if not self._take_reads(coming) or not coming.units:
                return
            slots = [slot for key in coming.units for slot in coming.kept[key].slots]
            page_ids = [page.page_id for unit in coming.units.values() for page in unit.pages]
            coming.began_s = self._now()
            coming.job = self._host.load(slots, page_ids)
        if (found := coming.job()) is not None:
            now, num_bytes = self._now(), len(found) * self._host.page_bytes
            self.tiers.counts.loaded += num_bytes
            self.tiers.copying.note(num_bytes, now - coming.began_s, now)
            self._arrive(coming, found)

    def _take_reads(self, coming: Coming) -> bool:
        """Takes units that were read; True once none is awaited."""
        while coming.reads:
            if coming.reads[0].tier.is_awaited(coming.reads[0]):
                return False
            read = coming.reads.pop(0)
            if not self.tiers.end_read(read):
                self._cut(coming, read.key)
                break
            coming.kept[read.key] = self.tiers.use(read.key)
        return True

    def _cut(self, coming: Coming, first: Key) -> None:
        """This unit does not come, nor do those after it."""
        keys = list(coming.units)
        for key in keys[keys.index(first) :]:
            self._pool.release(coming.units.pop(key).pages)
            del self._coming[key]
            if (kept := coming.kept.pop(key, None)) is not None:
                self.tiers.unread(kept)
        for read in [one for one in coming.reads if one.key not in coming.units]:
            coming.reads.remove(read)
            read.tier.abandon(read)

    def _arrive(self, coming: Coming, found: PieceDigests) -> None:
        """The bytes of all units are in their pages: right ones are there for requests."""
        end = len(found)
        for key, unit in reversed(coming.units.items()):
            del self._coming[key]
            kept, rows = coming.kept[key], found[end - len(unit.pages) : end]
            end -= len(unit.pages)
            is_right = pages_digest(rows) == kept.digest
            if not is_right:
                self.tiers.counts.corrupt += 1
                LOG.warning("a unit of KV came back altered, and is computed again")
                self.tiers.forget(key)
            if kept.is_forgotten or key in self._units:
                self._pool.release(unit.pages)
            else:
                self._enter(key, unit, kept)
            self.tiers.unread(kept)

    def _enter(self, key: Key, unit: Unit, kept: HostUnit) -> None:
        unit.before, unit.boundary = kept.before, kept.boundary
        self._units[key] = self._idle[key] = unit
        self.held.update((page.page_id, page) for page in unit.pages)
        self.num_pages += len(unit.pages)
