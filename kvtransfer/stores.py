"""Stores of units of KV outside of an engine's memory, with one protocol.

A unit is stored as a header with the digest of its pages, then its KV. Threads do the work,
because a disk or a network may take any time.
"""

import math
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeVar

import xxhash

from effuse.kvtransfer.units import Key

HEAD: Final = struct.Struct("<8s16s16sQQ")  # magic, seal, digest, boundary's bytes, KV bytes
MOST_BOUNDARY: Final = 1 << 20  # bytes
MOST_KNOWN: Final = 1 << 18  # units of a store with a limit of its own
_MAGIC: Final = b"effuse1\n"
READERS: Final = 2
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """Content of a unit beside the KV: the digest of its pages, and a raw boundary row if any."""

    digest: bytes
    boundary: bytes = b""

    def seal(self, key: Key) -> bytes:
        """A digest of the unit's key and of these facts."""
        return xxhash.xxh3_128_digest(key + self.digest + self.boundary)

    def pack(self, key: Key, num_bytes: int) -> bytes:
        """Bytes that come before so many bytes of KV."""
        head = _MAGIC, self.seal(key), self.digest, len(self.boundary), num_bytes
        return HEAD.pack(*head) + self.boundary


Facts = Callable[[], UnitFacts]


def size_of_boundary(head: bytes, num_bytes: int) -> int:
    """Bytes that follow the first `HEAD.size` before the KV. Raises ValueError for bytes of another
    kind, or if they do not announce so many bytes of KV."""
    magic, _, _, num_boundary, found = HEAD.unpack(head)
    if magic != _MAGIC or num_boundary > MOST_BOUNDARY:
        raise ValueError("not a unit of KV")
    if found != num_bytes:
        raise ValueError(f"expected {num_bytes} bytes of KV, got {found}")
    return int(num_boundary)


def unpack(raw: bytes, key: Key, num_bytes: int) -> UnitFacts:
    """The facts before so many bytes of KV. Raises ValueError if they are not those of `key`."""
    if len(raw) < HEAD.size or len(raw) - HEAD.size != size_of_boundary(
        raw[: HEAD.size], num_bytes
    ):
        raise ValueError("its header is incomplete")
    _, seal, digest, _, _ = HEAD.unpack(raw[: HEAD.size])
    facts = UnitFacts(digest, raw[HEAD.size :])
    if facts.seal(key) != seal:
        raise ValueError("its header's digest is wrong")
    return facts


class UnitStore(ABC):
    """Units by key outside of host memory, as far as they are known here: least recently used ones
    first, which are removed beyond `most_bytes`.

    `open`, `find`, `load` and `keep` return at once. Their results raise ConnectionError if nothing
    of the store can be used now, and other OSErrors if this unit cannot.
    """

    kind: str  # in names of metrics
    name: str  # in log lines
    keeps_all = False  # and not only units that leave host memory
    most_writes = 2  # that may wait at the same time
    number = 0  # of a store of several workers: equal for those that find each other's units

    def __init__(self, most_bytes: float = math.inf) -> None:
        # No search waits for a read. One thread writes, because a unit may be forgotten and written
        # again while its first write goes on.
        self._finder, self._readers, self._writer = Threads(1), Threads(READERS), Threads(1)
        self.num_bytes = 0  # of all units
        self._most_bytes = most_bytes
        self._known: OrderedDict[Key, tuple[Key, int]] = OrderedDict()  # unit before, bytes

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def before(self, key: Key) -> Key:
        """Key of the unit before this one; empty for the first of a text."""
        return self._known[key][0]

    def befores(self) -> Iterator[tuple[Key, Key]]:
        """Each unit, and the unit before it."""
        return ((key, before) for key, (before, _) in self._known.items())

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether a unit with so many bytes of KV and boundary may be written at all."""
        return HEAD.size + num_bytes <= self._most_bytes

    def touch(self, key: Key) -> None:
        """The unit was used."""
        if key in self._known:
            self._known.move_to_end(key)

    def kept(self, key: Key, before: Key, size: int) -> None:
        """A unit of so many bytes is there. Makes room for it."""
        self.num_bytes += size - self._known.get(key, (before, 0))[1]
        self._known[key] = before, size
        while self.num_bytes > self._most_bytes:
            self.forget(next(iter(self._known)))
        while self.keeps_all and len(self) > MOST_KNOWN:  # which has its own limit
            self.lose(next(iter(self._known)))

    def make_room(self, num_bytes: int) -> bool:
        """Removes the least recently used units, which have at least so many bytes together if
        there are enough. False if no unit is left, or if the store itself removes units."""
        if self.keeps_all or not self._known:
            return False
        least = self.num_bytes - num_bytes
        while self._known and self.num_bytes > least:
            self.forget(next(iter(self._known)))
        return True

    def forget(self, key: Key) -> None:
        """Removes a unit, if it is known."""
        if (before := self.lose(key)) is not None:
            self.remove(key, before)

    def lose(self, key: Key) -> Key | None:
        """A unit is not known any more, and not removed. Returns the unit before it if it was."""
        before, size = self._known.pop(key, (None, 0))
        self.num_bytes -= size
        return before

    def open(self) -> "Future[object]":
        """Starts to connect, or to find out whether a connection still works."""
        opened: Future[object] = Future()
        opened.set_result(None)
        return opened

    def find(self, units: Mapping[Key, Key]) -> "Future[int] | None":
        """Starts to look for successive units, each with the one before it; the result is how many
        first ones are there. None if all units of the store are known."""
        return None

    @abstractmethod
    def load(self, key: Key, views: Sequence[memoryview]) -> "Future[UnitFacts]":
        """Starts to fill views with a known unit. The result raises FileNotFoundError for one that
        is gone, and ValueError for one that is cut or foreign."""

    @abstractmethod
    def keep(
        self, key: Key, before: Key, facts: Facts, views: Sequence[memoryview]
    ) -> "Future[int]":
        """Starts to write a unit; its bytes must not change before the result, the number of bytes.
        A thread calls `facts`."""

    @abstractmethod
    def remove(self, key: Key, before: Key) -> None:
        """Starts to remove a unit."""

    def close(self) -> None:
        """Waits for nothing: a thread may be in a call that never ends."""
        for threads in (self._finder, self._readers, self._writer):
            threads.close()


class Threads:
    """Daemons that run functions. The interpreter waits at its end for an executor's threads, and
    one of these may be in a call that never ends."""

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = count
        self._has_begun = self._is_closed = False

    def submit(self, run: Callable[..., _Result], *values: object) -> "Future[_Result]":
        """Runs it in a thread, unless the future is cancelled before."""
        if not self._has_begun:
            self._has_begun = True
            for _ in range(self._count):
                Thread(target=self._run, name="units", daemon=True).start()
        future: Future[_Result] = Future()
        self._work.put(partial(self._do, future, partial(run, *values)))
        return future

    def close(self) -> None:
        """Cancels the work that has not begun."""
        self._is_closed = True
        for _ in range(self._count):
            self._work.put(None)

    def _do(self, future: "Future[_Result]", run: Callable[[], _Result]) -> None:
        if self._is_closed:
            future.cancel()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(run())
            except Exception as error:  # noqa: BLE001  the reader of the result gets it
                future.set_exception(error)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
