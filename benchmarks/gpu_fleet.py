"""`python -m effuse.benchmarks.gpu_fleet`: split against co-located, through processes and gRPC.

Fleets as `effuse up` starts them, asked by clients in text over streams; random weights in the
Dream-7B shape, block diffusion at 4 tokens a forward, so that all answers take the same work. Of
the GPUs in EFFUSE_GPUS (none: the CPU) four run a split and a co-located fleet side by side on two
each; fewer run them one after the other. Measured in the same run, as limits: what one GPU does
alone (`gpu_alone`), bare NIXL and a copy from GPU to GPU (`gpu_handoff`). Prints tables, writes
JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effuse.benchmarks import gpu_handoff
from effuse.benchmarks.fleet_load import Shape
from effuse.benchmarks.fleet_report import report
from effuse.benchmarks.fleet_runs import Loads, Outcome, Variant, run, timed
from effuse.benchmarks.gpu_handoff import Peer, child
from effuse.benchmarks.gpu_models import MODELS
from effuse.benchmarks.random_checkpoint import write_checkpoint
from effuse.benchmarks.raw_transfer import scattered
from effuse.models.config import ModelConfig

ALONE = "effuse.benchmarks.gpu_alone"
HANDOFFS_A_SECOND = 20
BATCHES = (1, 2, 4, 8, 16)
TURNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    model: str
    closed: tuple[tuple[Shape, int], ...]
    steady: tuple[tuple[Shape, int], ...]  # closed, too, with long answers: the time of a step
    alone: tuple[Shape, ...]
    served: Shape  # arrives at rates
    rates: tuple[float, ...]
    swept_rates: tuple[float, ...]  # for all variants but the first
    split: tuple[Variant, ...]  # the first one gets all loads, others arrivals only
    colocated: tuple[Variant, ...]
    handoffs: tuple[int, ...]  # tokens
    zmq: tuple[int, ...]
    warm_s: float
    seconds: float
    rounds: int

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def longest(self) -> int:
        loads = [shape for shape, _ in (*self.closed, *self.steady)]
        return max(shape.prompt + shape.answer for shape in (*loads, *self.alone, self.served))

    def loads(self, number: int, connector: str) -> Loads:
        """Of the variant of this number. What zmq moves is asked alone only."""
        if connector == "zmq":
            return Loads(alone=self.alone, alone_count=self.rounds)
        arriving = tuple((self.served, rate) for rate in self.rates)
        if number:
            swept = tuple((self.served, rate) for rate in self.swept_rates)
            return Loads(arriving=swept, warm_s=self.warm_s, seconds=self.seconds)
        return Loads(
            alone=self.alone,
            alone_count=self.rounds,
            closed=(*self.closed, *self.steady),
            arriving=arriving,
            warm_s=self.warm_s,
            seconds=self.seconds,
        )


def split(prompt_rows: int, max_num_seqs: int, connector: str = "nixl") -> Variant:
    """One worker of each kind."""
    return Variant(
        prefill=1,
        decode=1,
        connector=connector,
        prompt_rows=prompt_rows,
        max_num_seqs=max_num_seqs,
    )


def colocated(prompt_rows: int, max_num_seqs: int) -> Variant:
    """Two workers that prefill and decode."""
    return Variant(prefill=0, decode=2, prompt_rows=prompt_rows, max_num_seqs=max_num_seqs)


FULL = Plan(
    model="dream-7b",
    closed=(
        (Shape(512, 128), 32),
        (Shape(2048, 128), 32),
        (Shape(2048, 128), 64),
        (Shape(4096, 64), 32),
    ),
    steady=((Shape(512, 1024), 16), (Shape(512, 1024), 32)),
    alone=(Shape(512, 128), Shape(2048, 128)),
    served=Shape(2048, 128),
    rates=(2, 4, 8, 12, 16, 18, 20, 22),
    swept_rates=(4, 8, 12, 16, 20),
    split=(split(4096, 64), split(2048, 16), split(4096, 16, "zmq")),
    colocated=(colocated(4096, 64), colocated(2048, 16), colocated(2048, 4)),
    handoffs=(512, 2048, 8192),
    zmq=(2048,),
    warm_s=3.0,
    seconds=6.0,
    rounds=20,
)
# What two GPUs measure in six minutes, where fleets run one after the other.
PAIR = replace(
    FULL,
    rates=(4, 8, 16, 20, 22),
    swept_rates=(4, 8),
    split=(split(4096, 64), split(4096, 16, "zmq")),
    colocated=(colocated(4096, 64), colocated(2048, 4)),
    warm_s=2.0,
    seconds=5.0,
)
# Enough to see that everything runs, on one GPU.
SHORT = Plan(
    model="dream-7b",
    closed=((Shape(512, 128), 8),),
    steady=((Shape(512, 256), 4),),
    alone=(Shape(2048, 128),),
    served=Shape(2048, 128),
    rates=(4,),
    swept_rates=(),
    split=(split(4096, 16),),
    colocated=(colocated(4096, 16),),
    handoffs=(2048,),
    zmq=(2048,),
    warm_s=1.0,
    seconds=4.0,
    rounds=8,
)
TINY = Plan(
    model="tiny",
    closed=((Shape(64, 64), 4),),
    steady=((Shape(64, 128), 2),),
    alone=(Shape(64, 64),),
    served=Shape(64, 64),
    rates=(4, 8),
    swept_rates=(),
    split=(split(256, 8), split(256, 8, "zmq")),
    colocated=(colocated(256, 8),),
    handoffs=(512,),
    zmq=(512,),
    warm_s=0.5,
    seconds=1.5,
    rounds=3,
)
PLANS = {"full": FULL, "pair": PAIR, "short": SHORT, "tiny": TINY}


@dataclass(slots=True)
class Measured:
    """All that a run found; plain values beside the fleets' outcomes."""

    plan: Plan
    split: list[Outcome] = field(default_factory=list)
    colocated: list[Outcome] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    handoffs: list[gpu_handoff.Result] = field(default_factory=list)
    peer_copy: float = 0.0  # bytes a second; 0 where there are no two GPUs


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
        """on_part: called with all that was found, after each part."""
        self._plan = plan
        self._on_part = on_part
        self._telling = threading.Lock()
        self._model = checkpoint
        self._logs = logs
        self.measured = Measured(plan)
        self.pairs = [list(gpus[:2]), list(gpus[2:4])] if len(gpus) >= 4 else [list(gpus[:2])]

    def run(self) -> None:
        """Measures everything; what one part found is kept if another fails. Raises what the first
        one that went wrong raised."""
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
        yield self._transfers
        for number in range(max(len(plan.split), len(plan.colocated))):
            for variants, outcomes in (
                (plan.split, found.split),
                (plan.colocated, found.colocated),
            ):
                if number < len(variants) and variants[number] is not plan.split[0]:
                    yield partial(self._fleet, variants[number], number, outcomes)

    def _alone_and_served(self, gpus: list[str]) -> None:
        self._alone(gpus)
        self._fleet(self._plan.split[0], 0, self.measured.split, gpus)

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

    def _alone(self, gpus: list[str]) -> None:
        plan = self._plan
        flags = ["--model", plan.model, "--max-num-seqs", str(plan.split[0].max_num_seqs)]
        flags += ["--max-model-len", str(-(-plan.longest // 32) * 32)]
        limits = self.measured.limits
        # Each on the GPU that does it in the split fleet: two of a kind differ by some per cent.
        with timed("prefill alone"), child(ALONE, flags, gpus[:1]) as alone:
            alone.hear()
            limits["prefill"] = self._prefill_alone(alone)
        with timed("decode alone"), child(ALONE, flags, gpus[-1:]) as alone:
            alone.hear()
            limits["decode"] = self._decode_alone(alone)
            limits["arrivals"] = self._arrivals(alone, gpus[:1])

    def _prefill_alone(self, alone: Peer) -> dict[str, float]:
        """Seconds of a prompt by its length, in the faster of two: one to a forward, or as many as
        the prefill worker's limit lets in."""
        rows, found = self._plan.split[0].prompt_rows, {}
        for length in sorted({shape.prompt for shape, _ in self._plan.closed}):
            found[str(length)] = min(
                alone.ask(do="prefill", prompts=prompts, length=length, seconds=1.0)["seconds"]
                for prompts in {1, max(1, rows // length)}
            )
        return found

    def _decode_alone(self, alone: Peer) -> list[dict[str, Any]]:
        """The closed loads, and smaller batches of what arrives."""
        shapes = dict.fromkeys(shape for shape, _ in self._plan.closed)
        batches = [(shape, at_once) for shape in shapes for at_once in BATCHES]
        found = []
        for shape, at_once in dict.fromkeys((*self._plan.closed, *self._plan.steady, *batches)):
            if at_once > self._plan.split[0].max_num_seqs:
                continue
            load = {"prompt": shape.prompt, "answer": shape.answer, "at_once": at_once}
            share = 1 if (shape, at_once) in self._plan.steady else 4  # steps are compared by those
            took = alone.ask(do="decode", seconds=self._plan.seconds / share, **load)
            found.append({"shape": str(shape), "at_once": at_once, **took})
        return found

    def _arrivals(self, alone: Peer, gpu: list[str]) -> dict[str, Any]:
        """Time of a step of 16 requests in turns without handoffs and with 20 a second, every other
        time the other way round: a GPU that grows warm is slower in whatever comes later."""
        plan = self._plan
        shape, at_once = plan.steady[0]
        count = max(2, round(HANDOFFS_A_SECOND * plan.seconds / 4))
        pages = plan.served.prompt // 32
        flags = ["--connector", "nixl", "--pages", str(pages), "--model", plan.model]
        flags += ["--dtype", str(_dtype()).removeprefix("torch.")]
        load = {"prompt": shape.prompt, "answer": shape.answer, "at_once": at_once}
        steps = {"do": "steps", "seconds": plan.seconds / 4, **load}
        turns: dict[str, list[float]] = {"without": [], "with": []}
        handoffs: list[float] = []
        alone.ask(do="listen")
        with gpu_handoff.end("sender", flags, gpu) as sender:
            for turn in range(-2, TURNS):
                held = alone.ask(do="reserve", handoffs=count, pages=pages)
                pushes = {
                    "do": "push_many",
                    "source": scattered(pages, 1),
                    "every_s": 1 / HANDOFFS_A_SECOND,
                    **held,
                }
                both = ("without", "with")
                for name in both if turn % 2 else reversed(both):
                    alone.tell(**steps)
                    pushed = sender.ask(**pushes)["seconds"] if name == "with" else []
                    step_s = alone.hear()["step_s"]
                    if turn >= 0:
                        turns[name].append(step_s)
                        handoffs += pushed
        medians = {name: statistics.median(values) for name, values in turns.items()}
        return {**medians, "turns": turns, "handoff_p50_s": statistics.median(handoffs)}

    def _fleet(
        self, variant: Variant, number: int, outcomes: list[Outcome], gpus: list[str]
    ) -> None:
        outcomes.append(
            run(
                variant,
                self._plan.loads(number, variant.connector),
                model=self._model,
                config=self._plan.config,
                gpus=gpus,
                log_dir=self._logs / variant.name.replace(" ", "-"),
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
    parser.add_argument("--checkpoint", type=Path, help="directory to write the weights to")
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
