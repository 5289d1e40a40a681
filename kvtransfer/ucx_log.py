"""The transports that UCX uses: its tables of protocols, read from its log.

UCX reports them nowhere else. A measured rate does not show whether pages between GPUs take TCP: a
fast network's TCP is as fast as a slow network's RDMA. The log goes to a file in memory, because
UCX buffers its output, and lines outside of tables go to our own log.
"""

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
WRITES = "*put*"  # operations whose tables are used
# With the defaults and these, GPUs' pages go from device to device.
SLOW = {"tcp", "self", "cma", "knem", "xpmem", "posix", "sysv", "cuda_copy", "gdr_copy"}
_DIRECT = {"zero-copy", "short"}
_PREFIX = re.compile(r"^\[\d+\.\d+\] \[[^\]]*\] *")
_LANE = re.compile(r"\b([a-z]\w*)/[\w:.-]+")
_RANGE = re.compile(r"(\d+)([KMG]?)(?:\.\.(?:(\d+)([KMG]?)|(inf)))?$")
_BAD = re.compile(r"UCX +(WARN|ERROR|FATAL)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Row:
    """How messages of first to last bytes are sent; last is None without an end."""

    first: int
    last: int | None
    how: str  # such as zero-copy
    lanes: tuple[str, ...]  # transports, such as cuda_ipc


@dataclass(frozen=True, slots=True)
class Table:
    """The protocols of one operation over one kind of connection."""

    scope: str  # self, intra-node or inter-node
    title: str  # the operation, with the memory at both ends
    rows: tuple[Row, ...]


@dataclass(slots=True)
class Reader:
    """Reads the log line by line."""

    tables: list[Table] = field(default_factory=list)
    _cells: list[str] = field(default_factory=list)  # of the current table

    def take(self, line: str) -> str | None:
        """Takes a line; returns the text of a line outside of tables."""
        text = _PREFIX.sub("", line).strip()
        if text.startswith("|") and text.endswith("|"):
            self._cells.append(text.strip("|").strip())
            return None
        if not (text.startswith("+-") and text.endswith("-+")):
            return text or None
        if len(self._cells) > 3:  # the line after the rows
            self.tables.append(_table(self._cells))
            self._cells.clear()
        return None


def route_of(
    tables: Iterable[Table], *, on_gpu: bool, num_bytes: int, scope: str | None = None
) -> Route:
    """The transports of writes with this many bytes of pages, from tables of one scope or, without
    it or without such tables, of all scopes except self; all names if they differ.
    """
    memory = " from cuda" if on_gpu else " from host"
    meant = [
        table
        for table in tables
        if table.scope != "self" and "ucp_put" in table.title and memory in table.title
    ]
    # UCX may see pods of one node as being on two.
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
    """The log of this process's UCX; any thread may use it."""

    def __init__(self) -> None:
        """Does nothing if the environment already sets a destination for the log."""
        self._lock = threading.Lock()
        self._reader = Reader()
        self._rest = b""
        self._at = 0
        self._shows_tables = TABLES in os.environ
        self._file = -1 if FILE in os.environ else _open()
        self._libc = ctypes.CDLL(None)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """UCX objects made within it log their tables; the very first one decides the log's
        destination.

        Afterwards the environment is as before, because child processes have their own logs.
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
        # Frees the memory; UCX continues to write after it.
        self._at = end
        os.ftruncate(self._file, 0)
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]


@functools.cache
def ucx_log() -> UcxLog:
    """The log of this process; must be called before UCX is loaded."""
    return UcxLog()


def _open() -> int:
    """A file in memory; -1 if it cannot be opened by name, at which UCX would abort."""
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
