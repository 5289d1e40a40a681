"""`python -m effuse.benchmarks.gpu_steering`: workers without a role against both fixed forms.

Three fleets share the first two GPUs of EFFUSE_GPUS (none: the CPU): one prefill and one decode
worker, two co-located workers, and two workers whose roles follow plans. Fleets take turns, so that
an idle one costs the loaded one nothing but memory. Random weights, block diffusion at 4 tokens a
forward. Closed loads run without an objective. Arrivals have a first block's and a gap's; all
fleets get the same ones. Prints a table, and writes JSON after each load.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from effuse.benchmarks.fleet_figures import figures
from effuse.benchmarks.fleet_load import Client, Shape, Window, client_of
from effuse.benchmarks.fleet_plans import FULL
from effuse.benchmarks.fleet_report import FIRST_S, GAPS, Objectives, as_table
from effuse.benchmarks.fleet_runs import PAGE_SIZE, READY_S, row, timed
from effuse.benchmarks.gpu_models import MODELS
from effuse.benchmarks.random_checkpoint import write_checkpoint
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.role import main as set_role
from effuse.client.client import Client as Blocking
from effuse.models.config import ModelConfig
from effuse.v1 import model_pb2 as pb

AUTO: Final = "no roles"
FORMS: Final[Mapping[str, Mapping[str, int]]] = {
    "1P1D": {"prefill": 1, "decode": 1},
    "2 co-located": {"prefill": 0, "decode": 2},
    AUTO: {"prefill": 0, "decode": 0, "workers": 2},
}
# Shares of a GPU's memory, so that three workers fit: a decode worker by itself has all answers.
SHARES: Final = {"prefill": 0.25, "decode": 0.31, "both": 0.27}


ROLES: Final = ("decode", "both", "prefill", "decode", "prefill", "both", "auto")
CHANGE_S: Final = 3.0
FIRST_SETTLE: Final = 2.5  # times as long, because a new router has measured nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The loads and limits. Times in seconds."""

    model: str
    closed: tuple[tuple[Shape, int], ...]
    arriving: Shape
    rates: tuple[float, ...]  # requests a second
    max_num_seqs: int
    prompt_rows: int
    warm_s: float
    seconds: float
    arriving_s: float
    settle_s: float  # of arrivals before those that count: as long for each fleet
    turns: int

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def longest(self) -> int:
        shapes = [shape for shape, _ in self.closed] + [self.arriving]
        return max(-(-(one.prompt + one.answer) // PAGE_SIZE) * PAGE_SIZE for one in shapes)


PLANS: Final = {
    "full": Plan(
        model="dream-7b",
        closed=FULL.closed,
        arriving=FULL.served,
        rates=(4, 8, 12, 16, 20, 24),
        max_num_seqs=64,
        prompt_rows=4096,
        warm_s=2.0,
        seconds=5.0,
        arriving_s=8.0,
        settle_s=8.0,
        turns=3,
    ),
    "tiny": Plan(
        model="tiny",
        closed=((Shape(64, 64), 4),),
        arriving=Shape(64, 64),
        rates=(4, 8),
        max_num_seqs=8,
        prompt_rows=256,
        warm_s=0.5,
        seconds=1.5,
        arriving_s=1.5,
        settle_s=2.0,
        turns=1,
    ),
}


@dataclass(slots=True)
class Bench:
    """Fleets that are ready, and their results so far."""

    plan: Plan
    fleets: Mapping[str, Fleet]
    out: Path
    end_s: float  # on the monotonic clock; no load begins later
    gaps: tuple[int, ...]  # objectives of arrivals, as multiples of a gap without load
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_clients: int = 0

    async def closed(self) -> None:
        """Each closed load, in turns of all fleets, each turn in another order."""
        for shape, at_once in self.plan.closed:
            for turn in range(self.plan.turns):
                for name in _rotated(list(self.fleets), turn):
                    if time.monotonic() < self.end_s:
                        await self._closed(name, shape, at_once)

    async def _closed(self, name: str, shape: Shape, at_once: int) -> None:
        async with self._client(name) as client:
            window = await client.closed(shape, at_once, self.plan.warm_s, self.plan.seconds)
        self._note(name, f"{shape} x {at_once}", window)

    async def arriving(self) -> None:
        """Each rate with each multiple of a gap without load."""
        gap_s = await self._unloaded_gap_s()
        for times in self.gaps:
            wanted = Objectives(FIRST_S, times * gap_s)
            self._ask_for(wanted)
            for number, rate in enumerate(self.plan.rates):
                for name in self.fleets:
                    if time.monotonic() < self.end_s and (name == AUTO or times == self.gaps[0]):
                        await self._arriving(name, rate, number, wanted, times)

    async def _arriving(
        self, name: str, rate: float, seed: int, wanted: Objectives, times: int
    ) -> None:
        shape, seconds = self.plan.arriving, self.plan.arriving_s
        async with self._client(name) as client:
            before_s = self.plan.settle_s * (1.0 if seed else FIRST_SETTLE)
            _, window = await asyncio.gather(
                client.arriving(shape, rate, before_s, seed=100 + seed),
                _later(before_s, client.arriving(shape, rate, seconds, seed=seed)),
            )
        gaps = GAPS if name != AUTO else (times,)
        kept = {
            str(one): sum(
                Objectives(FIRST_S, one * wanted.gap_s / times).met_by(row(each))
                for each in window.requests
            )
            for one in gaps
        }
        self._note(name, f"{rate:g}/s", window, kept)

    async def changes(self) -> None:
        """A closed load while one of the workers without a role gets each role in turn. Prints how
        long after each change it first did work of its new role. The other one does both."""
        shape, at_once = self.plan.closed[0]
        began = time.monotonic()
        whole_s = CHANGE_S * (len(ROLES) + 1)
        times: list[tuple[str, float]] = []
        await asyncio.to_thread(self._set_role, "worker-1", "both")

        async def change() -> None:
            for role in ROLES:
                await asyncio.sleep(CHANGE_S)
                times.append((role, time.monotonic()))
                await asyncio.to_thread(self._set_role, "worker-0", role)

        async with self._client(AUTO) as client:
            changing = asyncio.create_task(change())
            window = await client.closed(shape, at_once, 0.0, whole_s)
            await changing
        await asyncio.to_thread(self._set_role, "worker-1", "auto")
        failed = sum(bool(one.failure) for one in window.requests)
        for role, at in times:
            work = [] if role == "decode" else _prompts(window)
            work += [] if role == "prefill" else _blocks(window)
            first = min((one - at for one in work if one > at), default=math.inf)
            print(f"worker-0 is {role}: first work of it after {first:.3f} s", flush=True)
        seconds = time.monotonic() - began
        print(f"{len(window.requests)} requests in {seconds:.0f} s, failed {failed}", flush=True)

    def _set_role(self, name: str, role: str) -> None:
        fleet = self.fleets[AUTO]
        secret = str(fleet.home.secret_file)
        if set_role([name, role, "--target", fleet.address, "--fleet-secret", secret]):
            raise RuntimeError(f"{name} did not become {role}")

    async def _unloaded_gap_s(self) -> float:
        """The shortest median gap of requests that are alone."""
        found = []
        for name in self.fleets:
            async with self._client(name) as client:
                alone = await client.alone(self.plan.arriving, 6)
            found.append(statistics.median(gap for one in alone for gap in one.gaps))
        print(f"gaps without load: {[round(1e3 * one, 2) for one in found]} ms", flush=True)
        return min(found)

    def _ask_for(self, wanted: Objectives) -> None:
        """Replaces the router of the workers without roles by one with these objectives."""
        fleet, first_s, gap_s = self.fleets[AUTO], wanted.first_block_s, wanted.gap_s
        flags = ["--first-block-objective-s", f"{first_s:g}", "--gap-objective-s", f"{gap_s:g}"]
        fleet._commands["router"] += flags
        for _ in fleet.roll("router"):
            time.sleep(0.1)
        fleet.wait_for_workers(1, 1, timeout_s=30.0)

    @asynccontextmanager
    async def _client(self, name: str) -> AsyncIterator[Client]:
        config = self.plan.config
        words = min(config.mask_token_id, *config.eos_token_ids)
        self.num_clients += 1
        seed = self.num_clients  # no fleet gets a prompt twice
        async with client_of(self.fleets[name].address, words, config.block_size, seed) as client:
            yield client

    async def warm(self) -> None:
        """Each length a few times on each fleet, so that nothing is compiled later."""
        shapes = dict.fromkeys(shape for shape, _ in self.plan.closed)
        for name in self.fleets:
            async with self._client(name) as client:
                for shape in shapes:
                    for at_once in (1, 8):
                        await asyncio.gather(*(client.ask(shape) for _ in range(at_once)))

    def _note(
        self, name: str, load: str, window: Window, kept: Mapping[str, int] | None = None
    ) -> None:
        with Blocking(self.fleets[name].address, timeout_s=5.0) as client:
            kinds = [pb.WorkerRole.Name(one.role)[12:].lower() for one in client.workers()]
            plans = [str(line) for one in client.plans() for line in one.lines]
        found = figures(window)
        facts = {"fleet": name, "load": load, "roles": kinds, "plan": plans, "kept": kept or {}}
        self.rows.append({**facts, "seconds": window.seconds, **asdict(found)})
        print(
            f"{name}: {load}: {found.tokens_per_s:.0f} tok/s, first {found.first_p50_s:.3f} "
            f"{found.first_p99_s:.3f}, gaps {found.gap_p50_s:.3f} {found.gap_p99_s:.3f}, "
            f"of {found.requests} kept {kept}, failed {found.failed} {found.failures[:1]}, "
            f"roles {kinds}",
            flush=True,
        )
        if name == AUTO:
            print("   " + "; ".join(plans), flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu_steering.json").write_text(json.dumps(self.rows) + "\n")


def _blocks(window: Window) -> list[float]:
    """Times of all blocks by the first worker."""
    return [at for one in window.requests if one.decode_worker == "worker-0" for at in one.blocks]


def _prompts(window: Window) -> list[float]:
    """Times by which the first worker had computed a prompt for the other one."""
    own = [one for one in window.requests if one.prefill_worker == "worker-0" and one.blocks]
    return [one.blocks[0] for one in own if one.decode_worker != "worker-0"]


async def _later(delay_s: float, load: Coroutine[Any, Any, Window]) -> Window:
    await asyncio.sleep(delay_s)
    return await load


def _rotated(names: list[str], turn: int) -> list[str]:
    return names[turn % len(names) :] + names[: turn % len(names)]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians of each load by fleet, and workers without roles over the better fixed form."""
    lines = []
    for load in dict.fromkeys(str(one["load"]) for one in rows):
        of_load = [one for one in rows if one["load"] == load]
        for name, key in _measures(of_load):
            found = {
                form: statistics.median(key(one) for one in each)
                for form in FORMS
                if (each := [one for one in of_load if one["fleet"] == form and key(one) >= 0])
            }
            best = max((value for form, value in found.items() if form != AUTO), default=0.0)
            ratio = f"{found[AUTO] / best:.2f}" if best and AUTO in found else ""
            cells = [f"{found[form]:.1f}" if form in found else "" for form in FORMS]
            lines.append([load, name, *cells, ratio])
    return as_table(["load", "", *FORMS, "ratio"], lines)


Key = Callable[[Mapping[str, Any]], float]


def _measures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Key]]:
    if not any(one["kept"] for one in rows):
        return [("tokens/s", lambda one: float(one["tokens_per_s"]))]

    def kept(times: str) -> Key:
        return lambda one: float(one["kept"].get(times, -1))

    return [(f"kept within {times} gaps", kept(str(times))) for times in GAPS]


def fleet_config(plan: Plan, name: str, model: Path, gpus: Sequence[str], log: Path) -> FleetConfig:
    """One of the three fleets, on these GPUs."""
    step_rows = 2 * plan.config.block_size * plan.max_num_seqs + plan.prompt_rows
    pages = str(40 * plan.longest // PAGE_SIZE)

    def memory(share: float) -> tuple[str, ...]:
        return ("--gpu-memory-utilization", f"{share}") if gpus else ("--num-pages", pages)

    counts = FORMS[name]
    is_split = counts["prefill"] > 0
    return FleetConfig(
        prefill=counts["prefill"],
        decode=counts["decode"],
        workers=counts.get("workers", 0),
        connector="nixl" if is_split or name == AUTO else "zmq",
        model=model,
        worker_flags=(
            *("--page-size", str(PAGE_SIZE), "--max-model-len", str(plan.longest)),
            *("--startup-timeout-s", str(READY_S)),
        ),
        prefill_flags=(
            *("--max-num-batched-tokens", str(plan.prompt_rows)),
            *memory(SHARES["prefill"]),
        )
        if counts["prefill"] or counts.get("workers")
        else (),
        decode_flags=(
            *("--max-num-seqs", str(plan.max_num_seqs)),
            *("--max-num-batched-tokens", str(step_rows)),
            *memory(SHARES["decode" if is_split else "both"]),
        ),
        gpus=tuple(gpus) or None,
        log_dir=log,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_steering")
    parser.add_argument("--plan", choices=sorted(PLANS), default="full")
    parser.add_argument(
        "--part", choices=["closed", "changes", "arriving"], nargs="+", default=["closed"]
    )
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second")
    parser.add_argument("--gaps", type=int, nargs="+", default=GAPS, help="multiples of a gap")
    parser.add_argument("--seconds", type=float, default=1800.0, help="no load begins after them")
    parser.add_argument("--checkpoint", type=Path, help="directory for the weights")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    asked = parser.parse_args(argv)
    end_s, plan = time.monotonic() + asked.seconds, PLANS[asked.plan]
    if asked.rates:
        plan = replace(plan, rates=tuple(asked.rates))
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one][:2]
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        model = asked.checkpoint or Path(made)
        if not (model / "config.json").exists():
            with timed("checkpoint"):
                device, dtype = ("cuda", torch.bfloat16) if gpus else ("cpu", torch.float32)
                write_checkpoint(model, plan.config, torch.device(device), dtype)
        fleets = {
            name: Fleet(fleet_config(plan, name, model, gpus, asked.out / "logs" / name))
            for name in FORMS
        }
        with timed("fleets"), ThreadPoolExecutor(len(fleets)) as pool:
            list(pool.map(stack.enter_context, fleets.values()))
        bench = Bench(plan, fleets, asked.out, end_s, tuple(asked.gaps))
        try:
            asyncio.run(_run(bench, asked.part))
        finally:
            print(report(bench.rows), flush=True)
    return 0


async def _run(bench: Bench, parts: Sequence[str]) -> None:
    await bench.warm()
    if "closed" in parts:
        await bench.closed()
    if "changes" in parts:
        await bench.changes()
    if "arriving" in parts:
        await bench.arriving()


if __name__ == "__main__":
    sys.exit(main())
