"""Load on a running fleet from real clients: text in, text out, a gRPC stream for each request.

Closed (a fixed number at a time) and open (Poisson arrivals at a rate, the same for every fleet).
Times are from the client's clock, next to the answer's own figures.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from effuse.benchmarks.random_checkpoint import word
from effuse.protos.channels import OPEN, generation_stub
from effuse.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

TOKENS_A_FORWARD = (
    4  # for each request: about what a distilled model does, because random weights do not
)
TIMEOUT_S = 120.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a request's prompt and of its answer."""

    prompt: int
    answer: int
    common: int = 0  # first tokens of the prompt, which all requests have

    def __str__(self) -> str:
        known = f" ({self.common} in common)" if self.common else ""
        return f"{self.prompt}/{self.answer}{known}"


@dataclass(frozen=True, slots=True)
class Steady:
    """A number of requests at a time, each followed from one of its blocks to another. All of them
    run until the last one has arrived, so that none starts, ends or prefills meanwhile, and every
    engine does the same work.
    """

    prompt: int
    at_once: int
    first: int
    last: int
    spare: int = 8  # blocks that one may be ahead of the last one

    def __str__(self) -> str:
        return f"{self.at_once} of {self.prompt}"

    def shape(self, block_size: int) -> Shape:
        """The first request must not end before the last one has arrived."""
        return Shape(self.prompt, (self.last + self.spare) * block_size)

    def pace(self, blocks: Sequence[Sequence[float]], block_size: int) -> Pace:
        """blocks: the times of each request's blocks; by now all have come as far as they are
        followed.
        """
        begins = [each[self.first] for each in blocks]
        ends = [each[self.last] for each in blocks]
        forwards = block_size // TOKENS_A_FORWARD
        seconds = (sum(ends) - sum(begins)) / len(blocks)
        step_s = seconds / (self.last - self.first) / forwards
        lags = [round((begin - min(begins)) / step_s) for begin in begins]
        phases = len({lag % forwards for lag in lags})
        return Pace(step_s, max(begins), min(ends), lags, phases)


@dataclass(frozen=True, slots=True)
class Pace:
    """For a steady load: seconds of a step, between two points of the monotonic clock.

    A step has more rows if a block begins, and as many steps of a block have such rows as requests
    are at different steps of theirs: `phases`.
    """

    step_s: float
    begin: float
    end: float
    lags: Sequence[int]  # steps by which each is behind the first
    phases: int

    def __str__(self) -> str:
        return f"{1e3 * self.step_s:.3f} ms a step, phases {self.phases}"


@dataclass(slots=True)
class Taken:
    """Times of one request in seconds; points in time are on this machine's monotonic clock."""

    shape: Shape
    sent: float
    blocks: list[float] = field(default_factory=list)  # arrival of each
    sizes: list[int] = field(default_factory=list)  # tokens of each
    ended: float = 0.0
    failure: str = ""
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    kv_bytes: int = 0
    forwards: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def first_s(self) -> float:
        """From sending to the first block."""
        return self.blocks[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between one block and the next."""
        return [after - before for before, after in pairwise(self.blocks)]


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a load: all of its requests, and its time span."""

    requests: list[Taken]
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class Client:
    """Sends requests with prompts of random words to one router."""

    def __init__(
        self, stub: GenerationServiceAsyncStub, num_words: int, block_size: int, seed: int = 1
    ) -> None:
        self._stub = stub
        self._num_words = num_words
        self._block_size = block_size
        self._draw = random.Random(seed)

    async def ask(self, shape: Shape, into: list[Taken] | None = None) -> Taken:
        """One request. A failed one has `failure`."""
        request = self._request(shape)
        taken = Taken(shape, time.monotonic())
        if into is not None:
            into.append(taken)
        try:
            async for event in self._stub.GenerateStream(
                pb.GenerateStreamRequest(request=request), timeout=TIMEOUT_S
            ):
                _take(taken, event)
        except grpc.aio.AioRpcError as error:
            taken.failure = f"{error.code().name}: {error.details()}"
        else:
            if not taken.ended:
                taken.failure = "the stream ended without its last message"
        return taken

    async def alone(self, shape: Shape, count: int) -> list[Taken]:
        """Requests one after another, on an idle fleet."""
        return [await self.ask(shape) for _ in range(count)]

    async def closed(self, shape: Shape, at_once: int, warm_s: float, seconds: float) -> Window:
        """Keeps `at_once` requests running. The window begins after `warm_s` and once the first
        answer of each client, which is shorter, has ended.
        """
        taken: list[Taken] = []
        warm = time.monotonic() + warm_s
        firsts: list[float] = []

        def begin() -> float:
            return max(warm, *firsts) if len(firsts) == at_once else math.inf

        async def user(number: int) -> None:
            # Spread over the first moments, and with first answers of all lengths.
            await asyncio.sleep(0.5 * warm_s * number / at_once)
            first = max(1, shape.answer * (number + 1) // at_once)
            await self.ask(replace(shape, answer=first), taken)
            firsts.append(time.monotonic())
            while time.monotonic() < begin() + seconds:
                await self.ask(shape, taken)

        async with asyncio.TaskGroup() as users:
            for number in range(at_once):
                users.create_task(user(number))
        return Window(taken, begin(), begin() + seconds)

    async def arriving(self, shape: Shape, rate: float, seconds: float, seed: int) -> Window:
        """Starts requests at their times, however many are running; returns once all have ended."""
        taken: list[Taken] = []
        begin = time.monotonic()
        async with asyncio.TaskGroup() as users:
            for at in arrivals(rate, seconds, seed):
                await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
                users.create_task(self.ask(shape, taken))
        return Window(taken, begin, begin + seconds)

    async def steady(self, load: Steady) -> Pace:
        """Starts all together and cancels them when they have come far enough. Raises RuntimeError
        if one ends before.
        """
        taken: list[Taken] = []
        shape = load.shape(self._block_size)
        asking = [asyncio.create_task(self.ask(shape, taken)) for _ in range(load.at_once)]
        try:
            while len(taken) < load.at_once or any(len(one.blocks) <= load.last for one in taken):
                if any(one.done() for one in asking):
                    raise RuntimeError(f"a request ended early: {[one.failure for one in taken]}")
                await asyncio.sleep(_LOOK_S)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return load.pace([one.blocks for one in taken], self._block_size)

    def _request(self, shape: Shape) -> pb.GenerateRequest:
        common = (word(i % self._num_words) for i in range(shape.common))
        own = range(shape.prompt - shape.common)
        words = (*common, *(word(self._draw.randrange(self._num_words)) for _ in own))
        return pb.GenerateRequest(
            prompt=" ".join(words),
            stopping=pb.StoppingParams(max_tokens=shape.answer, ignore_eos=True),
            decoding=pb.DecodingParams(
                algorithm=pb.ALGORITHM_BLOCK_DIFFUSION,
                remasking=pb.REMASKING_LOW_CONFIDENCE_STATIC,
                denoising_steps=self._block_size // TOKENS_A_FORWARD,
            ),
        )


@asynccontextmanager
async def client_of(
    address: str, num_words: int, block_size: int, seed: int = 1
) -> AsyncIterator[Client]:
    """A client of the router there; prompts take words 0 to `num_words`. Clients of one seed send
    the same prompts, which caches know.
    """
    async with OPEN.connect(address, keepalive=None) as channel:
        yield Client(generation_stub(channel), num_words, block_size, seed)


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Arrival times of requests in seconds: a Poisson process."""
    draw = random.Random(seed)
    at = draw.expovariate(rate)
    while at < seconds:
        yield at
        at += draw.expovariate(rate)


def _take(taken: Taken, event: pb.GenerateStreamResponse) -> None:
    if event.HasField("commit"):
        taken.blocks.append(time.monotonic())
        taken.sizes.append(event.commit.num_tokens)
    elif event.HasField("finished"):
        stats = event.finished.stats
        taken.ended = time.monotonic()
        taken.prefill_s = stats.prefill_duration.ToTimedelta().total_seconds()
        taken.handoff_s = stats.handoff_duration.ToTimedelta().total_seconds()
        taken.kv_bytes, taken.forwards = stats.kv_bytes, stats.forward_passes
        taken.prefill_worker, taken.decode_worker = stats.prefill_worker, stats.decode_worker
