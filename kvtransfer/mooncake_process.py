"""The process that speaks to Mooncake Store for an engine.

Mooncake's client holds Python's lock while it connects, for 90 s if its master is dead, and a call
to a frozen master may last minutes. So an engine kills this process if it does not
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

from effuse.config.access import host_and_port

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
_COPIED_BYTES: Final = 128 << 10
"""Over TCP each part of an object costs about as much as a copy of these bytes."""
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
                return PoolAnswer(tuple(self._keep(names, call.heads, call.places)))
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
                    codes[at], heads[at] = 0, b""  # not a unit of this size
        return PoolAnswer(tuple(codes), tuple(heads))

    def _read(
        self, names: list[str], places: Sequence[Extents], num_heads: list[int]
    ) -> tuple[list[int], list[bytes]]:
        if self._gathers(places, num_heads):
            begins, sizes = _laid_out(places, num_heads)
            addresses = [self._room_at + at for at in begins]
            codes = self._store.batch_get_into(names, addresses, sizes)
            for address, num_head, extents in zip(addresses, num_heads, places, strict=True):
                self._copy(address + num_head, extents, loads=True)
        else:
            begins = list(accumulate(num_heads, initial=0))[:-1]
            codes = self._store.batch_get_into_multi_buffers(names, *self._parts(places, num_heads))
        heads = zip(begins, num_heads, strict=True)
        return list(codes), [self._room[at : at + size] for at, size in heads]

    def _keep(
        self, names: list[str], heads: Sequence[bytes], places: Sequence[Extents]
    ) -> Sequence[int]:
        num_heads = list(map(len, heads))
        if not self._gathers(places, num_heads):
            both = b"".join(heads)
            self._room[: len(both)] = both
            parts = self._parts(places, num_heads)
            return list(self._store.batch_put_from_multi_buffers(names, *parts))
        begins, sizes = _laid_out(places, num_heads)
        for at, head, extents in zip(begins, heads, places, strict=True):
            self._room[at : at + len(head)] = head
            self._copy(self._room_at + at + len(head), extents, loads=False)
        addresses = [self._room_at + at for at in begins]
        return list(self._store.batch_put_from(names, addresses, sizes))

    def _gathers(self, places: Sequence[Extents], num_heads: Sequence[int]) -> bool:
        """Whether objects are copied to the room or from it, so that each is one part."""
        num_bytes = sum(size for extents in places for _, size in extents)
        num_parts = sum(map(len, places))
        is_worth_it = self._orders.protocol == "tcp" and num_bytes <= num_parts * _COPIED_BYTES
        return is_worth_it and num_bytes + sum(num_heads) <= len(self._room)

    def _copy(self, address: int, extents: Extents, *, loads: bool) -> None:
        """Copies KV from an address of the room to its places, or back."""
        for at, size in extents:
            pair = (self._base + at, address) if loads else (address, self._base + at)
            ctypes.memmove(*pair, size)
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


def _laid_out(places: Sequence[Extents], num_heads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where objects begin that lie one behind the other, and their sizes."""
    sizes = [
        num_head + sum(size for _, size in extents)
        for num_head, extents in zip(num_heads, places, strict=True)
    ]
    return list(accumulate(sizes, initial=0))[:-1], sizes


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
    master = host_and_port(orders.host, orders.port)
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
