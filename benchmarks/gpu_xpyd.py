"""`python -m effuse.benchmarks.gpu_xpyd`: which X prefill by Y decode workers serve most, on GPUs.

All ways to divide the GPUs of EFFUSE_GPUS (none: the CPU) among prefill and decode workers, and as
many co-located ones. Each is started like `effuse up` and gets text over gRPC streams, by arrival
rate up to the knee. Random weights, block diffusion at 4 tokens a forward. The same run first
measures one GPU by itself: its times of a prompt and of decode batches predict the best ratio, and
its knee. At the end, one fleet loses a prefill and a decode worker under load. Prints tables,
writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effuse.benchmarks.fleet_limits import ALONE
from effuse.benchmarks.fleet_load import Shape
from effuse.benchmarks.fleet_runs import Kills, Loads, Outcome, Variant, run, timed
from effuse.benchmarks.gpu_handoff import child
from effuse.benchmarks.gpu_models import MODELS
from effuse.benchmarks.random_checkpoint import write_checkpoint
from effuse.benchmarks.xpyd_report import capacity, report
from effuse.models.config import ModelConfig

PAGE_SIZE = 32
ALONE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan."""

    model: str
    shapes: tuple[Shape, ...]
    batches: tuple[int, ...]  # of the decode worker by itself
    shares: tuple[float, ...]  # share of the predicted rate, at which requests arrive
    max_num_seqs: int
    prompt_rows: int
    seconds: float  # of a rate
    kill_seconds: float
    rounds: int  # requests one after the other
    least_rate: float = 0.5  # requests a second

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def longest(self) -> int:
        longest = max(shape.prompt + shape.answer for shape in self.shapes)
        return -(-longest // PAGE_SIZE) * PAGE_SIZE

    def variant(self, prefill: int, decode: int) -> Variant:
        """A fleet with this plan's limits."""
        return Variant(
            prefill=prefill,
            decode=decode,
            prompt_rows=self.prompt_rows,
            max_num_seqs=self.max_num_seqs,
        )


FULL = Plan(
    model="dream-7b",
    shapes=(Shape(512, 128), Shape(2048, 128), Shape(8192, 128)),
    batches=(1, 4, 8, 16, 32, 64),
    shares=(0.5, 0.8, 1.0),
    max_num_seqs=64,
    prompt_rows=8192,
    seconds=4.0,
    kill_seconds=9.0,
    rounds=4,
)
TINY = Plan(
    model="tiny",
    shapes=(Shape(64, 64), Shape(128, 64)),
    batches=(1, 4),
    shares=(0.4, 0.8),
    max_num_seqs=4,
    prompt_rows=256,
    seconds=1.5,
    kill_seconds=6.0,
    rounds=2,
    least_rate=4.0,  # device steps are not representative on a CPU
)
PLANS = {"full": FULL, "tiny": TINY}


class Bench:
    """Runs a plan on these GPUs, as many workers as there are."""

    def __init__(self, plan: Plan, gpus: Sequence[str], model: Path, out: Path) -> None:
        self._plan = plan
        self._gpus = list(gpus)
        self._model = model
        self._out = out
        self._limits: dict[str, Any] = {}
        self._outcomes: list[Outcome] = []

    def run(self, num_workers: int) -> None:
        """Measures everything, and writes it after each fleet."""
        on_gpu = torch.cuda.is_available()
        with timed("checkpoint"):
            device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
            write_checkpoint(self._model, self._plan.config, torch.device(device), dtype)
            if on_gpu:
                torch.cuda.empty_cache()
        with timed("one GPU alone"):
            self._measure_alone()
        for variant in self._variants(num_workers):
            with timed(variant.name):
                self._outcomes.append(self._run(variant))
            self.write()

    def _variants(self, num_workers: int) -> Iterator[Variant]:
        """The most even ratio first."""
        ratios = [(count, num_workers - count) for count in range(1, num_workers)]
        for ratio in [*sorted(ratios, key=lambda one: abs(one[0] - one[1])), (0, num_workers)]:
            yield self._plan.variant(*ratio)

    def _measure_alone(self) -> None:
        """Each shape on a GPU of its own, as far as there are any."""
        gpus = self._gpus or [""]
        with ThreadPoolExecutor(len(gpus)) as pool:
            jobs = [
                pool.submit(self._alone, shape, gpus[number % len(gpus)])
                for number, shape in enumerate(self._plan.shapes)
            ]
            for shape, job in zip(self._plan.shapes, jobs, strict=True):
                self._limits[str(shape)] = job.result()

    def _alone(self, shape: Shape, gpu: str) -> dict[str, Any]:
        plan = self._plan
        flags = ["--model", plan.model, "--max-num-seqs", str(plan.max_num_seqs)]
        flags += ["--max-model-len", str(plan.longest)]
        with child(ALONE, flags, [gpu] if gpu else []) as alone:
            alone.receive()
            prefill = alone.ask(do="prefill", prompts=1, length=shape.prompt, seconds=1.0)
            load = {"do": "decode", "prompt": shape.prompt, "answer": shape.answer}
            decode = [
                {"batch": batch, **alone.ask(**load, at_once=batch, seconds=ALONE_S)}
                for batch in plan.batches
                if batch <= plan.max_num_seqs
            ]
        return {"prefill_s": prefill["seconds"], "decode": decode}

    def _run(self, variant: Variant) -> Outcome:
        plan = self._plan
        rates = [
            (shape, share * capacity(variant.prefill, variant.decode, limits, shape.answer))
            for shape in plan.shapes
            for limits in [self._limits[str(shape)]]
            for share in plan.shares
        ]
        # While one worker of each kind is left.
        may_kill = variant.prefill > 1 and variant.decode > 1
        middle = plan.shapes[len(plan.shapes) // 2]
        middle_rate = next(rate for shape, rate in rates if shape == middle)
        kills = Kills(
            middle, max(plan.least_rate, middle_rate), plan.kill_seconds, ("prefill-0", "decode-0")
        )
        loads = Loads(
            alone=plan.shapes,
            alone_count=plan.rounds,
            arriving=[(shape, max(plan.least_rate, round(rate, 3))) for shape, rate in rates],
            kills=kills if may_kill else None,
            seconds=plan.seconds,
        )
        return run(
            variant,
            loads,
            model=self._model,
            config=plan.config,
            gpus=self._gpus,
            log_dir=self._out / "logs" / variant.name.replace(" ", "-"),
        )

    def write(self) -> dict[str, Any]:
        """All results so far, as JSON."""
        content: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "gpus": self._gpus,
            "limits": self._limits,
            "fleets": [one.rows() for one in self._outcomes],
        }
        content = json.loads(json.dumps(content), parse_constant=lambda _: None)
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "gpu_xpyd.json").write_text(json.dumps(content) + "\n")
        return content


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_xpyd")
    parser.add_argument("--plan", choices=sorted(PLANS), default="full")
    parser.add_argument("--workers", type=int, help="of each fleet; else one a GPU, or 4")
    parser.add_argument("--checkpoint", type=Path, help="directory for the weights")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    asked = parser.parse_args(argv)
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one]
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(PLANS[asked.plan], gpus, asked.checkpoint or Path(made), asked.out)
        show = partial(print, flush=True)
        try:
            bench.run(asked.workers or len(gpus) or 4)
        finally:
            show(report(bench.write()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
