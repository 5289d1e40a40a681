"""Routers that all have more requests than seats, and workers with fewer seats than routers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from router.fake_model import worker_record
from router.fakes import FakeStore

from effuse.placement.records import Capacity, RoutedLoad, RouterRecord, WorkerRecord
from effuse.router.seats import EXCHANGE_S, OtherRouters

TICK_S = 0.01
LASTS_S = 60.0
LONGEST_FREE_S = 0.5
"""Some exchanges: a router that leaves a seat to another one has to tell it first."""


@dataclass
class Busy:
    """A router with more requests than it can place, which serves those it has placed."""

    name: str
    others: OtherRouters
    draw: random.Random
    lasts_s: Callable[[random.Random], float]
    exchanges_at: float = 0.0
    served: int = 0
    ends: dict[str, list[float]] = field(default_factory=dict)  # of its requests, by worker

    async def exchange(self, workers: list[WorkerRecord]) -> None:
        loads = tuple(
            RoutedLoad(one.worker_id, one.incarnation, len(self.ends[one.worker_id]))
            for one in workers
            if self.ends.get(one.worker_id)
        )
        own = RouterRecord(
            router_id=self.name, address="", waiting_by_model={"fake": 100}, loads=loads
        )
        await self.others.exchange(own, workers)

    async def step(self, now: float, workers: list[WorkerRecord], everybody: list[Busy]) -> None:
        """Ends what is over, tells the others if it is time, and takes the seats that it may."""
        for name, ends in self.ends.items():
            self.ends[name] = [end for end in ends if end > now]
            self.served += len(ends) - len(self.ends[name])
        if now >= self.exchanges_at:
            self.exchanges_at = now + EXCHANGE_S * self.draw.uniform(0.9, 1.1)
            await self.exchange(workers)
        for worker in workers:
            mine = self.ends.setdefault(worker.worker_id, [])
            is_full = taken(worker, everybody) >= worker.capacity.max_num_seqs  # and would refuse
            if len(mine) < self.others.seats(worker) and not is_full:
                mine.append(now + self.lasts_s(self.draw))


def taken(worker: WorkerRecord, everybody: list[Busy]) -> int:
    return sum(len(one.ends.get(worker.worker_id, ())) for one in everybody)


def workers_of(number: int, seats: int) -> list[WorkerRecord]:
    capacity = Capacity(
        total_pages=256, page_size=16, max_num_seqs=seats, max_num_batched_tokens=512
    )
    records = [worker_record(f"d{at}", "decode") for at in range(number)]
    return [msgspec.structs.replace(one, capacity=capacity) for one in records]


@pytest.mark.parametrize(
    "lasts_s", [lambda draw: draw.uniform(0.5, 1.5), lambda _: 1.0], ids=["uneven", "equal"]
)
@pytest.mark.parametrize(
    ("num_workers", "seats", "num_routers"),
    [(1, 1, 2), (1, 1, 4), (1, 2, 3), (2, 1, 3), (10, 1, 3), (10, 2, 3), (10, 3, 2), (10, 8, 3)],
)
def test_none_starves_and_no_seat_stays_free(
    num_workers: int, seats: int, num_routers: int, lasts_s: Callable[[random.Random], float]
) -> None:
    async def go() -> None:
        draw, store, workers = random.Random(5), FakeStore(), workers_of(num_workers, seats)
        everybody = [
            Busy(f"router-{at}", OtherRouters(store, f"router-{at}"), draw, lasts_s)
            for at in range(num_routers)
        ]
        for one in (*everybody, *everybody):  # until each knows of all
            await one.exchange(workers)
        full_at, longest_free_s = [0.0] * num_workers, 0.0
        for tick in range(int(LASTS_S / TICK_S)):
            now = tick * TICK_S
            for one in draw.sample(everybody, num_routers):
                await one.step(now, workers, everybody)
            for at, worker in enumerate(workers):
                if taken(worker, everybody) == seats:
                    full_at[at] = now
                longest_free_s = max(longest_free_s, now - full_at[at])
        served = [one.served for one in everybody]
        assert min(served) > 0.6 * max(served), served
        assert longest_free_s < LONGEST_FREE_S

    asyncio.run(go())
