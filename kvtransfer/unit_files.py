"""Files of units: KV that outlives the memory of its worker, and its process.

One file for each unit, in a directory for one model and layout. Its name has the unit's key and
that of the unit before, so a process that starts finds the files of earlier ones. Threads read and
write, because a disk may take any time. A file appears whole or not at all, and its bytes are
checked by their digest where they arrive.
"""

import contextlib
import os
import re
import stat
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from io import BufferedReader
from pathlib import Path
from typing import Final

from effuse.kvtransfer.stores import HEAD, Facts, UnitFacts, UnitStore, size_of_boundary, unpack
from effuse.kvtransfer.units import KEY_BYTES, Key

_HEX: Final = f"([0-9a-f]{{{2 * KEY_BYTES}}})"
_NAME: Final = re.compile(rf"{_HEX}\.{_HEX}?")
_LEFT_S: Final = 3600.0  # after which an unfinished file has no writer any more


class UnitFiles(UnitStore):
    """The files of one directory, at most `most_bytes` of them. All are known."""

    kind = "file"
    name = "files"

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Finds the files of earlier processes. Raises OSError if the directory cannot be."""
        super().__init__(most_bytes)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._scan()

    def load(self, key: Key, views: Sequence[memoryview]) -> "Future[UnitFacts]":
        return self._readers.submit(_read, self._path(key, self.before(key)), key, views)

    def keep(
        self, key: Key, before: Key, facts: Facts, views: Sequence[memoryview]
    ) -> "Future[int]":
        return self._writer.submit(_write, self._path(key, before), key, facts, views)

    def remove(self, key: Key, before: Key) -> None:
        self._writer.submit(_remove, self._path(key, before))

    def _path(self, key: Key, before: Key) -> Path:
        return self._directory / f"{key.hex()}.{before.hex()}"

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):  # it is gone
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".partial"):
                    if time.time() - status.st_mtime > _LEFT_S:
                        Path(entry.path).unlink()
                    continue
                if (name := _NAME.fullmatch(entry.name)) and stat.S_ISREG(status.st_mode):
                    key, before = map(bytes.fromhex, name.groups(""))
                    found.append((status.st_mtime, key, before, status.st_size))
        for _, key, before, size in sorted(found):
            self.kept(key, before, size)


def _write(path: Path, key: Key, facts: Facts, views: Sequence[memoryview]) -> int:
    head = facts().pack(key, sum(view.nbytes for view in views))
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb", opener=_private) as file:
            size = file.write(head) + sum(map(file.write, views))
        partial.replace(path)
    except OSError:
        _remove(partial)
        raise
    return size


def _read(path: Path, key: Key, views: Sequence[memoryview]) -> UnitFacts:
    with path.open("rb") as file:
        size = sum(view.nbytes for view in views)
        head = _exactly(file, HEAD.size)
        try:
            head += _exactly(file, size_of_boundary(head, size))
            facts = unpack(head, key, size)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        for view in views:
            _fill(file, view)
        with contextlib.suppress(OSError):  # a disk that can only be read
            os.utime(file.fileno())  # the next process counts it as used
    return facts


def _exactly(file: BufferedReader, count: int) -> bytes:
    data = bytearray(count)
    _fill(file, memoryview(data))
    return bytes(data)


def _fill(file: BufferedReader, view: memoryview) -> None:
    if file.readinto(view) < view.nbytes:
        raise ValueError("the file is shorter than its header states")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user reads, because KV follows from texts."""
    return os.open(path, flags, 0o600)
