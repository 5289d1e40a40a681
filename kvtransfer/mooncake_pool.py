"""Mooncake Store as a store of units that several workers share.

A process of its own speaks to it (`mooncake_process.py`). One that does not answer is killed, and
the next `open` starts another.
"""

import errno
import hashlib
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
from typing import Final, TypeVar

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
from effuse.kvtransfer.stores import HEAD, MOST_BOUNDARY, Threads, UnitFacts, UnitStore, unpack
from effuse.kvtransfer.units import Key

_Sought = tuple[Sequence[str], "Future[int]"]
_Wanted = tuple[Key, Sequence[memoryview], "Future[UnitFacts]"]
_Kept = tuple[Key, Sequence[memoryview], "Future[int]", Callable[[], UnitFacts]]
_Moving = TypeVar("_Moving", _Wanted, _Kept)

_READERS: Final = 2
_KEPT_UNITS: Final = 32  # in one call; prompts on their way to the pool wait for each call's end
_ANSWER_S: Final = 10.0  # of a call, and of the process's start; tiers wait less
_KILLED_S: Final = 5.0
_MOST_KNOWN: Final = 1 << 18  # units; those of the pool are forgotten here beyond that
_PROBE: Final = "effuse/probe"


def check_package() -> None:
    """Raises ValueError if Mooncake cannot be imported. In a process of its own, because Mooncake
    changes the one that imports it."""
    if find_spec("mooncake") is None:
        raise ValueError(f"--kv-pool: {lacking('mooncake')}")
    command = (sys.executable, "-P", "-c", "import mooncake.store")
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        reason = tried.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"--kv-pool: the package mooncake does not work here: {reason}")


class _Client:
    """The process, and the lanes to it."""

    def __init__(self, address: PoolAddress, host: HostPages) -> None:
        """Starts it, and waits until it is connected. Raises ConnectionError."""
        pairs = [socket.socketpair() for _ in range(_READERS + 2)]
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
            raise ConnectionError(str(error) or "its client has ended") from error
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
        self._prefix = "/".join(part for part in ("effuse", address.namespace, content) if part)
        place = f"{address.host}:{address.port}/{self._prefix}".encode()
        self.number = int.from_bytes(hashlib.sha256(place).digest()[:7]) or 1
        # No search waits for a read.
        self._finder, self._readers, self._writer = Threads(1), Threads(_READERS), Threads(1)
        self._searches: SimpleQueue[_Sought] = SimpleQueue()
        self._loads: SimpleQueue[_Wanted] = SimpleQueue()
        self._keeps: SimpleQueue[_Kept] = SimpleQueue()
        self._client: _Client | None = None
        self._lock = Lock()
        self._base = address_of(host.views([0])[0])

    def kept(self, key: Key, before: Key, size: int) -> None:
        super().kept(key, before, size)
        while len(self) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def open(self) -> "Future[object]":
        return self._finder.submit(self._open)

    def find(self, units: Mapping[Key, Key]) -> "Future[int]":
        result: Future[int] = Future()
        self._searches.put(([self._name(key) for key in units], result))
        self._finder.submit(self._find_some)
        return result

    def load(self, key: Key, views: Sequence[memoryview]) -> "Future[UnitFacts]":
        result: Future[UnitFacts] = Future()
        self._loads.put((key, views, result))
        self._readers.submit(self._load_some)
        return result

    def keep(
        self,
        key: Key,
        before: Key,
        facts: Callable[[], UnitFacts],
        views: Sequence[memoryview],
    ) -> "Future[int]":
        result: Future[int] = Future()
        self._keeps.put((key, views, result, facts))
        self._writer.submit(self._keep_some)
        return result

    def remove(self, key: Key, before: Key) -> None:
        self._writer.submit(self._call, PoolCall("remove", (self._name(key),)))

    def close(self) -> None:
        for threads in (self._finder, self._readers, self._writer):
            threads.close()
        if self._client is not None:
            self._client.kill()

    def _name(self, key: Key) -> str:
        return f"{self._prefix}/{key.hex()}"

    def _open(self) -> None:
        with self._lock:
            if self._client is None or self._client.has_ended:
                self._client = _Client(self._address, self._host)
        _checked(self._call(PoolCall("find", (_PROBE,))).codes[0])

    def _find_some(self) -> None:
        """All searches that wait, in one call, because each takes some ms; there may be none."""
        batch: list[_Sought] = []
        with suppress(Empty):
            while True:
                one = self._searches.get_nowait()
                if one[1].set_running_or_notify_cancel():
                    batch.append(one)
        names = tuple(chain.from_iterable(names for names, _ in batch))
        try:
            codes = iter(self._call(PoolCall("find", names)).codes if names else ())
        except OSError as error:
            for _, result in batch:
                result.set_exception(error)
            return
        for asked, result in batch:
            found = list(islice(codes, len(asked)))
            try:
                _checked(min(found, default=0))
                result.set_result(len(list(takewhile(bool, found))))
            except OSError as error:
                result.set_exception(error)

    def _load_some(self) -> None:
        """Units that wait to be loaded, as many as one call takes; there may be none."""
        if not (batch := _taken(self._loads)):
            return
        names = tuple(self._name(key) for key, _, _ in batch)
        places = tuple(self._places(views) for _, views, _ in batch)
        try:
            answer = self._call(PoolCall("load", names, places=places))
        except OSError as error:
            answer = None
            for _, _, result in batch:
                result.set_exception(error)
        if answer is not None:
            for one, code, head in zip(batch, answer.codes, answer.heads, strict=True):
                _finish(one, code, head)

    def _keep_some(self) -> None:
        """The same for units to keep."""
        if not (batch := _taken(self._keeps, _KEPT_UNITS)):
            return
        names = tuple(self._name(key) for key, *_ in batch)
        places = tuple(self._places(views) for _, views, *_ in batch)
        try:
            heads = tuple(facts().pack(key, _size(views)) for key, views, _, facts in batch)
            codes = self._call(PoolCall("keep", names, heads, places)).codes
        except Exception as error:  # noqa: BLE001  the reader of each result gets it
            for _, _, result, _ in batch:
                result.set_exception(error)
            return
        for (_, views, result, _), head, code in zip(batch, heads, codes, strict=True):
            try:
                _checked(0 if code == PRESENT else code)
                result.set_result(len(head) + _size(views))
            except OSError as error:
                result.set_exception(error)

    def _call(self, call: PoolCall) -> PoolAnswer:
        if (client := self._client) is None:
            raise ConnectionError("it has no client")
        answer = client.call(call)
        expected = len(call.names)
        if len(answer.codes) != expected:
            text = f"its client sent {len(answer.codes)} codes, expected {expected}"
            raise ConnectionError(text)
        return answer

    def _places(self, views: Sequence[memoryview]) -> Extents:
        """Offsets and sizes of slots in the host's memory, neighbours together."""
        found: list[tuple[int, int]] = []
        for view in views:
            at = address_of(view) - self._base
            if found and sum(found[-1]) == at:
                found[-1] = found[-1][0], found[-1][1] + view.nbytes
            else:
                found.append((at, view.nbytes))
        return tuple(found)


def _taken(queue: "SimpleQueue[_Moving]", most: int = MOST_UNITS) -> list[_Moving]:
    """Units that wait, as many as one call takes."""
    batch: list[_Moving] = []
    num_bytes = 0
    with suppress(Empty):
        while len(batch) < most and num_bytes < MOST_BYTES:
            one = queue.get_nowait()
            if one[2].set_running_or_notify_cancel():
                batch.append(one)
                num_bytes += _size(one[1])
    return batch


def _size(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _finish(load: _Wanted, code: int, head: bytes) -> None:
    key, views, result = load
    try:
        _checked(code)
        result.set_result(unpack(head, key, _size(views)))
    except (OSError, ValueError) as error:
        result.set_exception(error)


def _checked(code: int) -> int:
    """Raises OSError for a code of Mooncake that is below 0."""
    if code in MISSING:
        raise FileNotFoundError(f"it is not in the shared pool: code {code}")
    if code == FULL:
        raise OSError(errno.ENOSPC, "it is full")
    if code < 0:
        raise ConnectionError(f"Mooncake's code {code}")
    return code
