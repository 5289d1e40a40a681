"""`python -m effuse.benchmarks.gpu_fleet`: split against co-located, through processes and gRPC.

Fleets as `effuse up` starts them, with clients that send text over streams; random weights in the
Dream-7B shape, block diffusion at 4 tokens a forward, so that all answers take the same work. Of
the GPUs in EFFUSE_GPUS (none: the CPU) four run a split and a co-located fleet side by side on two
each; fewer run them one after another. The same run measures limits: one GPU by itself
(`fleet_limits`), bare NIXL and a copy from GPU to GPU (`gpu_handoff`). Prints tables, writes JSON
and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effuse.benchmarks import gpu_handoff
from effuse.benchmarks.fleet_limits import limits_on
from effuse.benchmarks.fleet_plans import PLANS, Plan
from effuse.benchmarks.fleet_report import report
from effuse.benchmarks.fleet_runs import Beside, Outcome, Variant, run, timed
from effuse.benchmarks.random_checkpoint import write_checkpoint


@dataclass(slots=True)
class Measured:
    """All results of a run; plain values and the fleets' outcomes."""

    plan: Plan
    split: list[Outcome] = field(default_factory=list)
    colocated: list[Outcome] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    handoffs: list[gpu_handoff.Result] = field(default_factory=list)
    peer_copy: float = 0.0  # bytes a second; 0 without two GPUs


class Bench:
    """Runs a plan on these GPUs."""

    def __init__(
        self,
        plan: Plan,
        gpus: Sequence[str],
        checkpoint: Path,
        logs: Path,
        on_part: Callable[[Measured], object],
    ) -> None:
        """on_part: called with all results so far, after each part."""
        self._plan = plan
        self._on_part = on_part
        self._telling = threading.Lock()
        self._model = checkpoint
        self._logs = logs
        self.measured = Measured(plan)
        self.pairs = [list(gpus[:2]), list(gpus[2:4])] if len(gpus) >= 4 else [list(gpus[:2])]

    def run(self) -> None:
        """Measures everything; the results of one part are kept if another fails. Raises the first
        failure.
        """
        with timed("checkpoint"):
            write_checkpoint(self._model, self._plan.config, _device(), _dtype())
            torch.cuda.empty_cache()
        free: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        for pair in self.pairs:
            free.put(pair)

        def on_free_gpus(job: Callable[[list[str]], None]) -> None:
            gpus = free.get()
            try:
                job(gpus)
            finally:
                free.put(gpus)
                with self._telling:
                    self._on_part(self.measured)

        with ThreadPoolExecutor(len(self.pairs)) as pool:
            running = [pool.submit(on_free_gpus, job) for job in self._jobs()]
        failures = [error for one in running if (error := one.exception()) is not None]
        for error in failures:
            print(f"failed: {error!r}", flush=True)
        if failures:
            raise failures[0]

    def _jobs(self) -> Iterator[Callable[[list[str]], None]]:
        """In the order in which pairs of GPUs take them."""
        plan, found = self._plan, self.measured
        yield self._alone_and_served
        if plan.handoffs:
            yield self._transfers
        for number in range(max(len(plan.split), len(plan.colocated))):
            for variants, outcomes in (
                (plan.split, found.split),
                (plan.colocated, found.colocated),
            ):
                if number < len(variants) and variants[number] is not plan.split[0]:
                    yield partial(self._fleet, variants[number], number, outcomes)

    def _alone_and_served(self, gpus: list[str]) -> None:
        with limits_on(self._plan, gpus) as limits:
            if self._plan.rates:
                with timed("decode alone"):
                    limits.batches()
                with timed("beside arrivals"):
                    limits.arrivals()
            try:
                self._fleet(self._plan.split[0], 0, self.measured.split, gpus, limits)
            finally:
                self.measured.limits = limits.found()

    def _transfers(self, gpus: list[str]) -> None:
        plan = self._plan
        with timed("bare transports"):
            if len(gpus) > 1:
                self.measured.peer_copy = gpu_handoff.peer_copy(gpus)
            for kind, lengths, is_busy in (
                ("nixl", plan.handoffs, True),
                ("nixl", plan.handoffs, False),
                ("zmq", plan.zmq, False),
            ):
                found = gpu_handoff.measure(kind, lengths, plan.rounds, is_busy=is_busy, gpus=gpus)
                self.measured.handoffs += found
            print(gpu_handoff.table(self.measured.handoffs), flush=True)

    def _fleet(
        self,
        variant: Variant,
        number: int,
        outcomes: list[Outcome],
        gpus: list[str],
        beside: Beside | None = None,
    ) -> None:
        outcomes.append(
            run(
                variant,
                self._plan.loads(number, variant.connector),
                model=self._model,
                config=self._plan.config,
                gpus=gpus,
                log_dir=self._logs / variant.name.replace(" ", "-"),
                beside=beside,
            )
        )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_fleet")
    parser.add_argument("--plan", choices=sorted(PLANS), default="full")
    parser.add_argument("--checkpoint", type=Path, help="directory for the weights")
    parser.add_argument("--logs", type=Path, default=Path("build/benchmarks/fleet-logs"))
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    asked = parser.parse_args(argv)
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one]
    write = partial(_write, asked.out, gpus)
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(PLANS[asked.plan], gpus, asked.checkpoint or Path(made), asked.logs, write)
        try:
            bench.run()
        finally:
            print(report(write(bench.measured)), flush=True)
    return 0


def _write(out: Path, gpus: Sequence[str], measured: Measured) -> dict[str, Any]:
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gpus": list(gpus),
        "served": str(measured.plan.served),
        "split": [one.rows() for one in measured.split],
        "colocated": [one.rows() for one in measured.colocated],
        "limits": measured.limits,
        "handoffs": [asdict(one) for one in measured.handoffs],
        "peer_copy_gigabytes_per_s": measured.peer_copy / 1e9,
    }
    content = json.loads(json.dumps(content), parse_constant=lambda _: None)  # no NaN in JSON
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_fleet.json").write_text(json.dumps(content) + "\n")
    return content


if __name__ == "__main__":
    sys.exit(main())
