"""Transfers of units between host memory and one store.

Each step has a time limit, because a store may fail or never answer. Then it counts as absent for a
while, and no request waits for it.
"""

import errno
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from effuse.kvtransfer.stores import UnitFacts, UnitStore
from effuse.kvtransfer.units import Key, Rate

LOG = logging.getLogger(__name__)

FIND_S: Final = 0.5
"""Time for units to be found; then they are computed. Searches and reads may wait for earlier ones,
so it begins anew whenever the store ends a search, a read or a write."""
READ_S: Final = 1.0
"""The same for units that are read."""
KEEP_S: Final = 1.0
"""Time for a prompt to be written for another worker; it begins anew with each write."""
WRITE_S: Final = 10.0
"""Time for one to be written."""
AGAIN_S: Final = 30.0
"""How long a store is not used after it has failed, and a slower way is not measured again."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_MOST_TRIES: Final = 8
"""How often in succession units leave a full store for others; more would not help."""


@dataclass(slots=True, eq=False)
class HostUnit:
    """A unit in host memory."""

    slots: tuple[int, ...]
    digest: bytes
    before: Key
    boundary: Tensor | None  # [hidden_size], on the pool's device
    num_readers: int = 0  # copies and writes that read the slots
    is_forgotten: bool = False  # forgotten: its slots are free once nothing reads them


@dataclass(slots=True, eq=False)
class Search:
    """Successive units that a store is asked for, each with the one before it."""

    units: Mapping[Key, Key]
    result: "Future[int]"
    began_s: float


@dataclass(slots=True, eq=False)
class Read:
    """A unit on its way from a store to host memory."""

    key: Key
    tier: "StoreTier"
    slots: tuple[int, ...]
    result: "Future[UnitFacts]"
    began_s: float


@dataclass(slots=True, eq=False)
class Writing:
    """A unit on its way to a store."""

    key: Key
    kept: HostUnit
    num_bytes: int  # without the header
    result: "Future[int]"
    began_s: float
    is_late: bool = False


@dataclass(slots=True)
class StoreCounts:
    """Bytes of KV that have moved so far, and faults."""

    kept: int = 0
    read: int = 0
    corrupt: int = 0  # units that were cut or foreign
    failures: int = 0  # errors, and times that it did not answer


class StoreTier:
    """One store, as far as it can be used."""

    def __init__(self, store: UnitStore, now: Callable[[], float]) -> None:
        self.store = store
        self.counts = StoreCounts()
        self.reading = Rate()  # seconds of bytes
        self.due: OrderedDict[Key, None] = OrderedDict()  # units that it has yet to keep
        self.searches: list[Search] = []
        self.lost: list[Key] = []  # units that it had, and has no more
        self.writing: list[Writing] = []
        self._now = now
        self.opening: Future[object] | None = store.open()
        self._late: list[Read] = []  # no request waits for them
        self._sure: set[Key] = set()  # units that it had a moment ago
        self._sure_s = now()  # since when they are noted
        # When the last one ended, and when any did.
        self._read_s = self._written_s = self._answered_s = -math.inf
        self._back_s = -math.inf  # from when on it is used again
        self._writes_back_s = -math.inf  # the same for writes: a full disk can still be read
        self._tries = 0  # writes in succession for which there was no room

    def __contains__(self, key: Key) -> bool:
        return self.is_usable and key in self.store

    @property
    def is_usable(self) -> bool:
        """Whether it is open, did not fail a moment ago, and has answered so far."""
        is_stuck = bool(self._late) or any(one.is_late for one in self.writing)
        one = self.opening
        is_open = one is not None and one.done() and one.exception() is None
        return is_open and not is_stuck and self._now() >= self._back_s

    def poll(self) -> tuple[list[HostUnit], list[int]]:
        """Takes what has come; waits for nothing. Returns units that were written, and slots of
        reads that no request waited for."""
        if self._now() - self._sure_s > AGAIN_S:
            self._sure, self._sure_s = set(), self._now()
        self._follow_opening()
        self._end_searches()
        written = self._end_writes()
        over = [read for read in self._late if read.result.done()]
        self._late = [read for read in self._late if read not in over]
        return written, [slot for read in over for slot in read.slots]

    def _follow_opening(self) -> None:
        if self.opening is None:
            if self._now() >= self._back_s:
                self.opening = self.store.open()
        elif self.opening.done() and (error := self.opening.exception()) is not None:
            self._fail(str(error))

    def _fail(self, text: str) -> None:
        self.counts.failures += 1
        if self._now() >= self._back_s:
            LOG.warning("KV in %s is not used for %g s: %s", self.store.name, AGAIN_S, text)
        self._back_s = self._now() + AGAIN_S
        self.opening = None

    # To the store.

    def lacks(self, key: Key, num_bytes: int) -> bool:
        """Whether a unit of so many bytes could be written now, and neither was nor is."""
        if not self.is_writable or key in self.store:
            return False
        if any(one.key == key for one in self.writing):
            return False
        return self.store.has_room_for(num_bytes)

    @property
    def is_writable(self) -> bool:
        """Whether it is used, and no write has failed a moment ago."""
        return self.is_usable and self._now() >= self._writes_back_s

    @property
    def may_write(self) -> bool:
        """Whether it takes one more unit now."""
        return self.is_writable and len(self.writing) < self.store.most_writes

    def goes_on(self, since_s: float) -> bool:
        """Whether units that are there since this moment are still on their way to it: one was
        written a moment ago, or could not be yet."""
        return self.is_writable and self._now() - max(since_s, self._written_s) <= KEEP_S

    def write(self, key: Key, kept: HostUnit, views: Sequence[memoryview]) -> None:
        """Starts to write a unit, which has one more reader until `poll` returns it."""
        kept.num_readers += 1
        result = self.store.keep(key, kept.before, partial(_facts, kept), views)
        num_bytes = sum(view.nbytes for view in views)
        self.writing.append(Writing(key, kept, num_bytes, result, self._now()))

    def _end_writes(self) -> list[HostUnit]:
        now, over = self._now(), []
        for one in list(self.writing):
            if one.result.done():
                self.writing.remove(one)
                self._end_write(one)
                over.append(one.kept)
            elif not one.is_late and now - max(one.began_s, self._written_s) > WRITE_S:
                one.is_late = True
                self._fail(f"a write did not end within {WRITE_S:g} s")
        return over

    def _end_write(self, one: Writing) -> None:
        self._written_s = self._answered_s = self._now()
        try:
            size = one.result.result()
        except ConnectionError as error:
            self._fail(str(error))
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._makes_room(one.num_bytes):
                self._fail_writes(str(error))
        else:
            self._tries = 0
            self.store.kept(one.key, one.kept.before, size)
            self._sure.add(one.key)
            self.counts.kept += size
            if one.kept.is_forgotten:
                self.store.forget(one.key)

    def _makes_room(self, num_bytes: int) -> bool:
        """Whether older units leave a disk that is smaller than its limit, so that a next write may
        succeed."""
        self._tries += 1
        return self._tries <= _MOST_TRIES and self.store.make_room(num_bytes)

    def _fail_writes(self, text: str) -> None:
        self._tries = 0
        self.counts.failures += 1
        if self._now() >= self._writes_back_s:
            LOG.warning("no KV is written to %s for %g s: %s", self.store.name, AGAIN_S, text)
        self._writes_back_s = self._now() + AGAIN_S

    # From the store.

    def seek(self, units: Mapping[Key, Key]) -> Search | None:
        """Starts to look for successive units that the store is not known to have; None if that is
        no use."""
        if not units or not self.is_usable or (result := self.store.find(units)) is None:
            return None
        self.searches.append(Search(units, result, self._now()))
        return self.searches[-1]

    def confirm(self, keys: Iterable[Key]) -> None:
        """Asks again for units that it had half a minute ago: it may have evicted them since."""
        known = [key for key in keys if key in self.store and key not in self._sure]
        self._sure.update(known)
        self.seek({key: self.store.before(key) for key in known})

    def _end_searches(self) -> None:
        for search in list(self.searches):
            if search.result.done():
                self._end_search(search)
                self.searches.remove(search)
            elif self._now() - max(search.began_s, self._answered_s) > FIND_S:
                self._fail(f"a search did not end within {FIND_S:g} s")
                self.searches.clear()
                return

    def _end_search(self, search: Search) -> None:
        try:
            count = search.result.result()
        except OSError as error:
            self._fail(str(error))
            return
        self._answered_s = self._now()
        for at, (key, before) in enumerate(search.units.items()):
            if at < count and key not in self.store:
                self.store.kept(key, before, 0)
            elif at >= count and self.store.lose(key) is not None:
                self.lost.append(key)
        self._sure.update(list(search.units)[:count])

    def read(self, key: Key, slots: tuple[int, ...], views: Sequence[memoryview]) -> Read:
        """Starts to read a unit that it has."""
        self.store.touch(key)
        return Read(key, self, slots, self.store.load(key, views), self._now())

    def is_awaited(self, read: Read) -> bool:
        """Whether it goes on, and has the time to."""
        began_s = max(read.began_s, self._answered_s)
        return not read.result.done() and self._now() - began_s <= READ_S

    def end_read(self, read: Read, num_bytes: int) -> UnitFacts | None:
        """A read of so many bytes is not awaited any more: the unit's facts if it has come. If it
        still goes on, `poll` returns its slots later."""
        if not read.result.done():
            self.abandon(read)
            self._fail(f"a read did not end within {READ_S:g} s")
            return None
        now, began_s = self._now(), max(read.began_s, self._read_s)
        self._read_s = self._answered_s = now
        try:
            facts = read.result.result()
        except (OSError, ValueError) as error:
            self._fail_read(read.key, error)
            return None
        if read.key not in self.store:  # dropped meanwhile
            return None
        self.counts.read += num_bytes
        self.reading.note(num_bytes, now - began_s, now)
        return facts

    def _fail_read(self, key: Key, error: OSError | ValueError) -> None:
        again = "a unit of KV could not be read, and is computed again: %s"
        match error:
            case FileNotFoundError():  # another process has removed it
                self.store.lose(key)
            case PermissionError():  # of another user
                self.counts.failures += 1
                LOG.warning(again, error)
                self.store.lose(key)
            case OSError():  # perhaps of all units, and over soon
                self._fail(str(error))
                if error.errno == errno.EIO:  # or of this one for ever
                    self.store.lose(key)
            case _:
                self.counts.corrupt += 1
                LOG.warning(again, error)
                self.store.forget(key)

    def is_late(self, read: Read) -> bool:
        """Whether `poll` returns its slots."""
        return read in self._late

    def abandon(self, read: Read) -> None:
        """No request waits for it any more. It has not begun if there are many."""
        read.result.cancel()
        self._late.append(read)


def _facts(kept: HostUnit) -> UnitFacts:
    """In the store's thread, because a row on a GPU comes only after queued work."""
    row = kept.boundary
    raw = b"" if row is None else row.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return UnitFacts(kept.digest, raw)
