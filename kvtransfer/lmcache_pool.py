"""The server of LMCache (`lmcache_server HOST PORT`) as a store of units that workers share.

It keeps all until it ends: nothing limits it or removes an object. A unit is one of raw bytes.
"""

import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.stores import HEAD, MOST_BOUNDARY, Facts, UnitFacts, UnitStore, unpack
from effuse.kvtransfer.units import Key

_ASKED: Final = struct.Struct("9i150s")  # command, bytes, format, type, place, shape of 4, key
_ANSWER: Final = struct.Struct("9i")  # code, bytes, and the facts that came with the object
_PUT, _GET, _EXIST, _FOUND, _BINARY, _UINT8 = 1, 2, 3, 200, 4, 6
_TOGETHER: Final = 256  # questions on their way; their answers fit into a socket's buffer
_ANSWER_S: Final = 10.0


class LMCachePool(UnitStore):
    """Units in an LMCache server. Not all that it has are known here."""

    kind = "pool"
    name = "the shared pool"
    keeps_all = True
    most_writes = 32

    def __init__(self, address: PoolAddress, content: str) -> None:
        """Arguments as of `MooncakePool`."""
        super().__init__()
        self._peer = address.host, address.port
        names = f"{address.namespace}/{content}"
        # Workers may know the server by different names.
        self._content = hashlib.sha256(names.encode()).hexdigest()[:32]
        place = f"{address.host}:{address.port}/{names}".encode()
        self.number = int(hashlib.sha256(place).hexdigest()[:13], 16)
        self._own = threading.local()  # a connection for each thread
        self._lines: set[socket.socket] = set()

    def has_room_for(self, num_bytes: int) -> bool:
        return HEAD.size + num_bytes < 1 << 31  # sizes are signed, of 32 bits

    def open(self) -> "Future[object]":
        return self._finder.submit(self._find, [bytes(32)])

    def find(self, units: Mapping[Key, Key]) -> "Future[int]":
        return self._finder.submit(self._find, list(units))

    def load(self, key: Key, views: Sequence[memoryview]) -> "Future[UnitFacts]":
        return self._readers.submit(self._load, key, views)

    def keep(
        self, key: Key, before: Key, facts: Facts, views: Sequence[memoryview]
    ) -> "Future[int]":
        return self._writer.submit(self._keep, key, facts, views)

    def remove(self, key: Key, before: Key) -> None:
        """The server cannot."""

    def close(self) -> None:
        super().close()
        for line in tuple(self._lines):
            line.close()

    def _find(self, keys: Sequence[Key]) -> int:
        def ask(line: socket.socket) -> list[bool]:
            found: list[bool] = []
            for at in range(0, len(keys), _TOGETHER):
                asked = [self._asked(_EXIST, key) for key in keys[at : at + _TOGETHER]]
                line.sendall(b"".join(asked))
                found += [_answer(line)[0] == _FOUND for _ in asked]
            return found

        return [*self._do(ask), False].index(False)

    def _load(self, key: Key, views: Sequence[memoryview]) -> UnitFacts:
        num_bytes = sum(view.nbytes for view in views)

        def ask(line: socket.socket) -> bytearray | None:
            line.sendall(self._asked(_GET, key))
            # The server sends the rest only once its first few bytes are acknowledged.
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            code, size = _answer(line)
            if size > HEAD.size + MOST_BOUNDARY + num_bytes:
                self._drop(line)
                raise ValueError(f"expected {num_bytes} bytes of KV, got {size}")
            return _filled(line, size) if code == _FOUND else None

        if (raw := self._do(ask)) is None:
            raise FileNotFoundError("it is not in the shared pool")
        at = max(0, len(raw) - num_bytes)
        facts = unpack(bytes(raw[:at]), key, num_bytes)
        for view in views:
            view[:] = raw[at : at + view.nbytes]
            at += view.nbytes
        return facts

    def _keep(self, key: Key, facts: Facts, views: Sequence[memoryview]) -> int:
        head = facts().pack(key, sum(view.nbytes for view in views))
        size = len(head) + sum(view.nbytes for view in views)

        def ask(line: socket.socket) -> int:
            line.sendall(b"".join((self._asked(_PUT, key, size), head, *views)))
            line.sendall(self._asked(_EXIST, key))  # the first command has no answer
            return _answer(line)[0]

        if self._do(ask) != _FOUND:
            raise ConnectionError("it did not store a unit")
        return size

    def _asked(self, command: int, key: Key, size: int = 0) -> bytes:
        name = f"{self._content}@1@0@{key.hex()}@uint8".encode().ljust(150)
        return _ASKED.pack(command, size, _BINARY, _UINT8, 0, size, 0, 0, 0, name)

    def _do(self, ask: Callable[[socket.socket], Any]) -> Any:
        """Raises OSError; the next call then connects anew."""
        if (line := getattr(self._own, "line", None)) is None:
            line = self._own.line = socket.create_connection(self._peer, _ANSWER_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines.add(line)
        try:
            return ask(line)
        except OSError as error:
            self._drop(line)
            raise ConnectionError(str(error)) from error

    def _drop(self, line: socket.socket) -> None:
        line.close()
        self._lines.discard(line)
        self._own.line = None


def _answer(line: socket.socket) -> tuple[int, int]:
    """Code and number of bytes that follow."""
    return _ANSWER.unpack(_filled(line, _ANSWER.size))[:2]


def _filled(line: socket.socket, size: int) -> bytearray:
    room = bytearray(size)
    view = memoryview(room)
    while view.nbytes:
        if not (count := line.recv_into(view)):
            raise ConnectionError("the server has closed the connection")
        view = view[count:]
    return room
