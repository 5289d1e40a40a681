"""A GPU's memory of another process, mapped as long as its peer is known.

UCX maps the memory of a peer for each write, unless it keeps every mapping for ever, and then the
memory of an ended process stays in use. The driver counts mappings of one handle: while we hold
one, UCX's cost nothing, and the memory is free once we release ours.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def handle_of(address: int) -> bytes:
    """The handle of the allocation at a device address [HANDLE_BYTES]; empty if it has none."""
    handle = _Handle()
    if _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)):
        return b""
    return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Maps the memory of a handle in the current context. Returns its address here, or 0 if it
    cannot be mapped because it is on another machine or no link joins the GPUs.
    """
    address = ctypes.c_uint64(0)
    mapped = _Handle.from_buffer_copy(handle)
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    failed = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), mapped, flags)
    return 0 if failed else address.value


def close_handle(address: int) -> None:
    """Releases one mapping."""
    _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))


def allocate(num_bytes: int) -> int:
    """The address of device memory of its own, so that a handle covers nothing else; 0 if there is
    none."""
    address = ctypes.c_uint64(0)
    failed = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
    return 0 if failed else address.value


def free(address: int) -> None:
    """Frees what `allocate` returned. Peers' mappings of it stay valid."""
    _driver().cuMemFree_v2(ctypes.c_uint64(address))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
