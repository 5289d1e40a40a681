"""Calls of attempts that are over: awaited for a while, then ended, and none is left."""

from __future__ import annotations

import asyncio

import grpc

from effuse.router.endings import Endings


class Call:
    """Ends when told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def code(self) -> grpc.StatusCode:
        await self.ended.wait()
        return grpc.StatusCode.OK


def test_what_ends_by_itself_is_let_be() -> None:
    async def main() -> None:
        cut: list[str] = []
        async with Endings(settle_s=10) as endings:
            call, leg = Call(), asyncio.create_task(asyncio.sleep(0))
            endings.settle([call], [leg], lambda: cut.append("cut"))
            assert endings.num_open == 1
            call.ended.set()
        assert (cut, endings.num_open, endings.num_late) == ([], 0, 0)
        assert leg.done() and not leg.cancelled()

    asyncio.run(main())


def test_what_does_not_end_is_ended() -> None:
    async def main() -> None:
        async with Endings(settle_s=0.01) as endings:
            call, leg = Call(), asyncio.create_task(asyncio.Event().wait())
            endings.settle([call], [leg], call.ended.set)  # type: ignore[list-item]
        assert call.ended.is_set() and leg.cancelled()
        assert (endings.num_open, endings.num_late) == (0, 1)

    asyncio.run(main())


def test_after_the_end_everything_is_ended_at_once() -> None:
    async def main() -> None:
        endings = Endings()
        call, leg = Call(), asyncio.create_task(asyncio.Event().wait())
        endings.settle([call], [leg], call.ended.set)  # type: ignore[list-item]
        assert call.ended.is_set()
        await asyncio.wait({leg}, timeout=30)
        assert leg.cancelled()

    asyncio.run(main())
