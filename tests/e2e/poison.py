"""A request that ends every engine it runs in, sent again and again, with others around it.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.poison --others 5000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import fronts
import grpc.aio
import redis_server
from eventually import eventually
from fake_engine import CRASH, HANG, KILLED
from router.fake_model import byte_tokenizer

from effuse.decode_worker.server import make_role
from effuse.placement.store import Store
from effuse.protos.channels import OPEN, generation_stub
from effuse.protos.errors import EffuseError, Poisonous, from_rpc_error
from effuse.router import process
from effuse.router.config import RouterConfig
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc as pb_grpc
from effuse.worker.config import WorkerConfig

Generation: TypeAlias = "pb_grpc.GenerationServiceAsyncStub"
NUM_DECODE, NUM_OTHERS, TIMES = 3, 6, 5
PAUSE_S = 1.0  # of the poison's sender, once it has been refused
OTHERS_PAUSE_S = 0.05  # of each other sender, so that they do not fill a core
OTHER = 5  # a prompt that the fake engine answers
POISONS = {"crash": CRASH, "killed": KILLED, "hung": HANG}
"""By the fate of an engine in which it runs."""
MOST_LOST = 3
"""Engines that any of them ends before it is refused."""


def message(first_id: int, seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[first_id, 6, 7]),
        stopping=pb.StoppingParams(max_tokens=32),
        sampling=pb.SamplingParams(seed=seed),
        output=pb.OutputOptions(token_ids=True),
    )


@asynccontextmanager
async def serving_router(redis_url: str) -> AsyncIterator[Router]:
    """A router that knows no worker yet."""
    config, stop = RouterConfig(port=0, redis_url=redis_url, prefill="local"), asyncio.Event()
    async with Store(redis_url, config.fleet) as store, asyncio.TaskGroup() as group:
        router = Router(config, Tokenizer(byte_tokenizer()), store)
        group.create_task(process.serve(router, stop))
        try:
            await router.ports.ready.wait()
            yield router
        finally:
            stop.set()


@asynccontextmanager
async def workers(
    redis_url: str, home: Path, hang_timeout_s: float
) -> AsyncIterator[list[fronts.Running]]:
    """Decode workers whose engines are processes without a model."""
    async with AsyncExitStack() as stack:
        started = []
        for number in range(NUM_DECODE):
            config = WorkerConfig(
                redis_url=redis_url, worker_id=f"decode-{number}", hang_timeout_s=hang_timeout_s
            )
            (directory := home / f"{number}").mkdir()
            one = fronts.running(make_role(), config, directory)
            started.append(await stack.enter_async_context(one))
        yield started


@dataclass
class Others:
    """Requests one after the other, several at a time, until it is over."""

    stub: Generation
    num_answers: int = 0
    failures: list[EffuseError] = field(default_factory=list)
    is_over: bool = False

    async def send(self, seed: int) -> None:
        while not self.is_over:
            try:
                answer = await self.stub.Generate(message(OTHER, seed), timeout=60)
            except grpc.aio.AioRpcError as error:
                self.failures.append(from_rpc_error(error, "router"))
            else:
                assert list(answer.token_ids) == [7] * 32
                self.num_answers += 1
            await asyncio.sleep(OTHERS_PAUSE_S)


async def send_poison(stub: Generation, poison: int) -> EffuseError:
    """The last error before the one without a retry time."""
    while True:
        try:
            await stub.Generate(message(poison, 0), timeout=60)
        except grpc.aio.AioRpcError as caught:
            error = from_rpc_error(caught, "router")
            if error.retry_after_s is None:
                return error
            await asyncio.sleep(error.retry_after_s)
        else:
            raise AssertionError("the poison was answered")


@dataclass
class Outcome:
    """Results of all requests."""

    told: list[EffuseError]  # to the poison, each time it was sent
    lost_engines: int
    num_answers: int  # of the others
    failures: list[EffuseError]


async def carry_out(redis_url: str, home: Path, num_others: int, poison: int) -> Outcome:
    """Sends the poison `TIMES` times while others are answered, so many of them at least."""
    async with (
        serving_router(redis_url) as router,
        workers(redis_url, home, 3.0 if poison == HANG else 60.0) as fleet,
        OPEN.connect(f"127.0.0.1:{router.ports.grpc}", keepalive=None) as channel,
    ):
        await eventually(lambda: len(router.fleet.view.workers()) == NUM_DECODE)
        stub = generation_stub(channel)
        others = Others(stub)
        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_OTHERS):
                group.create_task(others.send(seed))
            await eventually(_more(others, NUM_OTHERS))
            told = [await send_poison(stub, poison) for _ in range(TIMES)]
            await eventually(lambda: _lost_engines(fleet) >= MOST_LOST)
            await eventually(_more(others, NUM_OTHERS))
            while others.num_answers < num_others:
                await asyncio.sleep(PAUSE_S)
                told.append(await send_poison(stub, poison))
            others.is_over = True
        await _is_refused_by_another(redis_url, poison)
        return Outcome(told, _lost_engines(fleet), others.num_answers, others.failures)


async def _is_refused_by_another(redis_url: str, poison: int) -> None:
    """A router that has lost no engine."""
    async with (
        serving_router(redis_url) as router,
        OPEN.connect(f"127.0.0.1:{router.ports.grpc}", keepalive=None) as channel,
    ):
        await eventually(lambda: bool(router.poison.verdicts.refused()))
        assert type(await send_poison(generation_stub(channel), poison)) is Poisonous


def _lost_engines(fleet: list[fronts.Running]) -> int:
    return sum(one.front.shell.supervisor.restarts for one in fleet)


def _more(others: Others, number: int) -> Callable[[], bool]:
    """Whether so many more answers have come."""
    enough = others.num_answers + number
    return lambda: others.num_answers >= enough


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.poison", description=__doc__)
    parser.add_argument(
        "--others", type=int, default=5000, help="least number of requests around it"
    )
    parser.add_argument("--by", choices=POISONS, default="crash", help="how its engines end")
    asked = parser.parse_args()
    poison = POISONS[asked.by]
    with redis_server.running() as redis, tempfile.TemporaryDirectory() as home:
        found = asyncio.run(carry_out(redis.connection_url, Path(home), asked.others, poison))
    print(
        f"the poison was sent {len(found.told)} times and ended {found.lost_engines} engines; "
        f"of {found.num_answers} requests around it {len(found.failures)} failed"
    )
    for error in found.failures[:10]:
        print(f"  {error.code.name}: {error}")
    is_refused = all(type(error) is Poisonous for error in found.told)
    return int(not is_refused or found.lost_engines > MOST_LOST or bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
