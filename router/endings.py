"""Calls of attempts whose end is decided: they end by themselves beside the requests, or are ended.

An answer is given as soon as its last token is known; what its calls still say concerns nobody, but
none of them may be left. Not here: which calls are cancelled at once (`attempt.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import grpc

SETTLE_S: Final = 0.25
"""What calls of an attempt that is over have to end by themselves."""

LegTask: TypeAlias = "asyncio.Task[None]"


class Ending(Protocol):
    """A call of ours."""

    async def code(self) -> grpc.StatusCode:
        """Its status, once it has ended."""


class Endings:
    """Use: `async with Endings() as endings`; leaving waits for those that are open, `SETTLE_S` at
    most."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._group = asyncio.TaskGroup()
        self._is_open = False
        self.num_open = 0
        self.num_late = 0

    async def __aenter__(self) -> Endings:
        await self._group.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._is_open = False
        await self._group.__aexit__(kind, error, None)

    def settle(
        self,
        calls: Sequence[Ending],
        legs: Sequence[LegTask],
        end: Callable[[], None] | None = None,
    ) -> None:
        """Takes over what an attempt leaves. `end` makes every call of it end; it is called where
        that has not happened in time."""
        if not self._is_open:
            _cut_off(legs, end)
            return
        self.num_open += 1
        self._group.create_task(self._settle(calls, legs, end))

    async def _settle(
        self, calls: Sequence[Ending], legs: Sequence[LegTask], end: Callable[[], None] | None
    ) -> None:
        try:
            async with asyncio.timeout(self._settle_s):
                for call in calls:
                    await call.code()
                if legs:
                    await asyncio.wait(legs)
        except TimeoutError:
            self.num_late += 1
            _cut_off(legs, end)
            if legs:
                await asyncio.wait(legs)
        finally:
            self.num_open -= 1


def _cut_off(legs: Sequence[LegTask], end: Callable[[], None] | None) -> None:
    if end is not None:
        end()
    for leg in legs:
        leg.cancel()
