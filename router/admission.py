"""Who may run now, who waits, who is refused: a bounded queue in front of the fleet.

No workers, no text, no ids: slots only, as many as `seats.py` says. A waiting request is bounded by
its own deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from effuse.protos.errors import Draining, Overloaded


class Admission:
    """`max_running` requests at once; `max_waiting` behind them, first come first served."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def resize(self, max_running: int) -> None:
        """From now on `max_running` at once; what runs beyond it is left to end."""
        self.max_running = max_running
        self._admit()

    def drain(self) -> None:
        """Admits nothing from now on; what waits already still gets its turn."""
        self._is_draining = True

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot. Waits in the queue; the caller bounds how long.

        Raises `Overloaded` or `Draining` at once, before anything is held."""
        self.check()
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    def check(self) -> None:
        """Raises where a request would be refused now; costs nothing."""
        if self._is_draining:
            raise Draining("the router is shutting down; ask another one", retry_after_s=1.0)
        if self._running >= self.max_running and len(self._waiting) >= self.max_waiting:
            raise Overloaded(
                f"{self._running} requests are running and {len(self._waiting)} are waiting, which "
                "is all this router takes; try again later",
                retry_after_s=1.0,
            )

    async def _acquire(self) -> None:
        if self._running < self.max_running and not self._waiting:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release()  # its turn came in the same moment
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        """Frees a slot, for who waits longest."""
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running < self.max_running:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
