"""The process that speaks to Mooncake Store for an engine.

Mooncake's client holds Python's lock while it connects, for 90 s if its master is dead, and a call
to a master that stands still may last minutes. So an engine kills this process if it does not
answer. It moves bytes between the store and the engine's host memory, which both map. Each lane of
calls has a thread and a socket of its own.
"""

import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Final, Literal, NoReturn

import msgspec

MISSING: Final = (-703, -704)
"""Codes of Mooncake for an object that is not there, or not whole."""
PRESENT: Final = -705
"""Its code for one that is there already."""
FULL: Final = -200
"""Its code for a pool without room."""
MOST_UNITS: Final = 256
"""In one call to load."""
MOST_BYTES: Final = 64 << 20
"""The same; a larger unit comes by itself."""
_ROOM: Final = MOST_BYTES + (4 << 20)  # with heads, for a lane
_CONNECT_S: Final = 2.0


Extents = tuple[tuple[int, int], ...]
"""Offsets, and bytes at each."""


class PoolOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process, which it gets at its start."""

    host: str
    port: int
    protocol: str
    devices: str
    parent: int  # process that it ends with
    memory: int  # descriptor of the engine's host memory
    memory_bytes: int
    lanes: tuple[int, ...]  # descriptors of sockets
    least_head: int  # bytes before the KV of a unit, if it has no boundary row
    most_head: int


class PoolCall(msgspec.Struct, frozen=True, array_like=True):
    """One call, on objects of these names."""

    kind: Literal["find", "load", "keep", "remove"]
    names: tuple[str, ...] = ()
    heads: tuple[bytes, ...] = ()  # of units to keep
    places: tuple[Extents, ...] = ()  # of each unit's KV in the memory


class PoolAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Its results: numbers, or codes of Mooncake below 0."""

    codes: tuple[int, ...]
    heads: tuple[bytes, ...] = ()  # of units that were loaded
    error: str = ""  # of the start


class _Lane:
    """Calls of one socket, one after the other."""

    def __init__(self, store: Any, base: int, orders: PoolOrders, connection: Connection) -> None:
        self._store, self._base, self._orders = store, base, orders
        self._connection = connection
        # Over TCP each separate part of an object costs 0.5 ms, so units are copied from here.
        self._room = mmap.mmap(-1, _ROOM)
        self._room_at = address_of(self._room)
        store.register_buffer(self._room_at, _ROOM)

    def run(self) -> None:
        """Until the engine closes the socket or a call raises, which end the process."""
        decode = msgspec.msgpack.Decoder(PoolCall).decode
        try:
            while True:
                answer = self._answer(decode(self._connection.recv_bytes()))
                self._connection.send_bytes(msgspec.msgpack.encode(answer))
        finally:
            os._exit(1)

    def _answer(self, call: PoolCall) -> PoolAnswer:
        names = list(call.names)
        match call.kind:
            case "find":
                return PoolAnswer(tuple(self._store.batch_is_exist(names)))
            case "remove":
                return PoolAnswer((self._store.remove(names[0], True),))
            case "keep":
                heads = b"".join(call.heads)
                self._room[: len(heads)] = heads
                parts = self._parts(call.places, list(map(len, call.heads)))
                return PoolAnswer(tuple(self._store.batch_put_from_multi_buffers(names, *parts)))
            case "load":
                return self._load(names, call.places)

    def _load(self, names: list[str], places: Sequence[Extents]) -> PoolAnswer:
        """Most units have the shortest head, so their sizes are asked for only if that fails."""
        codes, heads = self._read(names, places, [self._orders.least_head] * len(names))
        for at, code in enumerate(codes):
            if code < 0 and code not in MISSING:
                size = self._store.get_size(names[at])
                num_head = size - sum(size for _, size in places[at])
                if self._orders.least_head < num_head <= self._orders.most_head:
                    codes[at : at + 1], heads[at : at + 1] = self._read(
                        [names[at]], [places[at]], [num_head]
                    )
                elif size >= 0:
                    codes[at], heads[at] = 0, b""  # it is no unit of this size
        return PoolAnswer(tuple(codes), tuple(heads))

    def _read(
        self, names: list[str], places: Sequence[Extents], num_heads: list[int]
    ) -> tuple[list[int], list[bytes]]:
        sizes = [
            num_head + sum(size for _, size in extents)
            for num_head, extents in zip(num_heads, places, strict=True)
        ]
        if self._orders.protocol == "tcp" and sum(sizes) <= len(self._room):
            begins = list(accumulate(sizes, initial=0))[:-1]
            addresses = [self._room_at + at for at in begins]
            codes = self._store.batch_get_into(names, addresses, sizes)
            for address, num_head, extents in zip(addresses, num_heads, places, strict=True):
                self._spread(address + num_head, extents)
        else:
            begins = list(accumulate(num_heads, initial=0))[:-1]
            codes = self._store.batch_get_into_multi_buffers(names, *self._parts(places, num_heads))
        heads = zip(begins, num_heads, strict=True)
        return list(codes), [self._room[at : at + size] for at, size in heads]

    def _spread(self, address: int, extents: Extents) -> None:
        """Copies KV from the room to its places."""
        for at, size in extents:
            ctypes.memmove(self._base + at, address, size)
            address += size

    def _parts(
        self, places: Sequence[Extents], num_heads: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of the parts of each object: its head, then its KV."""
        heads_at = accumulate(num_heads, initial=self._room_at)
        addresses = [
            [head_at, *(self._base + at for at, _ in extents)]
            for head_at, extents in zip(heads_at, places, strict=False)
        ]
        sizes = [
            [num_head, *(size for _, size in extents)]
            for num_head, extents in zip(num_heads, places, strict=True)
        ]
        return addresses, sizes


def address_of(memory: "mmap.mmap | memoryview") -> int:
    """Address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _connect(orders: PoolOrders) -> Any:
    """Mooncake's client. Raises OSError or ImportError with the reason."""
    peer = orders.host, orders.port
    with socket.create_connection(peer, _CONNECT_S) as probe:  # its own would take 90 s
        own_host = probe.getsockname()[0]
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = f"{orders.host}:{orders.port}"
    # Without memory of its own in the store, so that no unit ends with a worker.
    code = store.setup(own_host, "P2PHANDSHAKE", 0, 0, orders.protocol, orders.devices, master)
    if code:
        raise OSError(f"Mooncake's setup failed with code {code}")
    return store


def main() -> NoReturn:
    """Runs until the engine ends or closes its sockets."""
    orders = msgspec.json.decode(sys.argv[1], type=PoolOrders)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != orders.parent:
        sys.exit("the parent process has ended")
    lanes = [Connection(lane) for lane in orders.lanes]
    try:
        store, answer = _connect(orders), PoolAnswer(())
    except (OSError, ImportError) as error:
        store, answer = None, PoolAnswer((), error=str(error))
    if store is not None:
        memory = mmap.mmap(orders.memory, orders.memory_bytes)
        base = address_of(memory)
        store.register_buffer(base, orders.memory_bytes)
        for lane in lanes:
            one = _Lane(store, base, orders, lane)
            Thread(target=one.run, daemon=True).start()
    lanes[0].send_bytes(msgspec.msgpack.encode(answer))
    while store is not None:
        signal.pause()
    os._exit(1)


if __name__ == "__main__":
    main()
