"""Load on a fleet: clients that wait for their answers, or requests that arrive at random.

Arrivals are a Poisson process from a seed, and do not wait for answers, so that delays of a slow
fleet show (an open loop). A request's time begins when it is due, so that a late client hides
nothing.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from effuse.cli.arguments import explain
from effuse.cli.figures import Run, Sample, ServiceGoals
from effuse.cli.generate import ask
from effuse.client.answer import Event, StreamBroken
from effuse.client.credentials import Credentials
from effuse.client.params import Params, make_request
from effuse.protos.rpc import FLEET_LIMITS, channel_options
from effuse.protos.stubs import generation_stub

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_NOTHING = Credentials()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The prompts and their destination."""

    prompts: tuple[str, ...]
    params: Params
    target: str
    timeout_s: float
    credentials: Credentials = _NOTHING


class Tally:
    """The results so far, consistent at any moment; `on_done` is called at each end."""

    def __init__(self, on_done: Callable[[], None], now: Callable[[], float] = time.monotonic):
        self.samples: list[Sample] = []
        self.failures: Counter[str] = Counter()
        self._on_done = on_done
        self._now = now
        self._began = now()

    def begin(self) -> None:
        """Restart the clock, so that earlier work such as loading weights is not measured."""
        self._began = self._now()

    def add(self, result: Sample | str) -> None:
        """Counts an answer, or the reason for a failure."""
        if isinstance(result, Sample):
            self.samples.append(result)
        else:
            self.failures[result] += 1
        self._on_done()

    def tell_failures(self) -> list[str]:
        """A line for each status, with its most frequent text."""
        by_status: dict[str, Counter[str]] = {}
        for text, count in self.failures.items():
            by_status.setdefault(text.partition(":")[0], Counter())[text] += count
        return [
            f"{texts.total()} x {texts.most_common(1)[0][0]}"
            + (f"; {len(texts) - 1} other texts" if len(texts) > 1 else "")
            for _, texts in sorted(by_status.items())
        ]

    def run(self, name: str, goals: ServiceGoals, rate: float = float("nan")) -> Run:
        """The figures so far."""
        total_s, failed = self._now() - self._began, self.failures.total()
        return Run(name, total_s, tuple(self.samples), failed=failed, rate=rate, goals=goals)


def arrival_times(rate: float, count: int, seed: int) -> Iterator[float]:
    """Arrival times of `count` requests in seconds, `rate` per second: a Poisson process."""
    draw, at = random.Random(seed), 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        yield at


async def send_in_turn(traffic: Traffic, concurrency: int, tally: Tally) -> None:
    """Sends every prompt, `concurrency` at a time: each client waits for its answer."""
    waiting = iter(range(len(traffic.prompts)))

    async def client(stub: "GenerationServiceAsyncStub") -> None:
        for at in waiting:
            tally.add(await _send(stub, traffic, at, time.monotonic()))

    async with _group(traffic) as (stub, group):
        for _ in range(min(concurrency, len(traffic.prompts))):
            group.create_task(client(stub))


async def send_as_they_arrive(traffic: Traffic, rate: float, seed: int, tally: Tally) -> None:
    """Sends every prompt when it is due, however many are running."""

    async def one(stub: "GenerationServiceAsyncStub", at: int, due: float) -> None:
        tally.add(await _send(stub, traffic, at, due))

    async with _group(traffic) as (stub, group):
        began = time.monotonic()
        times = arrival_times(rate, len(traffic.prompts), seed)
        for at, due in enumerate(times):
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            group.create_task(one(stub, at, began + due))


@asynccontextmanager
async def _group(
    traffic: Traffic,
) -> AsyncIterator[tuple["GenerationServiceAsyncStub", asyncio.TaskGroup]]:
    options = channel_options(None, FLEET_LIMITS.max_message_bytes)
    async with (
        traffic.credentials.aio_channel(traffic.target, options) as channel,
        asyncio.TaskGroup() as group,
    ):
        yield generation_stub(channel), group


async def _send(
    stub: "GenerationServiceAsyncStub", traffic: Traffic, at: int, due: float
) -> Sample | str:
    """Sends the prompt with this index, due at this time; records times or failure."""
    commits: list[float] = []

    def note(event: Event) -> None:
        # those of other answers at the same time, without order
        if event.HasField("commit") and not event.answer_index:
            commits.append(time.monotonic())

    request = make_request(traffic.prompts[at], traffic.params)
    try:
        answer = await ask(stub, request, timeout_s=traffic.timeout_s, on_event=note)
    except grpc.aio.AioRpcError as error:
        return explain(error, traffic.target)
    except StreamBroken as error:
        return str(error)
    ended = time.monotonic()
    return Sample(
        sum(one.usage.completion_tokens for one in answer.answers),
        sum(one.stats.forward_passes for one in answer.answers),
        (commits[0] if commits else ended) - due,
        ended - due,
        gaps(commits),
        prompt=at,
        text=answer.text,
    )


def gaps(times: Sequence[float]) -> tuple[float, ...]:
    """The differences between neighbours."""
    return tuple(after - before for before, after in pairwise(times))
