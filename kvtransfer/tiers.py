"""Units of KV outside of a pool: in host memory, and in files.

The host's least recently used units go to files before their room is needed. Files that fail or do
not answer count as absent for a while. Accounting and policy: `host_pages.py` copies,
`unit_files.py` reads and writes, and `tiered_cache.py` moves units from and to the pool.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Protocol

import torch
from torch import Tensor

from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.pool import FreeRuns
from effuse.kvtransfer.unit_files import FileFacts, UnitFiles
from effuse.kvtransfer.units import Key

LOG = logging.getLogger(__name__)

READ_S: Final = 1.0
"""Time for files to be read; then their units are computed."""
WRITE_S: Final = 10.0
"""Time for one to be written."""
AGAIN_S: Final = 30.0
"""How long files are not used after one has failed, and a slower way is not measured again."""
_FREE_SHARE: Final = 8  # of the host's slots, one in so many is kept free by writing to files
_LOOKED_AT: Final = 16  # units that leave the host next
_MOST_WRITES: Final = 2
_GAIN: Final = 1 / 4


class Host(Protocol):
    """Slots of a page each, and copies from and to the pool's pages."""

    num_slots: int
    page_bytes: int

    def save(self, page_ids: Sequence[int], slots: Sequence[int]) -> DigestJob:
        """Starts to copy pages to slots."""
        ...

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> DigestJob:
        """Starts to copy slots to pages."""
        ...

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Writable bytes of slots."""
        ...


class Rate:
    """Measured seconds of an amount of work, of which the latest counts most."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured_s = -math.inf  # moment of the last measurement

    def note(self, amount: float, seconds: float, now: float) -> None:
        """So much work took so long, and has ended now."""
        keep = 1 - _GAIN
        self._amount = keep * self._amount + amount
        self._seconds = keep * self._seconds + seconds
        self.measured_s = now

    def seconds(self, amount: float) -> float:
        """Expected seconds of so much work; 0 while none was measured."""
        return self._seconds * amount / self._amount if self._amount else 0.0


@dataclass(slots=True, eq=False)
class HostUnit:
    """A unit in host memory."""

    slots: tuple[int, ...]
    digest: bytes
    before: Key
    boundary: Tensor | None  # [hidden_size], on the pool's device
    num_readers: int = 0  # copies and writes that read the slots
    is_gone: bool = False  # forgotten: its slots are free once nothing reads them


@dataclass(slots=True, eq=False)
class Read:
    """A unit on its way from a file to host memory."""

    key: Key
    slots: tuple[int, ...]
    result: "Future[FileFacts]"
    began_s: float


@dataclass(slots=True, eq=False)
class Writing:
    """A unit on its way to a file."""

    key: Key
    kept: HostUnit
    result: "Future[int]"
    began_s: float
    is_late: bool = False


@dataclass(slots=True)
class TierCounts:
    """Bytes of KV that have moved so far, and faults."""

    saved: int = 0  # to host memory
    loaded: int = 0  # into the pool
    filed: int = 0  # written to files
    read: int = 0  # from files
    corrupt: int = 0  # units whose digest was wrong
    failures: int = 0  # of files: errors, and times that one did not answer


class Tiers:
    """Units in host memory and files, by key."""

    def __init__(
        self,
        host: Host,
        files: UnitFiles | None,
        *,
        now: Callable[[], float],
        row_dtype: torch.dtype = torch.float32,
        row_device: torch.device | str = "cpu",
    ) -> None:
        """Rows are boundary rows; theirs in files become tensors of this type, on this device."""
        self.host = host
        self.counts = TierCounts()
        # Seconds of bytes. Copies to the host do not count: most are small, and seen to end late.
        self.copying, self.reading = Rate(), Rate()
        self.kept: OrderedDict[Key, HostUnit] = OrderedDict()  # least recently used first
        self.now = now
        self._files = files
        self._row_dtype, self._row_device = row_dtype, row_device
        self._free = FreeRuns(host.num_slots)
        self._late: list[Read] = []  # no request waits for them
        self._writing: list[Writing] = []
        self._read_s = -math.inf  # when the last read ended
        self._files_back_s = -math.inf  # from when on files are used again
        self._writes_back_s = -math.inf  # the same for writes: a full disk can still be read

    def __contains__(self, key: Key) -> bool:
        return key in self.kept or ((files := self._usable_files) is not None and key in files)

    @property
    def num_slots(self) -> int:
        """Slots of host memory in use."""
        return self.host.num_slots - len(self._free)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return self._files.num_bytes if self._files else 0

    def close(self) -> None:
        """Waits for no file."""
        if self._files:
            self._files.close()

    # Host memory.

    def take_slots(self, count: int) -> tuple[int, ...] | None:
        """Slots, for which the least recently used units leave; None if there are too few now."""
        if count > self.host.num_slots:
            return None
        while len(self._free) < count:
            key = next((key for key, kept in self.kept.items() if not kept.num_readers), None)
            if key is None:
                return None
            if self._lacks_file(key):
                self._write(key)
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
        else:
            self.kept[key] = kept

    def use(self, key: Key) -> HostUnit:
        """A unit of the host, whose slots have one more reader."""
        kept = self.kept[key]
        kept.num_readers += 1
        self.kept.move_to_end(key)
        return kept

    def unread(self, kept: HostUnit) -> None:
        """One reader less."""
        kept.num_readers -= 1
        if kept.is_gone and not kept.num_readers:
            self.give_slots(kept.slots)

    def befores(self) -> Iterator[tuple[Key, Key]]:
        """Each unit, and the unit before it; some twice."""
        yield from () if self._files is None else self._files.befores()
        yield from ((key, kept.before) for key, kept in self.kept.items())

    def forget(self, key: Key) -> None:
        """No request finds the unit any more."""
        if key in self.kept:
            self._leave_host(key)
        if self._files:
            self._files.forget(key)

    def _leave_host(self, key: Key) -> None:
        kept = self.kept.pop(key)
        kept.is_gone = True
        if not kept.num_readers:
            self.give_slots(kept.slots)

    # From the host to files.

    @property
    def _usable_files(self) -> UnitFiles | None:
        """The files, unless they failed a moment ago or have not answered yet."""
        is_stuck = bool(self._late) or any(one.is_late for one in self._writing)
        return None if is_stuck or self.now() < self._files_back_s else self._files

    def poll(self) -> None:
        """Goes on with files; waits for none."""
        self._end_files()
        self._write_ahead()

    def _write_ahead(self) -> None:
        """Writes units that will leave the host next, while some of its room is left."""
        if len(self._free) >= self.host.num_slots // _FREE_SHARE:
            return
        for key, kept in list(islice(self.kept.items(), _LOOKED_AT)):
            if not kept.num_readers and self._lacks_file(key):
                self._write(key)

    def _lacks_file(self, key: Key) -> bool:
        """Whether a unit of the host could be written to a file now, and is in none."""
        files, kept = self._usable_files, self.kept[key]
        if files is None or key in files or self.now() < self._writes_back_s:
            return False
        num_row = 0 if kept.boundary is None else kept.boundary.nbytes
        return files.has_room_for(len(kept.slots) * self.host.page_bytes + num_row)

    def _write(self, key: Key) -> None:
        if self._files is None or len(self._writing) >= _MOST_WRITES:
            return
        kept = self.kept[key]
        kept.num_readers += 1
        views = self.host.views(kept.slots)
        result = self._files.begin_write(key, kept.before, partial(_facts, kept), views)
        self._writing.append(Writing(key, kept, result, self.now()))

    def _end_files(self) -> None:
        """Takes the results of writes, and of abandoned reads."""
        now, left = self.now(), []
        for one in self._writing:
            if one.result.done():
                self._end_write(one)
                continue
            left.append(one)
            if not one.is_late and now - one.began_s > WRITE_S:
                one.is_late = True
                self._fail_files(f"a write was not over after {WRITE_S:g} s")
        self._writing = left
        for read in [read for read in self._late if read.result.done()]:
            self._late.remove(read)
            self.give_slots(read.slots)

    def _end_write(self, one: Writing) -> None:
        assert self._files is not None, "it was written"
        try:
            size = one.result.result()
        except OSError as error:
            self._fail_writes(str(error))
        else:
            self._files.written(one.key, one.kept.before, size)
            self.counts.filed += size
            if one.kept.is_gone:
                self._files.forget(one.key)
        self.unread(one.kept)

    def _fail_writes(self, text: str) -> None:
        self.counts.failures += 1
        if self.now() >= self._writes_back_s:
            LOG.warning("no KV is written to files for %g s: %s", AGAIN_S, text)
        self._writes_back_s = self.now() + AGAIN_S

    def _fail_files(self, text: str) -> None:
        self.counts.failures += 1
        if self.now() >= self._files_back_s:
            LOG.warning("KV in files is not used for %g s: %s", AGAIN_S, text)
        self._files_back_s = self.now() + AGAIN_S

    # From files to the host.

    def begin_read(self, key: Key, count: int) -> Read | None:
        """Starts to read a unit of so many pages; None if that cannot be now."""
        files, slots = self._usable_files, self.take_slots(count)
        if slots is None or files is None or key not in files:
            self.give_slots(slots or ())
            return None
        files.touch(key)
        result = files.begin_read(key, self.host.views(slots))
        return Read(key, slots, result, self.now())

    def is_awaited(self, read: Read) -> bool:
        """Whether it goes on, and has the time to."""
        return not read.result.done() and self.now() - read.began_s <= READ_S

    def end_read(self, read: Read) -> bool:
        """A read is not awaited any more: whether the unit is in host memory now."""
        assert self._files is not None, "it was read"
        if not read.result.done():
            self.abandon([read])
            if self._read_s < read.began_s:  # no other one has ended meanwhile
                self._fail_files(f"a read was not over after {READ_S:g} s")
            return False
        try:
            facts = read.result.result()
        except FileNotFoundError:  # another process has removed it
            self._files.forget(read.key)
        except PermissionError as error:  # of another user
            self.counts.failures += 1
            LOG.warning("a unit of KV could not be read, and is computed again: %s", error)
            self._files.forget(read.key)
        except OSError as error:
            self._fail_files(str(error))
            self._files.forget(read.key)
        except ValueError as error:
            self.counts.corrupt += 1
            LOG.warning("a unit of KV could not be read, and is computed again: %s", error)
            self._files.forget(read.key)
        if read.key not in self._files:  # failed, or dropped meanwhile
            self.give_slots(read.slots)
            return False
        before, row = self._files.before(read.key), self._row(facts.boundary)
        self.keep(read.key, HostUnit(read.slots, facts.digest, before, row))
        num_bytes, now = len(read.slots) * self.host.page_bytes, self.now()
        self.counts.read += num_bytes
        self.reading.note(num_bytes, now - max(read.began_s, self._read_s), now)
        self._read_s = now
        return True

    def abandon(self, reads: Sequence[Read]) -> None:
        """No request waits for these any more; their slots are free once they end. Most
        have not begun if there are many."""
        for read in reads:
            read.result.cancel()
        self._late += reads

    def _row(self, raw: bytes) -> Tensor | None:
        if not raw:
            return None
        return torch.frombuffer(bytearray(raw), dtype=self._row_dtype).to(self._row_device)


def _facts(kept: HostUnit) -> FileFacts:
    """In the file's thread, because a row on a GPU comes only after queued work."""
    row = kept.boundary
    raw = b"" if row is None else row.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return FileFacts(kept.digest, raw)
