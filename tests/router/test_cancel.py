"""Clients that leave at any moment: nothing of their requests is left anywhere."""

from __future__ import annotations

import asyncio
import random

import grpc.aio
import pytest
from router.asking import request
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until

from effuse.v1 import generation_pb2 as pb

POINTS = ["start", "reserved", "verified", "commit 0", "commit 3", "finish"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_a_cancelled_request_is_aborted_on_its_workers(point: str, is_stream: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        reached = asyncio.Event()
        fleet.decode[0].at[point] = holds(asyncio.Event(), reached)
        if is_stream:
            asked = pb.GenerateStreamRequest(request=request(request_id="gone"))
            stream = fleet.generation.GenerateStream(asked)
            reading = asyncio.create_task(stream.read())
            await reached.wait()
            stream.cancel()
        else:
            unary = fleet.generation.Generate(request(request_id="gone"))
            reading = asyncio.ensure_future(unary)
            await reached.wait()
            unary.cancel()
        await asyncio.wait({reading})
        await fleet.idle()
        await fleet.decode[0].abort_came.wait()
        (decode,) = fleet.decode[0].requests
        assert fleet.decode[0].aborted == [decode.attempt.transfer_id]
        if point in ("start", "reserved"):
            assert set(fleet.prefill[0].aborted) <= {decode.attempt.transfer_id}
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="gone"))
        assert (state.state, state.status) == (pb.REQUEST_STATE_CANCELLED, "CANCELLED")
        await fleet.store.until(lambda placements: placements["gone"].state == "cancelled")

    run(body)


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(go, reached)
        first = fleet.generation.Generate(request())
        running = asyncio.ensure_future(first)
        await reached.wait()
        second = fleet.generation.Generate(request())
        waiting = asyncio.ensure_future(second)
        await until(lambda: fleet.router.admission.num_waiting == 1)
        second.cancel()
        await asyncio.wait({waiting})
        await until(lambda: fleet.router.admission.num_waiting == 0)
        go.set()
        await running
        assert len(fleet.decode[0].requests) == 1

    run(body, max_concurrent_requests=1)


def test_cancels_at_random_moments_leave_nothing() -> None:
    draw = random.Random(5)

    async def one(fleet: FakeFleet, turns: int | None) -> str:
        asked = request(output=pb.OutputOptions(drafts=True))
        call = fleet.generation.GenerateStream(pb.GenerateStreamRequest(request=asked))

        async def leave() -> None:
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            if turns is not None:
                call.cancel()

        leaving, text = asyncio.create_task(leave()), ""
        try:
            async for event in call:
                text += event.commit.text
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            text = "cancelled"
        await leaving
        return text

    async def body(fleet: FakeFleet) -> None:
        turns = [draw.randrange(1, 400) if draw.random() < 0.6 else None for _ in range(200)]
        answers = await asyncio.gather(*(one(fleet, after) for after in turns))
        assert {a for a, after in zip(answers, turns, strict=True) if after is None} == {
            "the answer is three"
        }
        assert answers.count("cancelled") > 20
        await fleet.idle()
        assert fleet.router.admission.num_running == fleet.router.admission.num_waiting == 0
        counts = [candidate.in_flight for candidate in fleet.router.fleet.candidates()]
        assert [(c.requests, c.tokens) for c in counts] == [(0, 0)] * 4
        await fleet.store.until(
            lambda placements: all(r.state != "running" for r in placements.values())
        )

    run(body, num_prefill=2, num_decode=2, max_concurrent_requests=64)
