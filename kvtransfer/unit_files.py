"""Files of units: KV that outlives the memory of its worker, and its process.

One file for each unit, in a directory for one model and layout. Its name has the unit's key and
that of the unit before, so a process that starts finds the files of earlier ones. Threads read and
write, because a disk may take any time. A file appears whole or not at all, and its bytes are
checked by their digest where they arrive.
"""

import contextlib
import os
import struct
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeVar

import xxhash

_MAGIC: Final = b"effuse1\n"
_HEAD: Final = struct.Struct("<8s16s16sQQ")  # magic, seal, digest, boundary's bytes, KV bytes
_MOST_BOUNDARY: Final = 1 << 20  # bytes
_READERS: Final = 2
_Result = TypeVar("_Result")
_LEFT_S: Final = 3600.0  # after which an unfinished file has no writer any more


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Content of a file beside the KV: the digest of its pages, and a raw boundary row if any."""

    digest: bytes
    boundary: bytes = b""

    def seal(self, key: bytes) -> bytes:
        """A digest of the rest of a unit's file."""
        return xxhash.xxh3_128_digest(key + self.digest + self.boundary)


class UnitFiles:
    """The files of one directory, at most `most_bytes` of them: the least recently used one goes
    first. `begin_*` return at once; all other work is done by threads.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Finds the files of earlier processes. Raises OSError if the directory cannot be."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.num_bytes = 0  # of all files
        self._directory = directory
        self._most_bytes = most_bytes
        self._known: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # unit before, bytes
        # A unit may be forgotten and written again while its first write goes on.
        self._writer = _Threads(1)
        self._readers = _Threads(_READERS)
        self._scan()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def size_of(self, key: bytes) -> int:
        """Bytes of the unit's file."""
        return self._known[key][1]

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether a unit with so many bytes of KV and boundary may be written at all."""
        return _HEAD.size + num_bytes <= self._most_bytes

    def before(self, key: bytes) -> bytes:
        """Key of the unit before this one; empty for the first of a text."""
        return self._known[key][0]

    def befores(self) -> Iterator[tuple[bytes, bytes]]:
        """Each unit, and the unit before it."""
        return ((key, before) for key, (before, _) in self._known.items())

    def touch(self, key: bytes) -> None:
        """The unit was used."""
        if key in self._known:
            self._known.move_to_end(key)

    def begin_write(
        self,
        key: bytes,
        before: bytes,
        facts: Callable[[], FileFacts],
        views: Sequence[memoryview],
    ) -> "Future[int]":
        """Starts to write a unit; its bytes must not change before the result, the file's size.
        `facts` is called by the thread.
        """

        def write() -> int:
            return _write(self._path(key, before), _head(key, facts(), views), views)

        return self._writer.submit(write)

    def written(self, key: bytes, before: bytes, size: int) -> None:
        """A file of so many bytes was written. Makes room for it."""
        self.num_bytes += size - self._known.get(key, (before, 0))[1]
        self._known[key] = before, size
        while self.num_bytes > self._most_bytes:
            self.forget(next(iter(self._known)))

    def begin_read(self, key: bytes, views: Sequence[memoryview]) -> "Future[FileFacts]":
        """Starts to read a unit. The result raises OSError or ValueError for a file that is gone,
        cut or foreign.
        """
        return self._readers.submit(_read, self._path(key, self._known[key][0]), key, views)

    def forget(self, key: bytes) -> None:
        """Removes a file, if there is one."""
        before, size = self._known.pop(key, (b"", -1))
        if size >= 0:
            self.num_bytes -= size
            self._writer.submit(_remove, self._path(key, before))

    def close(self) -> None:
        """Waits for no thread: one may be in a disk that never answers."""
        for threads in (self._writer, self._readers):
            threads.close()

    def _path(self, key: bytes, before: bytes) -> Path:
        return self._directory / f"{key.hex()}.{before.hex()}"

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError, ValueError):  # gone, or no file of ours
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".partial"):
                    if time.time() - status.st_mtime > _LEFT_S:
                        Path(entry.path).unlink()
                    continue
                key, before = map(bytes.fromhex, entry.name.split("."))
                found.append((status.st_mtime, key, before, status.st_size))
        for _, key, before, size in sorted(found):
            self.written(key, before, size)


class _Threads:
    """Daemons that run functions. The interpreter waits at its end for an executor's threads, and
    one of these may be in a disk that never answers.
    """

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = count
        self._is_closed = False
        for _ in range(count):
            Thread(target=self._run, name="unit-files", daemon=True).start()

    def submit(self, run: Callable[..., _Result], *values: object) -> "Future[_Result]":
        """Runs it in a thread, unless the future is cancelled before."""
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


def _head(key: bytes, facts: FileFacts, views: Sequence[memoryview]) -> bytes:
    size = sum(view.nbytes for view in views)
    head = _MAGIC, facts.seal(key), facts.digest, len(facts.boundary), size
    return _HEAD.pack(*head) + facts.boundary


def _write(path: Path, head: bytes, views: Sequence[memoryview]) -> int:
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb", buffering=0, opener=_private) as file:
            size = sum(_write_all(file.fileno(), part) for part in (memoryview(head), *views))
        partial.replace(path)
    except OSError:
        _remove(partial)
        raise
    return size


def _write_all(descriptor: int, data: memoryview) -> int:
    at = 0
    while at < data.nbytes:
        at += os.write(descriptor, data[at:])
    return at


def _read(path: Path, key: bytes, views: Sequence[memoryview]) -> FileFacts:
    with path.open("rb", buffering=0) as file:
        size = sum(view.nbytes for view in views)
        head = _HEAD.unpack(_exactly(file.fileno(), _HEAD.size))
        magic, seal, digest, num_boundary, found = head
        if magic != _MAGIC or num_boundary > _MOST_BOUNDARY:
            raise ValueError(f"{path.name}: it is no file of a unit")
        if found != size:
            raise ValueError(f"{path.name}: expected {size} bytes of KV, got {found}")
        facts = FileFacts(digest, _exactly(file.fileno(), num_boundary))
        if facts.seal(key) != seal:
            raise ValueError(f"{path.name}: its seal is wrong")
        for view in views:
            _fill(file.fileno(), view)
        with contextlib.suppress(OSError):  # a disk that can only be read
            os.utime(file.fileno())  # the next process counts it as used
    return facts


def _exactly(descriptor: int, count: int) -> bytes:
    data = bytearray(count)
    _fill(descriptor, memoryview(data))
    return bytes(data)


def _fill(descriptor: int, view: memoryview) -> None:
    at = 0
    while at < view.nbytes:
        if not (count := os.readv(descriptor, [view[at:]])):
            raise ValueError("the file is shorter than it says")
        at += count


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user reads, because KV follows from texts."""
    return os.open(path, flags, 0o600)
