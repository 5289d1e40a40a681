"""A drain on request: its refusals, its ends, and how it is undone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fake_engine
import fronts
from eventually import eventually
from fronts import decode_request, event_of, running
from router.fakes import pass_time
from worker.test_front import CONFIG, DECODE, NOT_SERVING, SERVING, failure, health

from effuse.decode_worker.server import make_role
from effuse.protos.errors import Draining
from effuse.v1 import worker_pb2 as pb


def test_a_drain_refuses_new_requests_and_lets_running_ones_end(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            endless = one.decode.Decode(
                decode_request("endless", one.incarnation, fake_engine.ENDLESS), timeout=20
            )
            assert (await event_of(endless)).HasField("reservation")
            answered = await one.worker.Drain(pb.DrainRequest(deadline_s=0.3), timeout=30)
            assert answered.running == 1
            assert isinstance(await failure(one, decode_request("new", one.incarnation)), Draining)
            await eventually(lambda: is_not_serving(one))
            assert (await one.load()).draining
            assert isinstance(await fronts.failure_of(endless), Draining)
            await one.until_free()

    async def is_not_serving(one: fronts.Running) -> bool:
        return bool(await health(one.channel, DECODE) == NOT_SERVING)

    asyncio.run(go())


def test_a_drain_can_be_taken_back(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            endless = one.decode.Decode(
                decode_request("endless", one.incarnation, fake_engine.ENDLESS), timeout=50
            )
            assert (await event_of(endless)).HasField("reservation")
            await one.worker.Drain(pb.DrainRequest(deadline_s=20), timeout=30)
            assert isinstance(await failure(one, decode_request("new", one.incarnation)), Draining)
            answered = await one.worker.Undrain(pb.UndrainRequest(), timeout=30)
            assert answered.running == 1
            await eventually(lambda: is_serving(one))
            assert not (await one.load()).draining
            pass_time(21)  # past the deadline of the drain
            other = one.decode.Decode(
                decode_request("other", one.incarnation, fake_engine.ENDLESS), timeout=20
            )
            assert (await event_of(other)).HasField("reservation")
            assert (await one.load()).running == 2
            endless.cancel()
            other.cancel()
            await one.until_free()

    async def is_serving(one: fronts.Running) -> bool:
        return bool(await health(one.channel, DECODE) == SERVING)

    asyncio.run(go())
