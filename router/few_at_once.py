"""Work beside the answers that threads do, a few pieces at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeVar

from effuse.protos.errors import Overloaded

T = TypeVar("T")

MOST_WAITING: Final = 64
"""Calls without an answer that wait for their turn; each keeps its message meanwhile."""


class FewAtOnce(asyncio.Semaphore):
    """Takes turns in the order of the calls. Raises `Overloaded` if too many wait already."""

    def __init__(self, number: int, most_waiting: float = MOST_WAITING) -> None:
        super().__init__(number)
        self.num_waiting = 0
        self._most_waiting = most_waiting

    async def acquire(self) -> Literal[True]:
        if self.locked() and self.num_waiting >= self._most_waiting:
            text = f"{self.num_waiting} calls wait for the router's threads; try again later"
            raise Overloaded(text, retry_after_s=1.0)
        self.num_waiting += 1
        try:
            return await super().acquire()
        finally:
            self.num_waiting -= 1

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does the work in turn. If the caller leaves meanwhile, its turn still ends with the work,
        which a thread cannot drop."""
        await self.acquire()
        task = asyncio.ensure_future(work())
        task.add_done_callback(lambda _: self.release())
        return await asyncio.shield(task)
