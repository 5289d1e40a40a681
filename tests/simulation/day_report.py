"""The results of a simulated day, minute by minute, and the cost of a choice of workers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from router.fake_model import worker_record

from effuse.placement.leases import FleetView
from effuse.router.fleet import RoutedFleet

from .day_fleet import Staff, State
from .day_load import Traffic

MOST_CHANGES, LEAST_SHARE = 6.0, 0.93  # changes an hour per 100 workers in steady load; goodput
WARM_MINUTES = 5  # in which routers measure at first


@dataclass
class Report:
    """Counts from the beginning, by minute."""

    traffic: Traffic
    good: list[float] = field(default_factory=lambda: [0.0])
    best: list[float] = field(default_factory=lambda: [0.0])
    changes: list[int] = field(default_factory=lambda: [0])
    prefill: list[tuple[int, int]] = field(default_factory=list)  # ours, the oracle's
    streams: float = 0.0
    bad: float = 0.0
    look_s: float = 0.0

    def add_minute(
        self, state: State, oracle: State, staff: Staff, prefill: int, changes: int
    ) -> None:
        """One more minute has ended."""
        self.good.append(state.good)
        self.best.append(oracle.good)
        self.changes.append(changes)
        self.prefill.append((staff.prefill, prefill))
        self.streams = max(self.streams, state.streams)
        self.bad = state.bad

    @property
    def share(self) -> float:
        """Goodput as a share of the oracle's, once routers had measured."""
        first = min(WARM_MINUTES, len(self.good) - 2)
        return (self.good[-1] - self.good[first]) / (self.best[-1] - self.best[first])

    @property
    def changes_per_hour(self) -> float:
        """Role changes an hour for each 100 workers, after the same minutes."""
        first = min(WARM_MINUTES, len(self.changes) - 2)
        hours = (len(self.changes) - 1 - first) / 60
        return (self.changes[-1] - self.changes[first]) / hours / self.traffic.workers * 100

    @property
    def is_good(self) -> bool:
        """Whether the aims are met."""
        weather = self.traffic.weather
        is_steady = not (weather.rate_wave or weather.prompt_wave or weather.answer_wave)
        return self.share >= LEAST_SHARE and (
            not is_steady or self.changes_per_hour <= MOST_CHANGES
        )

    def text(self) -> str:
        """For people."""
        total = sum(self.traffic.arrivals)
        lines = [
            f"{self.traffic.workers} workers, {self.traffic.seconds / 3600:.1f} hours, "
            f"{total:.4g} requests, at most {self.streams:.0f} answers at once",
            f"goodput: {self.good[-1] / total:.4f} of all requests, the oracle's "
            f"{self.best[-1] / total:.4f}; share of the oracle's: {self.share:.4f}",
            f"role changes: {self.changes_per_hour:.2f} an hour per 100 workers",
            f"one look with a plan: {1e3 * self.look_s:.2f} ms",
            "hour  prefill  oracle  share of its goodput  changes",
        ]
        step = max(1, len(self.prefill) // 24)
        for at in range(step, len(self.good), step):
            ours, best = self.good[at] - self.good[at - step], self.best[at] - self.best[at - step]
            prefill, other = self.prefill[at - 1]
            changes = self.changes[at] - self.changes[at - step]
            lines.append(
                f"{at / 60:4.1f}  {prefill:7}  {other:6}  {ours / max(1, best):20.4f}  {changes:7}"
            )
        return "\n".join(lines)


def cost_of_choice(workers: int, choices: int = 500) -> float:
    """Seconds of a core for a choice of the real router, with all its requests so far running."""
    records = [
        worker_record(f"w{at:04}", "prefill" if at % 2 else "decode") for at in range(workers)
    ]
    view = cast(FleetView, SimpleNamespace(workers=lambda: records))
    fleet = RoutedFleet(view, "auto", lambda: 0.0)
    fleet.look()
    need, seconds = fleet.need("fake"), 0.0
    with ExitStack() as running:
        for number in range(choices):
            began = time.process_time()
            placement = fleet.place(need)
            seconds += time.process_time() - began
            if placement is not None:
                running.enter_context(fleet.counted(placement, 100 + number, 100))
    return seconds / choices
