"""Prompts are sent in turn or as they arrive, counted once each, and timed from when due."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest

from effuse.cli.figures import Run, ServiceGoals
from effuse.cli.load import (
    Tally,
    Traffic,
    arrival_times,
    gaps,
    send_as_they_arrive,
    send_in_turn,
)
from effuse.client.params import Params
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc as pb_grpc


class FakeRouter(pb_grpc.GenerationServiceServicer):
    """Answers each prompt with two commits of three tokens; refuses "bad", and answers "slow" once
    twelve are there."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self._changed = asyncio.Condition()

    async def all_here(self, count: int) -> None:
        """Returns once so many have been running at once; TimeoutError if they never are."""
        async with self._changed, asyncio.timeout(20):
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.most_running >= count)

    async def GenerateStream(  # type: ignore[override]
        self,
        request: pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
    ) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if request.request.prompt == "bad":
            self.running -= 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a bad prompt")
        if request.request.prompt == "slow":
            await self.all_here(12)
        for offset in (0, 3):
            commit = pb.BlockCommit(token_offset=offset, num_tokens=3, text="abc")
            await context.write(pb.GenerateStreamResponse(commit=commit))
        finished = pb.Finished(
            usage=pb.Usage(completion_tokens=6), stats=pb.GenerationStats(forward_passes=2)
        )
        self.running -= 1
        await context.write(pb.GenerateStreamResponse(finished=finished))

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        raise NotImplementedError

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        raise NotImplementedError

    async def CancelRequest(
        self,
        request: pb.CancelRequestRequest,
        context: grpc.aio.ServicerContext[pb.CancelRequestRequest, pb.CancelRequestResponse],
    ) -> pb.CancelRequestResponse:
        raise NotImplementedError


Send = Callable[[Traffic, Tally], Coroutine[Any, Any, None]]


def _sent(prompts: tuple[str, ...], send: Send) -> tuple[Run, FakeRouter, Tally, int]:
    async def run() -> tuple[Run, FakeRouter, Tally, int]:
        server, router = grpc.aio.server(), FakeRouter()
        ticks: list[int] = []
        pb_grpc.add_GenerationServiceServicer_to_server(router, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        traffic = Traffic(prompts, Params(), f"127.0.0.1:{port}", 20.0)
        tally = Tally(lambda: ticks.append(1))
        try:
            await send(traffic, tally)
        finally:
            await server.stop(None)
        return tally.run("fleet", ServiceGoals()), router, tally, len(ticks)

    return asyncio.run(run())


def test_every_prompt_is_counted_once() -> None:
    told, router, _, ticks = _sent(
        tuple("abcdefgh"), lambda job, tally: send_in_turn(job, 3, tally)
    )
    assert (len(told.samples), told.failed, ticks) == (8, 0, 8)
    assert (told.tokens, told.tokens_per_forward) == (48, 3.0)
    assert all(0 < one.first_block_s <= one.total_s <= told.total_s for one in told.samples)
    assert all(len(one.gaps_s) == 1 for one in told.samples)
    assert router.most_running <= 3


def test_a_failed_request_is_told_and_no_sample() -> None:
    told, _, tally, ticks = _sent(
        ("a", "bad", "b", "bad"), lambda job, tally: send_in_turn(job, 1, tally)
    )
    assert (len(told.samples), told.failed, ticks) == (2, 2, 4)
    assert tally.failure_lines() == ["2 x INVALID_ARGUMENT: a bad prompt"]
    for at in (1, 1, 2):
        tally.add(f"RESOURCE_EXHAUSTED: {at} s late")
    assert tally.failure_lines()[1:] == ["3 x RESOURCE_EXHAUSTED: 1 s late; 1 other texts"]


def test_arrivals_wait_for_no_answer() -> None:
    """All are on their way together, although a waiting client would send one after another."""

    def send(job: Traffic, tally: Tally) -> Coroutine[Any, Any, None]:
        return send_as_they_arrive(job, 1e5, 1, tally)

    told, router, _, ticks = _sent(("slow",) * 12, send)
    assert (len(told.samples), told.failed, ticks) == (12, 0, 12)
    assert router.most_running == 12


def test_arrivals_are_a_poisson_process_of_their_seed() -> None:
    times = list(arrival_times(50.0, 4000, seed=3))
    assert times == list(arrival_times(50.0, 4000, seed=3))
    assert times != list(arrival_times(50.0, 4000, seed=4))
    apart = gaps((0.0, *times))
    average = sum(apart) / len(apart)
    spread = math.sqrt(sum((gap - average) ** 2 for gap in apart) / len(apart))
    assert average == pytest.approx(1 / 50, rel=0.05)
    assert spread == pytest.approx(average, rel=0.08)  # as in an exponential distribution
    assert all(before < after for before, after in pairwise(times))
