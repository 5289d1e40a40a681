"""Days of a large fleet that steers itself, against the best roles of each minute.

From the root of the checkout: PYTHONPATH=src:tests python -P -m simulation.day --days 2

The load measures, the planner, the held plan, the table of changes and the part that carries it out
are the real ones. Each router sees its own requests, and the loads of others some seconds late.
Workers and requests are amounts (`day_fleet.py`), because a day has hundreds of millions.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace
from router.fake_model import worker_record

from effuse.placement.records import Role, WorkerRecord
from effuse.protos.errors import PeerLost
from effuse.router.planner import Objectives, Workload
from effuse.router.policy import IDLE, Candidate
from effuse.router.role_changes import RoleDriver
from effuse.router.router import Router
from effuse.router.steering import Steering

from .day_fleet import PIECE_TOKENS, Goals, Paces, Staff, State, best_minute
from .day_load import Failure, Traffic, Weather
from .day_report import Report, cost_of_choice

MODEL = "simulated"
LEASE_S = 3.0  # until a dead worker or router counts as gone
SEEN_S = 1.0  # until others see a worker's role
SHARE_S = 5  # how old the loads of other routers are at most
ROUTER_LIFE_S, ROUTER_DOWN_S = 7200, 60  # the driver ends so often, and is back so late
SAMPLES = 8  # prompts and commits that a router measures in a second
BLOCK, SPREAD = 24, 0.09  # tokens of a commit, and how much its time varies


@dataclass(slots=True)
class SimWorker:
    """One worker."""

    name: str
    role: Role = "both"
    life: int = 0
    changed_at: float = -math.inf
    up_at: float = 0.0  # when it is back, if it is later than now


@dataclass(slots=True)
class SimRouter:
    """One router: the real parts that plan and carry plans out."""

    id: str
    steering: Steering
    up_at: float = 0.0
    shared: Workload | None = None  # its load, as others know it
    driver: RoleDriver | None = None


@dataclass(slots=True)
class Workers:
    """All workers, and the records of them that routers have."""

    every: list[SimWorker]
    template: WorkerRecord
    seen: dict[str, Candidate] = field(default_factory=dict)
    due: dict[int, set[str]] = field(
        default_factory=dict
    )  # workers by the second in which their records change
    changed: Counter[Role] = field(default_factory=Counter)  # in this second
    num_changes: int = 0
    by_name: dict[str, SimWorker] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {one.name: one for one in self.every}
        self.due[0] = set(self.by_name)

    def end(self, failure: Failure, now: float) -> list[SimWorker]:
        """Workers that end now."""
        found = [self.every[at] for at in failure.workers if self.every[at].up_at <= now]
        for one in found:
            one.up_at = now + failure.down_s
            one.role, one.changed_at, one.life = "both", -math.inf, one.life + 1
            self._note(one, now + LEASE_S)
            self._note(one, one.up_at + SEEN_S)
        return found

    def set_role(self, name: str, role: Role, now: float) -> bool:
        """Whether it takes the role."""
        one = self.by_name[name]
        if one.up_at > now:
            return False
        one.role, one.changed_at = role, now
        self.changed[role] += 1
        self.num_changes += 1
        for age in (SEEN_S, 15.0, 30.0, 45.0):
            self._note(one, now + age)
        return True

    def staff(self, now: float) -> Staff:
        """The roles of those that are up."""
        count = Counter(one.role for one in self.every if one.up_at <= now)
        leaving, arriving = self.changed["prefill"], self.changed["decode"] + self.changed["both"]
        self.changed.clear()
        return Staff(count["prefill"], count["decode"], count["both"], leaving, arriving)

    def look(self, now: float) -> None:
        """Brings the records in step."""
        for name in self.due.pop(int(now), ()):
            one = self.by_name[name]
            if one.up_at > now:
                self.seen.pop(name, None)
                continue
            age_s = None if math.isinf(one.changed_at) else now - one.changed_at
            record = replace(
                self.template, worker_id=name, incarnation=str(one.life), role=one.role,
                role_age_s=age_s,
            )  # fmt: skip
            self.seen[name] = Candidate(record, IDLE)

    def _note(self, one: SimWorker, at: float) -> None:
        self.due.setdefault(math.ceil(at), set()).add(one.name)


class Day:
    """One run."""

    def __init__(self, traffic: Traffic, routers: int, seed: int) -> None:
        self.traffic, self.now = traffic, 0.0
        self.draw = random.Random(f"{seed} routers")
        self.workers = Workers(
            [SimWorker(f"w{at:04}") for at in range(traffic.workers)], _template()
        )
        self.routers = [self._router(f"router-{at:02}") for at in range(routers)]
        self.state, self.oracle = State(), State()
        self.loop = asyncio.new_event_loop()
        self.look_s = 0.0
        self.num_looks = 0

    def run(self) -> Report:
        """All of it."""
        report = Report(self.traffic)
        around, minute = 0, list[tuple[float, float, float, Paces]]()
        alive = list[int]()
        for second in range(self.traffic.seconds):
            self.now = float(second)
            paces = self.traffic.minute(second).paces
            arrivals = self.traffic.arrivals[second]
            lost, ended = self._fail(second)
            staff = self.workers.staff(self.now)
            self.state.lose(lost, self.now)
            self.state.step(staff, paces, self.now, arrivals)
            self._steer(second, arrivals, paces, staff)
            up = staff.prefill + staff.answering
            alive.append(up)
            minute.append((self.now, arrivals, ended / max(1, up + ended), paces))
            if len(minute) == 60 or second == self.traffic.seconds - 1:
                around, self.oracle = best_minute(self.oracle, around, alive, minute)
                report.add_minute(self.state, self.oracle, staff, around, self.workers.num_changes)
                minute, alive = [], []
        report.look_s = self.look_s / max(1, self.num_looks)
        self.loop.close()
        return report

    def _fail(self, second: int) -> tuple[float, int]:
        """The share of answers that is lost, and the number of workers that end."""
        answering = [one for one in self.workers.every if one.up_at <= self.now]
        num_before = sum(one.role != "prefill" for one in answering) if answering else 1
        lost = ended = 0
        for failure in self.traffic.lost(second):
            roles = {at: self.workers.every[at].role for at in failure.workers}
            for one in self.workers.end(failure, self.now):
                lost += roles[self.workers.every.index(one)] != "prefill"
                ended += 1
        return lost / max(1, num_before), ended

    def _steer(self, second: int, arrivals: float, paces: Paces, staff: Staff) -> None:
        self.workers.look(self.now)
        live = [one for one in self.routers if one.up_at <= self.now]
        if self.traffic.weather.failures and second % ROUTER_LIFE_S == ROUTER_LIFE_S - 1:
            index = self.routers.index(live.pop(0))
            self.routers[index] = self._router(self.routers[index].id)
            self.routers[index].up_at = self.now + ROUTER_DOWN_S
        lengths = self.traffic.minute(second).lengths
        for number, one in enumerate(live):
            self._note_load(one, arrivals / len(live), lengths.prompt, lengths.answer)
            if (second + number) % SHARE_S == 0:
                load = one.steering.of(MODEL).load
                waiting = round(self.state.num_waiting / len(live))
                one.shared = load.workload(self.now, waiting=waiting)
        for number, one in enumerate(live[:2]):
            self._measure(one, paces, staff)
            if number == 0 or second % 10 == 0:
                self._look(one)
                assert one.driver is not None
                self.loop.run_until_complete(one.driver.step())

    def _look(self, router: SimRouter) -> None:
        began = time.perf_counter()
        waiting = round(self.state.num_waiting / len(self.routers))
        router.steering.look(list(self.workers.seen.values()), {MODEL: waiting})
        self.look_s += time.perf_counter() - began
        self.num_looks += 1

    def _note_load(self, router: SimRouter, rate: float, prompt: float, answer: float) -> None:
        """Requests of a second; lengths vary by their mean."""
        now_in = router.steering.of(MODEL).load._bin(self.now)
        number = max(0, round(self.draw.gauss(rate, math.sqrt(rate))))
        spread = math.sqrt(number)
        for amounts, mean in ((now_in.prompts, prompt), (now_in.answers, answer)):
            amounts.number += number
            amounts.total += mean * max(0.0, number + spread * self.draw.gauss(0, 1))
            amounts.squares += 2 * mean * mean * number

    def _measure(self, router: SimRouter, paces: Paces, staff: Staff) -> None:
        measured, draw = router.steering.of(MODEL).measured, self.draw
        batch = self.state.streams / max(1, staff.answering)
        for number in range(SAMPLES):
            tokens = max(16, round(draw.expovariate(1 / paces.prompt)))
            seconds = self.traffic.times.prompt_s(tokens) * math.exp(draw.gauss(0, 0.1))
            measured.note_prompt(f"p{number}", tokens, 0, seconds, self.now)
            size = max(1, round(batch * math.exp(draw.gauss(0, 0.15))))
            mean_s = size * BLOCK / paces.at(size)[0]
            seconds = mean_s * math.exp(draw.gauss(0, SPREAD))
            measured.note_commit(size, round(paces.context), BLOCK, seconds)

    def _router(self, name: str) -> SimRouter:
        goals: Goals = self.traffic.goals
        objectives = Objectives(first_block_s=goals.first_block_s, gap_s=goals.gap_s)

        def others(model: str) -> list[Workload]:
            return [
                one.shared
                for one in self.routers
                if one.id != name and one.shared is not None and one.up_at <= self.now
            ]

        def driver_of(model: str) -> str:
            up = [one for one in self.routers if one.up_at <= self.now]
            return next((one.id for one in up if one.steering.steered()), "")

        async def set_role(record: WorkerRecord, role: Role) -> None:
            if not self.workers.set_role(record.worker_id, role, self.now):
                raise PeerLost(f"{record.worker_id} does not answer")

        found = SimRouter(name, Steering(objectives, "auto", lambda: self.now, others))
        count = SimpleNamespace(labels=lambda *labels: SimpleNamespace(inc=lambda: None))
        parts: Any = SimpleNamespace(
            id=name, now=lambda: self.now, steering=found.steering,
            seats=SimpleNamespace(others=SimpleNamespace(driver_of=driver_of)),
            fleet=SimpleNamespace(peers=SimpleNamespace(set_role=set_role)),
            metrics=SimpleNamespace(plans=SimpleNamespace(changes=count)),
        )  # fmt: skip
        found.driver = RoleDriver(cast(Router, parts))
        return found


def _template() -> WorkerRecord:
    record = worker_record("w", "both", model=MODEL)
    return replace(
        record,
        may_change_role=True,
        model=replace(record.model, prompt_attention="causal_blocks"),
        capacity=replace(record.capacity, max_num_batched_tokens=PIECE_TOKENS),
    )


def simulate(weather: Weather, *, workers: int = 1000, routers: int = 20, seed: int = 1) -> Report:
    """The outcome of a run."""
    return Day(Traffic(weather, workers, seed), routers, seed).run()


def main() -> int:
    """0 if the aims are met."""
    parser = argparse.ArgumentParser(prog="python -m simulation.day", description=__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=1000)
    add("--routers", type=int, default=20)
    add("--days", type=float, default=1.0)
    add("--day-s", type=int, default=86400, help="seconds of a day; fewer make waves steeper")
    add("--peak", type=float, default=0.9, help="highest load, as a share of what can be borne")
    add("--steady", action="store_true", help="no waves and no failures")
    add("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    weather = Weather(seconds=asked.day_s, days=asked.days, peak=asked.peak)
    weather = weather.steady() if asked.steady else weather
    began = time.process_time()
    report = simulate(weather, workers=asked.workers, routers=asked.routers, seed=asked.seed)
    print(report.text())
    for workers in (8, asked.workers):
        print(f"one choice among {workers} workers: {1e6 * cost_of_choice(workers):.0f} us")
    print(f"{time.process_time() - began:.0f} s of a core")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
