"""Calls of attempts that are over: awaited for a while, then ended, and none is left."""

from __future__ import annotations

import asyncio

import grpc

from effuse.placement.records import WorkerRecord
from effuse.router.calls import Cleanup
from effuse.router.fleet import RoutedFleet


class Call:
    """Ends when told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def code(self) -> grpc.StatusCode:
        await self.ended.wait()
        return grpc.StatusCode.OK


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
            call.ended.set()
        assert (cut, cleanup.num_open, cleanup.num_late) == ([], 0, 0)
        assert reader.done() and not reader.cancelled()

    asyncio.run(main())


def test_what_does_not_end_is_ended() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=0.01)
        async with cleanup.running():
            call, reader = Call(), asyncio.create_task(asyncio.Event().wait())
            cleanup.settle_calls([call], [reader], call.ended.set)  # type: ignore[list-item]
        assert call.ended.is_set() and reader.cancelled()
        assert (cleanup.num_open, cleanup.num_late) == (0, 1)

    asyncio.run(main())


def test_after_the_end_everything_is_ended_at_once() -> None:
    async def main() -> None:
        cleanup = cleanup_of(settle_s=10)
        call, reader = Call(), asyncio.create_task(asyncio.Event().wait())
        cleanup.settle_calls([call], [reader], call.ended.set)  # type: ignore[list-item]
        assert call.ended.is_set()
        await asyncio.wait({reader}, timeout=30)
        assert reader.cancelled()

    asyncio.run(main())
