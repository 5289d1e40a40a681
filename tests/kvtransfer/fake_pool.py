"""A pool of units that several scenes share, in this process, with all faults that a pool has."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from effuse.kvtransfer.stores import HEAD, UnitFacts, UnitStore, size_of_boundary, unpack


@dataclass
class SharedUnits:
    """What the pool holds, and its present fault: dead, stuck, full or none."""

    units: dict[bytes, bytearray] = field(default_factory=dict)  # heads with KV, by key
    fault: str = ""
    calls: list[str] = field(default_factory=list)


class FakePool(UnitStore):
    """One worker's access to it."""

    kind = "pool"
    name = "the shared pool"
    keeps_all = True
    most_writes = 8

    def __init__(self, shared: SharedUnits) -> None:
        self._shared = shared
        self.stuck: list[Future[Any]] = []
        super().__init__()

    def open(self) -> Future[object]:
        return self._do("open", lambda: None)

    def find(self, units: Mapping[bytes, bytes]) -> Future[int]:
        def count() -> int:
            has = [key in self._shared.units for key in units]
            return [*has, False].index(False)

        return self._do("find", count)

    def load(self, key: bytes, views: Sequence[memoryview]) -> Future[UnitFacts]:
        def load() -> UnitFacts:
            if (data := self._shared.units.get(key)) is None:
                raise FileNotFoundError("it is gone")
            size = sum(view.nbytes for view in views)
            end = HEAD.size + size_of_boundary(bytes(data[: HEAD.size]), size)
            facts, at = unpack(bytes(data[:end]), key, size), end
            for view in views:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes
            return facts

        return self._do("load", load)

    def keep(
        self,
        key: bytes,
        before: bytes,
        facts: Callable[[], UnitFacts],
        views: Sequence[memoryview],
    ) -> Future[int]:
        def keep() -> int:
            if self._shared.fault == "full":
                raise OSError(errno.ENOSPC, "it is full")
            head = facts().pack(key, sum(view.nbytes for view in views))
            self._shared.units.setdefault(key, bytearray(head + b"".join(views)))
            return len(self._shared.units[key])

        return self._do("keep", keep)

    def remove(self, key: bytes, before: bytes) -> None:
        self._do("remove", lambda: self._shared.units.pop(key, None))

    def close(self) -> None:
        pass

    def _do(self, name: str, run: Callable[[], Any]) -> Future[Any]:
        self._shared.calls.append(name)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        if self._shared.fault == "stuck":
            self.stuck.append(future)
            return future
        try:
            if self._shared.fault == "dead":
                raise ConnectionError("it is dead")
            future.set_result(run())
        except (OSError, ValueError) as error:
            future.set_exception(error)
        return future
