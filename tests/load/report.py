"""Says whether what ghz measured is good: ghz itself exits with 0 whatever happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Report:
    """One ghz run; latencies in seconds."""

    call: str
    expected: int
    count: int
    rps: float
    statuses: dict[str, int]
    errors: dict[str, int]
    latency_s: dict[int, float]  # percentile to seconds

    def faults(self) -> list[str]:
        """What is wrong with it; empty where every call ended well."""
        faults = [f"{count} calls ended with {name}" for name, count in self._failed()]
        faults += [f"{count} x {text}" for text, count in self.errors.items()]
        if self.count != self.expected:
            faults.append(f"{self.count} calls were made, {self.expected} were asked for")
        return faults

    def line(self) -> str:
        """The run on one line."""
        latencies = ", ".join(f"p{at} {1e3 * self.latency_s[at]:.0f} ms" for at in (50, 95, 99))
        return f"{self.call}: {self.count} calls, {self.rps:.1f} a second, {latencies}"

    def _failed(self) -> Sequence[tuple[str, int]]:
        return [(name, count) for name, count in self.statuses.items() if name != "OK"]


def read(path: Path, config: Path) -> Report:
    """The report that ghz wrote as JSON for the run that `config` describes."""
    told, asked = json.loads(path.read_text()), json.loads(config.read_text())
    return Report(
        call=asked["call"],
        expected=asked["total"],
        count=told["count"],
        rps=told["rps"],
        statuses=told["statusCodeDistribution"],
        errors=told["errorDistribution"],
        latency_s={
            entry["percentage"]: entry["latency"] / 1e9
            for entry in told["latencyDistribution"] or ()
        },
    )
