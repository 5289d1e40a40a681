"""Calls of attempts that are over: awaited for a while, then ended, and none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from effuse.placement.records import WorkerRecord
from effuse.router.calls import Cleanup
from effuse.router.fleet import RoutedFleet


class Call:
    """Ends when told to."""

    def __init__(self) -> None:
        self.has_ended = False
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        self.has_ended = True
        for callback in self._callbacks:
            callback(self)


class NoWorkers:
    def workers(self) -> list[WorkerRecord]:
        return []


def cleanup_of(settle_s: float) -> Cleanup:
    return Cleanup(RoutedFleet(NoWorkers(), "auto", lambda: 0.0), settle_s)


def test_what_ends_by_itself_is_let_be() -> None:
    async def main() -> None:
        cut: list[str] = []
        cleanup = cleanup_of(settle_s=10)
        async with cleanup.running():
            call, reader = Call(), asyncio.create_task(asyncio.sleep(0))
            cleanup.settle_calls([call], [reader], lambda: cut.append("cut"))
            assert cleanup.num_open == 1
            call.end()
        assert (cut, cleanup.num_open, cleanup.num_late) == ([], 0, 0)
        assert reader.done() and not reader.cancelled()

    asyncio.run(main())


def test_what_does_not_end_is_ended() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=0.01)
        async with cleanup.running():
            call, reader = Call(), asyncio.create_task(asyncio.Event().wait())
            cleanup.settle_calls([call], [reader], call.end)  # type: ignore[list-item]
        assert call.has_ended and reader.cancelled()
        assert (cleanup.num_open, cleanup.num_late) == (0, 1)

    asyncio.run(main())


def test_after_the_end_everything_is_ended_at_once() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=10)
        call, reader = Call(), asyncio.create_task(asyncio.Event().wait())
        cleanup.settle_calls([call], [reader], call.end)  # type: ignore[list-item]
        assert call.has_ended
        await asyncio.wait({reader}, timeout=30)
        assert reader.cancelled()

    asyncio.run(main())
