"""Mooncake Store as a store of units that several workers share.

A process of its own speaks to it (`mooncake_process.py`). One that does not answer is killed, and
the next `open` starts another.
"""

import errno
import hashlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, islice, takewhile
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Final, Generic, TypeVar

import msgspec

from effuse.config.extras import lacking
from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.mooncake_process import (
    FULL,
    MISSING,
    MOST_BYTES,
    MOST_UNITS,
    PRESENT,
    Extents,
    PoolAnswer,
    PoolCall,
    PoolOrders,
    address_of,
)
from effuse.kvtransfer.stores import (
    HEAD,
    MOST_BOUNDARY,
    READERS,
    Facts,
    Threads,
    UnitFacts,
    UnitStore,
    unpack,
)
from effuse.kvtransfer.units import Key

_Views = Sequence[memoryview]
_Wanted = tuple[Key, _Views]
_Kept = tuple[Key, _Views, Facts]
_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")

_KEPT_UNITS: Final = 32  # in one call; prompts on their way to the pool wait for each call's end
_ANSWER_S: Final = 10.0  # of a call, and of the process's start; tiers wait less
_KILLED_S: Final = 5.0
_IMPORT_S: Final = 60.0
_PROBE: Final = "effuse/probe"


def check_package() -> None:
    """Raises ValueError if Mooncake cannot be imported. In a process of its own, because Mooncake
    changes the one that imports it."""
    if find_spec("mooncake") is None:
        raise ValueError(f"--kv-pool: {lacking('mooncake')}")
    command = (sys.executable, "-P", "-c", "import mooncake.store")
    broken = "--kv-pool: the package mooncake does not work here"
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{broken}: it was not imported within {_IMPORT_S:g} s") from error
    if tried.returncode:
        reason = tried.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"{broken}: {reason}")


class _Client:
    """The process, and the lanes to it."""

    def __init__(self, address: PoolAddress, host: HostPages) -> None:
        """Starts it, and waits until it is connected. Raises ConnectionError."""
        pairs = [socket.socketpair() for _ in range(READERS + 2)]
        assert host.descriptor >= 0, "the process has to map it"
        orders = PoolOrders(
            host=address.host,
            port=address.port,
            protocol=address.protocol,
            devices=address.devices,
            parent=os.getpid(),
            memory=host.descriptor,
            memory_bytes=host.num_slots * host.page_bytes,
            lanes=tuple(theirs.fileno() for _, theirs in pairs),
            least_head=HEAD.size,
            most_head=HEAD.size + MOST_BOUNDARY,
        )
        text = msgspec.json.encode(orders).decode()
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", "effuse.kvtransfer.mooncake_process", text),
            stdin=subprocess.DEVNULL,
            pass_fds=(host.descriptor, *orders.lanes),
            # Mooncake logs each call; reasons come as answers.
            stderr=None if "MC_LOG_LEVEL" in os.environ else subprocess.DEVNULL,
        )
        self._lanes: SimpleQueue[Connection] = SimpleQueue()
        for ours, theirs in pairs:
            theirs.close()
            self._lanes.put(Connection(ours.detach()))
        if error := self.call(None).error:
            self.kill()
            raise ConnectionError(error)

    def call(self, call: PoolCall | None) -> PoolAnswer:
        """Waits for the answer; without a call for that of the start. Kills the process and raises
        ConnectionError if there is none.
        """
        lane = self._lanes.get()
        try:
            if call is not None:
                lane.send_bytes(msgspec.msgpack.encode(call))
            if not lane.poll(_ANSWER_S):
                raise ConnectionError(f"no answer within {_ANSWER_S:g} s")
            return msgspec.msgpack.decode(lane.recv_bytes(), type=PoolAnswer)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self.kill()
            raise ConnectionError(str(error) or "its client process has ended") from error
        finally:
            self._lanes.put(lane)

    def kill(self) -> None:
        """After this nothing of it reads or writes host memory."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


class _Batches(Generic[_Asked, _Result]):
    """Calls that wait for a thread, which makes them together, because each takes some ms."""

    def __init__(
        self,
        threads: Threads,
        run: Callable[[Sequence[_Asked]], Sequence[_Result | Exception]],
        most: float = math.inf,
        size: Callable[[_Asked], int] = lambda asked: 0,
    ) -> None:
        """`run` returns the result or the error of each call, or raises that of all. At most `most`
        go together, or fewer if they move `MOST_BYTES` by their `size`."""
        self._threads, self._run, self._most, self._size = threads, run, most, size
        self.waiting: SimpleQueue[tuple[_Asked, Future[_Result]]] = SimpleQueue()
        self._lock, self._is_due = Lock(), False  # whether a thread is about to take those

    def submit(self, asked: _Asked) -> "Future[_Result]":
        result: Future[_Result] = Future()
        self.waiting.put((asked, result))
        self._call_thread()
        return result

    def _call_thread(self) -> None:
        """One call for all that wait, because each wakes a thread."""
        with self._lock:
            is_due, self._is_due = self._is_due, True
        if not is_due:
            self._threads.submit(self.run_some)

    def run_some(self) -> None:
        """Those that wait, as many as go together."""
        batch: list[tuple[_Asked, Future[_Result]]] = []
        num_bytes = 0
        with self._lock:
            self._is_due = False
        with suppress(Empty):
            while len(batch) < self._most and num_bytes < MOST_BYTES:
                one = self.waiting.get_nowait()
                if one[1].set_running_or_notify_cancel():
                    batch.append(one)
                    num_bytes += self._size(one[0])
        if not self.waiting.empty():
            self._call_thread()
        if not batch:
            return
        try:
            found = self._run([asked for asked, _ in batch])
        except Exception as error:  # noqa: BLE001  the reader of each result gets it
            found = [error] * len(batch)
        for (_, result), outcome in zip(batch, found, strict=True):
            if isinstance(outcome, Exception):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)


class MooncakePool(UnitStore):
    """Units in Mooncake Store. Not all that it has are known here."""

    kind = "pool"
    name = "the shared pool"
    keeps_all = True
    most_writes = 128

    def __init__(self, address: PoolAddress, content: str, host: HostPages) -> None:
        """`content` names all facts on which the bytes of a unit depend, beside its key."""
        super().__init__()
        self._address, self._host = address, host
        self._readers = Threads(1)  # two calls at the same time take longer than one by one
        self._prefix = "/".join(part for part in ("effuse", address.namespace, content) if part)
        place = f"{address.host}:{address.port}/{self._prefix}".encode()
        self.number = int.from_bytes(hashlib.sha256(place).digest()[:7]) or 1
        self._searches = _Batches(self._finder, self._find_all)
        self._loads = _Batches(self._readers, self._load_all, MOST_UNITS, _bytes_of)
        self._keeps = _Batches(self._writer, self._keep_all, _KEPT_UNITS, _bytes_of)
        self._client: _Client | None = None
        self._lock = Lock()
        self._base = address_of(host.views([0])[0])

    def open(self) -> "Future[object]":
        return self._finder.submit(self._open)

    def find(self, units: Mapping[Key, Key]) -> "Future[int]":
        return self._searches.submit([self._name(key) for key in units])

    def load(self, key: Key, views: _Views) -> "Future[UnitFacts]":
        return self._loads.submit((key, views))

    def keep(self, key: Key, before: Key, facts: Facts, views: _Views) -> "Future[int]":
        return self._keeps.submit((key, views, facts))

    def remove(self, key: Key, before: Key) -> None:
        self._writer.submit(self._call, PoolCall("remove", (self._name(key),)))

    def close(self) -> None:
        super().close()
        if self._client is not None:
            self._client.kill()

    def _name(self, key: Key) -> str:
        return f"{self._prefix}/{key.hex()}"

    def _open(self) -> None:
        with self._lock:
            if self._client is None or self._client.has_ended:
                self._client = _Client(self._address, self._host)
        if error := _fault(self._call(PoolCall("find", (_PROBE,))).codes[0]):
            raise error

    def _find_all(self, asked: Sequence[Sequence[str]]) -> list[int | Exception]:
        names = tuple(chain.from_iterable(asked))
        codes = iter(self._call(PoolCall("find", names)).codes if names else ())
        found = [list(islice(codes, len(one))) for one in asked]
        return [_fault(min(one, default=0)) or len(list(takewhile(bool, one))) for one in found]

    def _load_all(self, batch: Sequence[_Wanted]) -> list[UnitFacts | Exception]:
        names = tuple(self._name(key) for key, _ in batch)
        places = tuple(self._places(views) for _, views in batch)
        answer = self._call(PoolCall("load", names, places=places))
        found = zip(batch, answer.codes, answer.heads, strict=True)
        return [_loaded(*one) for one in found]

    def _keep_all(self, batch: Sequence[_Kept]) -> list[int | Exception]:
        names = tuple(self._name(key) for key, *_ in batch)
        places = tuple(self._places(views) for _, views, _ in batch)
        heads = tuple(facts().pack(key, _size(views)) for key, views, facts in batch)
        codes = self._call(PoolCall("keep", names, heads, places)).codes
        return [
            _fault(0 if code == PRESENT else code) or len(head) + _size(views)
            for (_, views, _), head, code in zip(batch, heads, codes, strict=True)
        ]

    def _call(self, call: PoolCall) -> PoolAnswer:
        if (client := self._client) is None:
            raise ConnectionError("its client process is not running")
        answer = client.call(call)
        expected = len(call.names)
        if len(answer.codes) != expected:
            text = f"its client sent {len(answer.codes)} codes, expected {expected}"
            raise ConnectionError(text)
        return answer

    def _places(self, views: _Views) -> Extents:
        """Offsets and sizes of slots in the host's memory, neighbours together."""
        found: list[tuple[int, int]] = []
        for view in views:
            at = address_of(view) - self._base
            if found and sum(found[-1]) == at:
                found[-1] = found[-1][0], found[-1][1] + view.nbytes
            else:
                found.append((at, view.nbytes))
        return tuple(found)


def _size(views: _Views) -> int:
    return sum(view.nbytes for view in views)


def _bytes_of(unit: _Wanted | _Kept) -> int:
    return _size(unit[1])


def _loaded(wanted: _Wanted, code: int, head: bytes) -> UnitFacts | Exception:
    key, views = wanted
    try:
        return _fault(code) or unpack(head, key, _size(views))
    except ValueError as error:
        return error


def _fault(code: int) -> OSError | None:
    """The error that a code of Mooncake below 0 stands for."""
    if code in MISSING:
        return FileNotFoundError(f"it is not in the shared pool: code {code}")
    if code == FULL:
        return OSError(errno.ENOSPC, "it is full")
    return ConnectionError(f"Mooncake's code {code}") if code < 0 else None
