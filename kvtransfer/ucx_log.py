"""What UCX says it moves bytes with: its tables of protocols, read out of its log.

UCX tells nobody else. The log goes to a file in memory, since UCX holds back what it writes, and
whatever is no table goes on to our own log.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import UNKNOWN, Route

LOG = logging.getLogger(__name__)

FILE, TABLES = "UCX_LOG_FILE", "UCX_PROTO_INFO"
WRITES = "*put*"  # of all operations, those whose tables are wanted
# Beside these, GPUs' pages go from device to device.
SLOW = {"tcp", "self", "cma", "knem", "xpmem", "posix", "sysv", "cuda_copy", "gdr_copy"}
_DIRECT = {"zero-copy", "short"}
_PREFIX = re.compile(r"^\[\d+\.\d+\] \[[^\]]*\] *")
_LANE = re.compile(r"\b([a-z]\w*)/[\w:.-]+")
_RANGE = re.compile(r"(\d+)([KMG]?)(?:\.\.(?:(\d+)([KMG]?)|(inf)))?$")
_BAD = re.compile(r"UCX +(WARN|ERROR|FATAL)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Row:
    """How messages of first to last bytes are sent; last is None where there is no end."""

    first: int
    last: int | None
    how: str  # such as zero-copy
    lanes: tuple[str, ...]  # transports, such as cuda_ipc


@dataclass(frozen=True, slots=True)
class Table:
    """How one operation is done over one kind of connection."""

    scope: str  # self, intra-node or inter-node
    title: str  # of the operation, with the memory at both ends
    rows: tuple[Row, ...]


@dataclass(slots=True)
class Reader:
    """Takes in the log line by line."""

    tables: list[Table] = field(default_factory=list)
    _cells: list[str] = field(default_factory=list)  # of the table that has begun

    def take(self, line: str) -> str | None:
        """Takes a line in; the text of one that is of no table."""
        text = _PREFIX.sub("", line).strip()
        if text.startswith("|") and text.endswith("|"):
            self._cells.append(text.strip("|").strip())
            return None
        if not (text.startswith("+-") and text.endswith("-+")):
            return text or None
        if len(self._cells) > 3:  # the line below the rows
            self.tables.append(_table(self._cells))
            self._cells.clear()
        return None


def route_of(
    tables: Iterable[Table], *, on_gpu: bool, num_bytes: int, scope: str | None = None
) -> Route:
    """What writes of so many bytes of pages take by these tables, those of one scope or, without
    it or where it has none, all but self; where they differ, all names."""
    memory = " from cuda" if on_gpu else " from host"
    meant = [
        table
        for table in tables
        if table.scope != "self" and "ucp_put" in table.title and memory in table.title
    ]
    # To UCX pods of one node may be on two.
    rows = [
        row
        for table in [one for one in meant if one.scope == scope] or meant
        for row in table.rows
        if row.first <= num_bytes and (row.last is None or num_bytes <= row.last)
    ]
    names = dict.fromkeys("+".join(row.lanes) for row in rows if row.lanes)
    if not names:
        return UNKNOWN
    slow = on_gpu and any(row.how not in _DIRECT or SLOW & {*row.lanes} for row in rows)
    return Route(" or ".join(names)[:64], is_fallback=slow)


class UcxLog:
    """The log of this process's UCX; any thread may ask."""

    def __init__(self) -> None:
        """Leaves the log alone where the environment says already where it goes."""
        self._lock = threading.Lock()
        self._reader = Reader()
        self._rest = b""
        self._at = 0
        self._shows_tables = TABLES in os.environ
        self._file = -1 if FILE in os.environ else _open()
        self._libc = ctypes.CDLL(None)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """What is made of UCX meanwhile tells its tables; the first of all decides on the log.

        Afterwards the environment is as before: processes that are started have logs of their own.
        """
        wishes = {} if self._file < 0 else {FILE: _name(self._file), TABLES: WRITES}
        own = wishes.keys() - os.environ.keys()
        os.environ.update({name: wishes[name] for name in own})
        try:
            yield
        finally:
            for name in own:
                del os.environ[name]

    def tables(self) -> Sequence[Table]:
        """All tables so far, oldest first; other lines are logged."""
        with self._lock:
            for line in self._new_lines():
                text = self._reader.take(line)
                if text is not None:
                    LOG.log(logging.WARNING if _BAD.search(text) else logging.INFO, "%s", text)
                elif self._shows_tables:
                    LOG.info("%s", _PREFIX.sub("", line).strip())
            return tuple(self._reader.tables)

    def _new_lines(self) -> list[str]:
        if self._file < 0:
            return []
        self._libc.fflush(None)
        end = os.fstat(self._file).st_size
        if end <= self._at:
            return []
        data = self._rest + os.pread(self._file, end - self._at, self._at)
        # Gives the memory back: UCX writes on behind it.
        self._at = end
        os.ftruncate(self._file, 0)
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]


@functools.cache
def ucx_log() -> UcxLog:
    """The one of this process; first asked for before anything loads UCX."""
    return UcxLog()


def _open() -> int:
    """A file in memory; -1 where it cannot be opened by its name, without which UCX would end the
    process."""
    file = os.memfd_create("ucx log")
    try:
        os.close(os.open(_name(file), os.O_WRONLY))
    except OSError as error:
        LOG.warning("the transport of pages will not be known: %s", error)
        os.close(file)
        return -1
    return file


def _name(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _table(cells: Sequence[str]) -> Table:
    head, title, _, *rows = cells
    scope = next((word for word in ("self", "intra-node", "inter-node") if f" {word} " in head), "")
    return Table(scope, title, tuple(row for cell in rows if (row := _row(cell)) is not None))


def _row(cell: str) -> Row | None:
    parts = [part.strip() for part in cell.split("|")]
    found = _RANGE.match(parts[0])
    if len(parts) != 3 or found is None:
        return None
    first = int(found[1]) * _UNITS[found[2]]
    last = None if found[5] else first if found[3] is None else int(found[3]) * _UNITS[found[4]]
    return Row(first, last, parts[1], tuple(dict.fromkeys(_LANE.findall(parts[2]))))
