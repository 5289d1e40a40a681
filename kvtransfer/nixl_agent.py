"""NIXL's Python interface with types, reduced to the part that is used here.

Not used on purpose: its progress thread, which spins on a core even when idle (measured: 1.0 s of
CPU time a second), and its (de)serialisation of descriptor lists, which is pickle.
"""

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, MutableMapping
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
from effuse.kvtransfer.interfaces import addresses
from effuse.kvtransfer.messages import DIGEST_BYTES

LOG = logging.getLogger(__name__)

_NETLINK = "libnl-route-3.so.200"
DEVICES, FAMILIES = "UCX_NET_DEVICES", "UCX_TCP_AF_PRIO"
_RDMA = Path("/sys/class/infiniband")
_CONFINING = threading.Lock()  # the environment is the process's

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
        digest, told = metadata[:DIGEST_BYTES], metadata[DIGEST_BYTES:]
        if not told or xxhash.xxh3_128_digest(told) != digest:
            raise nixlInvalidParamError("its metadata does not match its digest")
        name = self._agent.add_remote_agent(told[1 + told[0] :])
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
    told = metadata[DIGEST_BYTES:]
    return told[1 : 1 + told[0]] if told and told[0] == HANDLE_BYTES else b""


def _sealed(handle: bytes, told: bytes) -> bytes:
    body = bytes([len(handle)]) + handle + bytes(told)
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
    """Gives these options to agents that are made meanwhile, one thread after another. Processes
    that start later do not inherit them."""
    with _CONFINING:
        found = {name: value for name, value in options.items() if name not in environment}
        LOG.debug("UCX listens by %s", found)
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
