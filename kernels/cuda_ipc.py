"""A GPU's memory of another process, mapped as long as its peer is known.

UCX maps the memory of a peer for each write, unless it keeps every mapping for ever, and then the
memory of an ended process stays in use. The driver counts mappings of one handle: while we hold
one, UCX's cost nothing, and the memory is free once we release ours.
"""

import ctypes
import struct
from functools import cache
from typing import Any, Final

_KEY_BYTES: Final = 64
HANDLE_BYTES: Final = _KEY_BYTES + 16  # with where its address lies
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _KEY_BYTES),)


def handle_of(address: int) -> bytes:
    """The handle of a device address [HANDLE_BYTES]; empty if its allocation has none."""
    handle, begin, size = _Handle(), ctypes.c_uint64(0), ctypes.c_size_t(0)
    at = ctypes.c_uint64(address)
    if _driver().cuIpcGetMemHandle(ctypes.byref(handle), at):
        return b""
    if _driver().cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), at):
        return b""
    offset = address - begin.value
    return bytes(handle) + struct.pack("<2Q", offset, size.value - offset)


def place_of(handle: bytes) -> tuple[int, int]:
    """Where its address lies in the allocation, which `open_handle` maps as a whole, and how many
    bytes follow there."""
    offset, num_bytes = struct.unpack("<2Q", handle[_KEY_BYTES:])
    return offset, num_bytes


def open_handle(handle: bytes) -> int:
    """Maps the allocation of a handle in the current context. Returns its first address here, or
    0 if it cannot be mapped because it is on another machine or no link joins the GPUs."""
    address = ctypes.c_uint64(0)
    mapped = _Handle.from_buffer_copy(handle)
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    failed = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), mapped, flags)
    return 0 if failed else address.value


def close_handle(address: int) -> None:
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
