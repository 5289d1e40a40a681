"""NIXL's Python interface with types, reduced to the part that is used here; and the options and
the log of UCX, over which its agents move bytes.

Not used on purpose: its progress thread, which spins on a core even when idle (measured: 1.0 s of
CPU time a second), and its (de)serialisation of descriptor lists, which is pickle.

Only UCX's log shows which transports it uses, in tables of protocols. A measured rate does not show
whether pages between GPUs take TCP: a fast network's TCP is as fast as a slow network's RDMA. The
log goes to a file in memory, because UCX buffers its output. Lines outside of tables go to our own
log.
"""

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from nixl._bindings import DRAM_SEG, nixlInvalidParamError, nixlRegDList

from effuse.kernels.cuda_ipc import HANDLE_BYTES
from effuse.kvtransfer.connector import UNKNOWN, Route
from effuse.kvtransfer.interfaces import addresses
from effuse.kvtransfer.messages import DIGEST_BYTES

LOG = logging.getLogger(__name__)

_NETLINK = "libnl-route-3.so.200"
DEVICES, FAMILIES = "UCX_NET_DEVICES", "UCX_TCP_AF_PRIO"
_RDMA = Path("/sys/class/infiniband")
_CONFINING = threading.Lock()  # the environment is the process's

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

PageList = NewType("PageList", object)  # a prepared list of pages, or of groups of their layers
Transfer = NewType("Transfer", object)  # a write that is posted or ready to be
Units = npt.NDArray[np.int32] | list[int]
"""Indices in a prepared list."""

NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    error for name, error in vars(_bindings).items() if name.endswith("Error")
)


class NixlAgent:
    """One agent over UCX, for one thread. Every method may raise one of NIXL_ERRORS."""

    def __init__(self, name: str) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)
        bind_netlink()
        if torch.cuda.is_available():  # else UCX warns of a variable that nothing reads
            # UCX would keep a GPU's memory of a peer mapped, and so in use, after the peer was
            # removed and had ended (`cuda_ipc.py`).
            os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")
        self.name = name
        self._agent: Any = nixl_agent(
            name,
            nixl_agent_config(
                enable_prog_thread=False,
                backends=["UCX"],
                sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )

    def register(self, address: int, num_bytes: int, device_id: int, kind: str) -> None:
        """Registers a pool once, before its metadata is used. kind: DRAM or VRAM."""
        self._agent.register_memory([(address, num_bytes, device_id, "")], kind)

    def close(self) -> None:
        """Ends the agent with all of its connections; nothing still in them arrives."""
        self._agent = None

    def metadata(self, handle: bytes = b"") -> bytes:
        """Metadata with which peers reach this agent and its registered memory, after its digest.
        `handle` maps that memory, if it is on a GPU (`cuda_ipc.py`)."""
        return _sealed(handle, self._agent.get_agent_metadata())

    def connection(self) -> bytes:
        """Metadata with which peers can only answer this agent, after its digest. A peer with the
        GPU's memory in it would map that, and keep it in use after the end of this process."""
        nothing = nixlRegDList(DRAM_SEG)
        return _sealed(b"", self._agent.get_partial_agent_metadata(nothing, True, ["UCX"]))

    def add_peer(self, metadata: bytes) -> str:
        """Adds a peer; returns its name. UCX ends the process at some corrupt metadata, so it only
        reads metadata that matches its digest."""
        digest, body = metadata[:DIGEST_BYTES], metadata[DIGEST_BYTES:]
        if not body or xxhash.xxh3_128_digest(body) != digest:
            raise nixlInvalidParamError("its metadata does not match its digest")
        name = self._agent.add_remote_agent(body[1 + body[0] :])
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forgets a peer and disconnects."""
        self._agent.remove_remote_agent(name)

    def pages(
        self, owner: str, address: int, unit_bytes: int, count: int, device_id: int, kind: str
    ) -> PageList:
        """Prepares every unit of a pool as a target or, with owner "", as a source, in one row."""
        rows = np.array([[address, unit_bytes, device_id, unit_bytes, count]], dtype=np.uint64)
        return PageList(self._agent.prep_xfer_dlist(owner, rows, kind))

    def write(
        self, source: PageList, source_ids: Units, target: PageList, target_ids: Units
    ) -> Transfer:
        """A write of units, not posted yet; runs that are consecutive on both sides are merged."""
        return Transfer(
            self._agent.make_prepped_xfer("WRITE", source, source_ids, target, target_ids)
        )

    def post(self, transfer: Transfer, notification: bytes) -> bool:
        """Starts a write whose end notifies the peer; returns True if it has already ended. May
        block for long."""
        return bool(self._agent.transfer(transfer, notification) == "DONE")

    def is_done(self, transfer: Transfer) -> bool:
        """Whether a posted write has ended."""
        return bool(self._agent.check_xfer_state(transfer) == "DONE")

    def release(self, transfer: Transfer) -> None:
        """Frees a write that has ended. The bytes of one that has not would still arrive."""
        self._agent.release_xfer_handle(transfer)

    def release_pages(self, pages: PageList) -> None:
        self._agent.release_dlist_handle(pages)

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message to a peer, independent of a write."""
        self._agent.send_notif(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) since the last call; also advances transfers."""
        try:
            new: dict[str, list[bytes]] = self._agent.get_new_notifs()
        # an error in NIXL's own binding; messages of the same call are lost too
        except UnicodeDecodeError as error:
            LOG.warning("an agent whose name is not UTF-8 sent a notification: %s", error)
            return []
        return [(peer, message) for peer, messages in new.items() for message in messages]


def handle_in(metadata: bytes) -> bytes:
    """The handle of a GPU's memory in an agent's metadata; empty if there is none."""
    body = metadata[DIGEST_BYTES:]
    return body[1 : 1 + body[0]] if body and body[0] == HANDLE_BYTES else b""


def _sealed(handle: bytes, metadata: bytes) -> bytes:
    body = bytes([len(handle)]) + handle + bytes(metadata)
    return xxhash.xxh3_128_digest(body) + body


def bind_netlink() -> None:
    """Loads the system's libnl-route, if there is one, before UCX does; has no effect later.

    NIXL's wheel has a copy of it, and the system's is loaded with RDMA libraries that UCX loads.
    The two then share functions but not the lists behind them, and a process with both crashes in
    their destructors at exit (status 139). If the system's is loaded separately, it uses its own
    functions.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(_NETLINK, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def options_of(host: str, environment: MutableMapping[str, str] = os.environ) -> Mapping[str, str]:
    """UCX's options for agents that listen only on the interface of `host`.

    UCX accepts names of devices but no addresses, and without an option listens on all of them.

    A wildcard means all interfaces, like for other sockets, and a set `UCX_NET_DEVICES` has
    precedence. RDMA devices stay unless the address is loopback, because nothing reaches them by an
    IP address. Raises ValueError if no interface has the address.
    """
    address = _resolve(host)
    with _CONFINING:  # otherwise another thread's options may be there
        if address.is_unspecified or DEVICES in environment:
            return {}
    names = [name for name, own in addresses() if own == address]
    if address.is_loopback:  # lo has all of 127.0.0.0/8, and reports one address of it
        names = names or [name for name, own in addresses() if own.is_loopback]
    if not names:
        raise ValueError(
            f"--host: expected the address of an interface of this machine, got {address}"
        )
    rdma = [] if address.is_loopback else list(_rdma_ports())
    family = "inet6" if address.version == 6 else "inet"
    return {DEVICES: ",".join([*dict.fromkeys(names), *rdma]), FAMILIES: family}


@contextlib.contextmanager
def confined(
    options: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Gives these options to agents that are made meanwhile, one thread after another, unless the
    environment has others. Processes that start later do not inherit them."""
    with _CONFINING:
        found = {name: value for name, value in options.items() if name not in environment}
        LOG.debug("UCX's options: %s", found)
        environment.update(found)
        try:
            yield
        finally:
            for name in found:
                environment.pop(name, None)


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"--host: expected a host with an address, got {host!r}: {error}"
        ) from error
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _rdma_ports() -> Iterator[str]:
    """Ports of RDMA devices, by UCX's names."""
    for port in sorted(_RDMA.glob("*/ports/*")):
        yield f"{port.parent.parent.name}:{port.name}"


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
        """Reads nothing if the environment already sets a destination for the log."""
        self._lock = threading.Lock()
        self._reader = Reader()
        self._rest = b""
        self._at = 0
        self._shows_tables = TABLES in os.environ
        self._file = -1 if FILE in os.environ else _open()
        # Agents with these options log their tables; the first one decides the log's destination.
        known = {FILE: _name(self._file), TABLES: WRITES}
        self.options: Mapping[str, str] = {} if self._file < 0 else known
        self._libc = ctypes.CDLL(None)

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
        LOG.warning("metrics will not name the transport of pages: %s", error)
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
