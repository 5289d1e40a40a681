"""Engines killed and frozen one on top of the other, one ready at any time: how long does a client
see nothing? Real routers, fronts and engine processes; engines without a model.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.overlapping --faults 100
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import fronts
import grpc.aio
import psutil
import redis_server
from e2e.poison import Generation, message, serving_router
from eventually import eventually
from fake_engine import SLOW

from effuse.decode_worker.server import make_role
from effuse.protos.channels import OPEN, generation_stub
from effuse.router.request import Request
from effuse.router.router import Router
from effuse.v1 import generation_pb2 as pb
from effuse.worker.config import WorkerConfig

CLIENTS = 12
LIMIT_S = 900.0  # of a whole run
LENGTH = 32  # tokens of an answer
MEAN_LULL_S = 0.4
LONGEST_FREEZE_S = 8.0
REASONS = ("worker", "alone", "seat", "budget")


@dataclass
class Gap:
    """The longest time in which a client saw nothing of a request, and the faults that the request
    met.
    """

    seconds: float
    request_id: str
    story: str = ""


@dataclass
class Outcome:
    """Results of all requests."""

    faults: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    stalled: Counter[str] = field(default_factory=Counter)  # request seconds, by reason

    def tell(self) -> str:
        """Several lines."""
        found = sorted((one.seconds for one in self.gaps), reverse=True) or [0.0]
        shares = {f"p{one}": found[len(found) * (100 - one) // 100] for one in (50, 90, 99)}
        told = ", ".join(f"{name} {value:.2f} s" for name, value in shares.items())
        slowest = sorted(self.gaps, key=lambda one: -one.seconds)[:5]
        return "\n".join(
            [
                f"{dict(self.faults)}; {len(found)} requests, {len(self.failures)} failed, "
                f"{self.wrong} wrong",
                f"longest time without a word: {told}, most {found[0]:.2f} s",
                "seconds that requests waited: "
                + ", ".join(f"{name} {value:.1f}" for name, value in self.stalled.items()),
                *(f"  {one.seconds:.2f} s, {one.request_id}: {one.story}" for one in slowest),
                *(f"  {one}" for one in self.failures[:5]),
            ]
        )


class Injector:
    """Ends engines of a fleet, one of which is ready whenever another one is hit."""

    def __init__(self, fleet: list[fronts.Running], router: Router, seed: int) -> None:
        self._fleet = fleet
        self._router = router
        self._draw = random.Random(seed)
        self._frozen: dict[str, asyncio.Task[None]] = {}

    def ready(self) -> list[fronts.Running]:
        """Workers whose engine is ready, running and known as ready."""
        known = {one.record.life for one in self._router.fleet.candidates()
                 if one.condition.value == "ready"}  # fmt: skip
        return [one for one in self._fleet if _life(one) in known and _runs(one)]

    async def inject(self, outcome: Outcome) -> None:
        """One fault, once the fleet can bear it."""
        while len(ready := self.ready()) < 2:  # noqa: ASYNC110  # no engine tells that it is hit
            await asyncio.sleep(0.01)
        victim = self._draw.choice(ready)
        life = victim.front.shell.supervisor.life
        assert life is not None and len(self.ready()) >= 2
        process = psutil.Process(life.client.pid)
        if outcome.faults.total() % 2:  # the first one is frozen, which shows whence it comes
            process.kill()
            outcome.faults["killed"] += 1
            return
        process.suspend()
        outcome.faults["frozen"] += 1
        hold_s = self._draw.uniform(0.2, LONGEST_FREEZE_S)
        self._frozen[life.incarnation] = asyncio.create_task(_let_go_on(process, hold_s))

    async def carry_out(self, faults: int, outcome: Outcome) -> None:
        """All of them."""
        for _ in range(faults):
            await asyncio.sleep(self._draw.expovariate(1 / MEAN_LULL_S))
            await self.inject(outcome)
        await asyncio.gather(*self._frozen.values())


async def _let_go_on(process: psutil.Process, hold_s: float) -> None:
    await asyncio.sleep(hold_s)
    with suppress(psutil.NoSuchProcess):
        process.resume()


def _life(one: fronts.Running) -> tuple[str, str] | None:
    life = one.front.shell.supervisor.life
    return None if life is None else (one.front.shell.worker_id, life.incarnation)


def _runs(one: fronts.Running) -> bool:
    life = one.front.shell.supervisor.life
    with suppress(psutil.NoSuchProcess):
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        return life is not None and psutil.Process(life.client.pid).status() not in stopped
    return False


async def send(
    stub: Generation, router: Router, client: int, is_over: Callable[[], bool], outcome: Outcome
) -> None:
    """One stream after the other."""
    number = 0
    while not is_over():
        name = f"r-{client}-{number}"
        number += 1
        asked = message(SLOW, 1000 * client + number)
        asked.request_id = name
        tokens, at, gap_s, story = list[int](), time.monotonic(), 0.0, ""
        try:
            call = stub.GenerateStream(pb.GenerateStreamRequest(request=asked), timeout=120)
            async for event in call:
                now = time.monotonic()
                at, gap_s = now, max(gap_s, now - at)
                tokens += event.commit.token_ids
                if isinstance(request := router.requests._running.get(name), Request):
                    story = request.answer.history()
        except grpc.aio.AioRpcError as error:
            outcome.failures.append(f"{error.code().name}: {error.details()}")
            continue
        outcome.gaps.append(Gap(max(gap_s, time.monotonic() - at), name, _lost(story)))
        outcome.wrong += tokens != [7] * LENGTH


def _lost(story: str) -> str:
    """The parts of a story that are no commits."""
    return ", ".join(one for one in story.split(", ") if not one.startswith("committed"))


async def _sample(router: Router, outcome: Outcome) -> None:
    while True:
        await asyncio.sleep(0.05)
        for reason in REASONS:
            waiting = router.metrics.value("effuse_num_requests_stalled", {"reason": reason})
            outcome.stalled[reason] += (waiting or 0.0) * 0.05  # type: ignore[assignment]


async def carry_out(
    redis_url: str, home: Path, faults: int, *, workers: int = 3, seed: int = 1
) -> Outcome:
    """So many faults under load."""
    outcome = Outcome()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(serving_router(redis_url))
        fleet = []
        for number in range(workers):
            config = WorkerConfig(
                redis_url=redis_url, worker_id=f"decode-{number}", log_level="error"
            )
            (directory := home / f"{number}").mkdir()
            one = fronts.running(make_role(), config, directory, limit_s=LIMIT_S)
            fleet.append(await stack.enter_async_context(one))
        address = f"127.0.0.1:{router.ports.grpc}"
        channel = await stack.enter_async_context(OPEN.connect(address, keepalive=None))
        await eventually(lambda: len(router.fleet.view.workers()) == workers)
        is_over = asyncio.Event()
        sampling = asyncio.create_task(_sample(router, outcome))
        async with asyncio.TaskGroup() as group:
            for client in range(CLIENTS):
                stub = generation_stub(channel)
                group.create_task(send(stub, router, client, is_over.is_set, outcome))
            await Injector(fleet, router, seed).carry_out(faults, outcome)
            await asyncio.sleep(1.0)
            is_over.set()
        sampling.cancel()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.overlapping", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        redis_server.running() as redis,
        tempfile.TemporaryDirectory() as home,
        fronts.importable(),
    ):
        url = redis.connection_url
        found = asyncio.run(
            carry_out(url, Path(home), asked.faults, workers=asked.workers, seed=asked.seed)
        )
    print(found.tell())
    return int(bool(found.failures or found.wrong))


if __name__ == "__main__":
    sys.exit(main())
