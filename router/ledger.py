"""The lives of requests by id: those that run, and for a while those that ended.

Refuses an id that is running. Lives of other routers are in Redis, not here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from effuse.protos.errors import AlreadyRunning
from effuse.router.request import Life

REMEMBERED_S: Final = 300.0
MOST_REMEMBERED: Final = 4096


class Ledger:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: dict[str, Life] = {}
        self.idle = asyncio.Event()
        """Set while no request is queued or on workers."""
        self.idle.set()
        self._ended: OrderedDict[str, tuple[float, Life]] = OrderedDict()

    @property
    def num_running(self) -> int:
        """Requests that are queued or on workers."""
        return len(self._running)

    def check(self, request_id: str) -> None:
        """Raises `AlreadyRunning` where a request has this id."""
        if request_id in self._running:
            raise AlreadyRunning(f"a request with id {request_id!r} is running; choose another id")

    @contextmanager
    def running(self, life: Life) -> Iterator[None]:
        """Holds the id of `life`; raises `AlreadyRunning` where another request has it."""
        request_id = life.request_id
        self.check(request_id)
        self._running[request_id] = life
        self.idle.clear()
        try:
            yield
        finally:
            del self._running[request_id]
            if not self._running:
                self.idle.set()
            self._remember(life)

    def find(self, request_id: str) -> Life | None:
        """The life of a request that runs here or ended a short while ago."""
        life = self._running.get(request_id)
        if life is not None:
            return life
        self._forget_old()
        held = self._ended.get(request_id)
        return None if held is None else held[1]

    def _remember(self, life: Life) -> None:
        self._ended.pop(life.request_id, None)
        self._ended[life.request_id] = (self._now() + REMEMBERED_S, life)
        self._forget_old()

    def _forget_old(self) -> None:
        now = self._now()
        while self._ended:
            until, life = next(iter(self._ended.values()))
            if until > now and len(self._ended) <= MOST_REMEMBERED:
                return
            del self._ended[life.request_id]
