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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

_MAGIC: Final = b"effuse1\n"
_HEAD: Final = struct.Struct("<8s16s16sQQ")  # magic, seal, digest, boundary's bytes, KV bytes
_MOST_BOUNDARY: Final = 1 << 20  # bytes
_READERS: Final = 2
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
        self._writer = ThreadPoolExecutor(1, "unit-files-write")
        self._readers = ThreadPoolExecutor(_READERS, "unit-files-read")
        self._scan()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def size_of(self, key: bytes) -> int:
        """Bytes of the unit's file."""
        return self._known[key][1]

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
        self._known[key] = before, size
        self.num_bytes += size
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
            threads.shutdown(wait=False, cancel_futures=True)

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


def _head(key: bytes, facts: FileFacts, views: Sequence[memoryview]) -> bytes:
    size = sum(view.nbytes for view in views)
    head = _MAGIC, facts.seal(key), facts.digest, len(facts.boundary), size
    return _HEAD.pack(*head) + facts.boundary


def _write(path: Path, head: bytes, views: Sequence[memoryview]) -> int:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
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
    path.touch()  # the next process counts it as used
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
