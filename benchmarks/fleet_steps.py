"""How long a forward takes in a running fleet, and of what, by its decode workers' own counters."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

_SAMPLE_S = 0.2  # a worker's counters are at most 0.05 s old
_TIMEOUT_S = 5.0
_LEAST_SAMPLES = 3
_COUNTER = re.compile(r"^effuse_engine_(steps|step_requests|step_tokens)_total\S* (\S+)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of the mean forward; rows are the model's: tokens of blocks, whatever their bucket has."""

    step_s: float
    step_requests: float
    step_rows: float


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    steps: float
    requests: float
    rows: float


class StepCounts:
    """Asks these workers (host:port of their metrics) again and again until the block ends."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._samples: dict[str, list[_Sample]] = {address: [] for address in addresses}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> StepCounts:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(_TIMEOUT_S)

    def __len__(self) -> int:
        """How often the one that was heard least was."""
        return min(map(len, self._samples.values()), default=0)

    def between(self, begin: float, end: float) -> Steps | None:
        """Mean over the workers, between two points of the monotonic clock; None where one of them
        was not heard often enough, or made no forward."""
        found = []
        for samples in self._samples.values():
            inside = [one for one in samples if begin <= one.at < end]
            if len(inside) < _LEAST_SAMPLES or inside[0].steps == inside[-1].steps:
                return None
            found.append(_steps(inside))
        if not found:
            return None
        return Steps(
            step_s=fmean(one.step_s for one in found),
            step_requests=fmean(one.step_requests for one in found),
            step_rows=fmean(one.step_rows for one in found),
        )

    def _ask(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for address, samples in self._samples.items():
                url = f"http://{address}/metrics"
                at = time.monotonic()
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as page:
                    told = dict(_COUNTER.findall(page.read().decode()))
                counts = [float(told[name]) for name in ("steps", "step_requests", "step_tokens")]
                samples.append(_Sample(at, *counts))


def _steps(samples: Sequence[_Sample]) -> Steps:
    """The rate is a line through all samples, as each is late by its own part of 0.05 s."""
    first, last = samples[0], samples[-1]
    line = linear_regression([one.at for one in samples], [one.steps for one in samples])
    made = last.steps - first.steps
    return Steps(
        step_s=1.0 / line.slope,
        step_requests=(last.requests - first.requests) / made,
        step_rows=(last.rows - first.rows) / made,
    )
