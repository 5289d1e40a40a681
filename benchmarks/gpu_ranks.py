"""`python -m effuse.benchmarks.gpu_ranks`: decode steps and prompts of groups of GPUs.

Every rank is a process that draws its own part of a published shape. Steps are those of `gpu_step`
and `gpu_moe`, in lockstep because every rank makes the same decisions. They are compared with one
GPU, with their products and two unfused sums a layer in one graph (the fastest of NCCL and torch's
symmetric memory), and with the same steps without any exchange. Steps of experts are compared with
the bytes that a rank reads, at the rate of a copy. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from effuse.benchmarks.gpu_floor import Floor
from effuse.benchmarks.gpu_models import EXPERT_MODELS, MODELS
from effuse.benchmarks.gpu_moe import DrawnRoutes, ExpertBench
from effuse.benchmarks.gpu_prefill import elapsed_ms
from effuse.benchmarks.gpu_processes import run_processes
from effuse.benchmarks.gpu_ranks_floor import Silent, SummedFloor
from effuse.benchmarks.gpu_record import kernel_classes, write_record
from effuse.benchmarks.gpu_step import BATCHES, PAGE_SIZE, Bench
from effuse.benchmarks.gpu_timing import (
    copy_bytes_per_us,
    next_step,
    run_alone,
    synchronize,
    used_in,
)
from effuse.kernels.attention_batch import ContextCut
from effuse.models.group import ALL, ALONE, ContextGroup, RankPlace, join_group
from effuse.models.part import Part
from effuse.models.runner import ModelRunner
from effuse.models.tensors import shard_of
from effuse.models.transformer import Transformer
from effuse.worker.meeting import join_context, meets

MODULE = "effuse.benchmarks.gpu_ranks"
PACE = 4
PROFILED = 4  # steps
LONG_STEPS = 24
JOIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case of one degree; milliseconds of a step or of a forward."""

    model: str
    degree: int
    what: str  # step or prefill
    batch: int
    context: int  # cached tokens of each request, or tokens of the prompt
    rows: float
    ms: float
    silent_ms: float  # the same without any exchange between ranks
    idle_share: float = 0.0
    bare_ms: float | None = None  # products and sums
    bare_by: str = ""
    ratio: float | None = None  # to these, in turns
    bytes_ms: float | None = None
    kernels: tuple[str, ...] = field(default=())
    context_parallel: int = 1  # ranks that hold the same heads for different tokens
    kv_bytes: float = 0.0  # of a token on each GPU

    @property
    def case(self) -> tuple[object, ...]:
        """The same for all degrees."""
        return self.model, self.what, self.batch, self.context


class RankBench(Bench):
    """Steps of a rank of a dense model."""

    def _floor(self, most_rows: int) -> Floor:
        whole = self.model.shard.size == 1
        return Floor(self.model, most_rows) if whole else SummedFloor(self.model, most_rows)


class LongBench(RankBench):
    """Steps that are not compared with their products."""

    def _floor(self, most_rows: int) -> Floor:
        return Floor(self.model, 1)


def measure_step(bench: Bench, batch: int, context: int, steps: int, size: int) -> Result:
    """Steps of `batch` requests; of a dense model also in turns with their products, if turns have
    a size."""
    model, floor, layout = bench.model, bench.floor, bench.memory.layout
    stepper, requests = bench.ready(batch, context, PACE)
    alone, kept = run_alone(stepper, steps)
    kernels = kernel_classes(lambda: next_step(stepper), PROFILED)
    turns = None
    if size and not isinstance(bench, ExpertBench):
        turns, _ = bench.in_turns(stepper, requests, used_in(kept, stepper.layout), size)

    def silent_ms() -> float:
        return run_alone(bench.ready(batch, context, PACE)[0], steps)[0].step_ms

    return Result(
        model=bench.name,
        degree=model.shard.size,
        what="step",
        batch=batch,
        context=context,
        rows=float(used_in(kept, stepper.layout)[:, 0].mean()),
        ms=alone.step_ms,
        idle_share=alone.idle_share,
        silent_ms=without_exchange(model, silent_ms, alone.step_ms),
        bare_ms=None if turns is None else turns.mean_bare_ms,
        bare_by="; ".join(floor.times) if isinstance(floor, SummedFloor) else "",
        ratio=None if turns is None else turns.ratio,
        kernels=tuple(kernels),
        context_parallel=layout.context_degree,
        kv_bytes=layout.page_bytes / layout.span,
    )


def without_exchange(model: Transformer, measured: Callable[[], float], of_one: float) -> float:
    """`measured` while ranks exchange nothing; `of_one` if there is a single rank."""
    if model.shard.size == 1:
        return of_one
    group, context = model.group, model.context
    model.group = Silent(model.shard.size)
    of_context = context.group if context is not None else None
    if context is not None:
        context.group = model.group
    try:
        return measured()
    finally:
        model.group = group
        if context is not None and of_context is not None:
            context.group = of_context


def measure_prefill(bench: Bench, length: int, rounds: int = 6) -> Result:
    """One prompt of `length` tokens, eagerly, by the host's clock."""
    model, config = bench.model, bench.model.config
    runner = ModelRunner(
        model, bench.memory.layer_views(), page_size=PAGE_SIZE, block_size=config.block_size
    )
    prompt = np.random.default_rng(length).integers(0, config.mask_token_id, length).tolist()
    part = Part(
        token_ids=prompt,
        start=0,
        pages=range(-(-length // PAGE_SIZE)),
        num_stored=length,
        block_origin=config.block_origin(length),
        keep_boundary=True,
    )

    def run() -> None:
        runner.run([part])
        synchronize(model.device)

    def middle() -> float:
        return median([elapsed_ms(run) for _ in range(2 + rounds)][2:])

    ms = middle()
    return Result(
        model=bench.name,
        degree=model.shard.size,
        what="prefill",
        batch=1,
        context=length,
        rows=length,
        ms=ms,
        silent_ms=without_exchange(model, middle, ms),
        kernels=tuple(kernel_classes(run, PROFILED)),
    )


def bytes_ms(bench: ExpertBench, result: Result, bytes_per_us: float) -> float:
    """Time of a rank's reads in a step, mean of all: experts reached, other weights, K and V."""
    model, config = bench.model, bench.model.config
    assert isinstance(model, DrawnRoutes) and config.experts is not None
    num_routed, size = config.experts.routing.num_experts, model.shard.size
    reached = torch.unique(model.drawn[: round(result.rows)])
    reached = reached[reached < num_routed]
    held = [shard_of(config, r, size, expert_parallel=size > 1).experts for r in range(size)]
    counts = [sum(one is None or expert in one for expert in reached.tolist()) for one in held]
    num_bytes = model.weights.head.nbytes
    for layer in model.weights.layers:
        mlp = layer.gate_up.nbytes + layer.down.nbytes
        if layer.router is not None:
            picked = sum(counts) / size + config.experts.routing.num_shared
            mlp = round(mlp / len(layer.down) * picked) + layer.router.nbytes
        num_bytes += layer.qkv.nbytes + layer.attn_out.nbytes + mlp
    tokens = bench.memory.page_bytes / PAGE_SIZE
    num_bytes += round(result.batch * result.context * tokens)
    return num_bytes / bytes_per_us / 1e3


def measure(
    asked: argparse.Namespace,
    place: RankPlace,
    device: torch.device,
    keep: Callable[[Result], None],
) -> None:
    """All cases of a rank; all ranks call it together."""
    is_dense = asked.model in MODELS
    rate = copy_bytes_per_us() if device.type == "cuda" else 1e4
    batches = [row for row in BATCHES if row[0] in asked.batch]
    most = max((row[0] for row in batches), default=1)
    kind = RankBench if is_dense else ExpertBench
    if asked.long:
        measure_long(asked, place, device, keep)
        return
    bench = kind(asked.model, device, most, max([asked.context, *asked.prefill]), place)
    bench.model.group.map_peers(bench.model.config.hidden_size, bench.model.dtype)
    for batch, steps, size in batches:
        result = measure_step(bench, batch, asked.context, steps, size)
        if isinstance(bench, ExpertBench):
            result = replace(result, bytes_ms=bytes_ms(bench, result, rate))
        keep(result)
    for length in asked.prefill:
        keep(measure_prefill(bench, length))


def measure_long(
    asked: argparse.Namespace,
    place: RankPlace,
    device: torch.device,
    keep: Callable[[Result], None],
) -> None:
    """Steps over contexts that fill a GPU's memory, each case with pages of its own."""
    is_mapped = False
    for batch, context in asked.long:
        bench = LongBench(asked.model, device, batch, context, place)
        if not is_mapped:
            bench.model.group.map_peers(bench.model.config.hidden_size, bench.model.dtype)
        is_mapped = True
        keep(measure_step(bench, batch, context, LONG_STEPS, 0))
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def table(results: Sequence[Result]) -> str:
    """A line for each case; speedups are over one GPU's result of the same case."""
    lines = [
        "model        degree what    batch context   rows       ms  over one  no exchange ms"
        "  bare ms  ratio  bytes ms  ratio  cut  KV of one"
    ]
    ones = {each.case: each for each in results if each.degree == 1}
    for r in results:
        one = ones.get(r.case)
        speedup = _number(None if one is None else one.ms / r.ms, 9)
        kv = _number(r.kv_bytes / one.kv_bytes if one is not None and one.kv_bytes else None, 10)
        over_bytes = None if r.bytes_ms is None else r.ms / r.bytes_ms
        lines.append(
            f"{r.model:12} {r.degree:6} {r.what:7} {r.batch:5} {r.context:7} {r.rows:6.0f} "
            f"{r.ms:8.3f} {speedup} {r.silent_ms:15.3f} {_number(r.bare_ms, 8)} "
            f"{_number(r.ratio, 6)} {_number(r.bytes_ms, 9)} {_number(over_bytes, 6)} "
            f"{r.context_parallel:4} {kv}"
        )
    return "\n".join(lines)


def _number(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.3f}"


def run_rank(asked: argparse.Namespace) -> None:
    """The process of one rank; the first one writes the results."""
    rank, size = asked.rank, asked.size
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    place = ALL
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        meeting = asked.home / "meeting"
        group = join_group(rank, size, device, meeting, JOIN_S)
        degree = min(asked.context_parallel, size)
        context = None
        if degree > 1:
            context = ContextGroup(ContextCut(rank % degree, degree, PAGE_SIZE), ALONE)
            context = join_context(context, rank, size, group, meets(group, device, meeting))
        place = RankPlace(rank, size, asked.model in EXPERT_MODELS, group, context=context)
    if size > 1 and device.type == "cuda" and not asked.long:  # for the rivals
        store = dist.FileStore(str(asked.home / "rivals"), size)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    results: list[dict[str, object]] = []

    def keep(result: Result) -> None:
        if rank:
            return
        results.append(asdict(result))
        (asked.home / "results.json").write_text(json.dumps(results))
        print(
            "\n".join([*table([result]).splitlines()[1:], result.bare_by, *result.kernels]),
            flush=True,
        )

    measure(asked, place, device, keep)
    place.group.least(0)  # no rank's memory goes while others read it
    sys.stdout.flush()
    os._exit(0)  # without the teardown of communicators, which waits for the slowest rank


def waves(degrees: Sequence[int], num_gpus: int) -> list[list[int]]:
    """Degrees that run at the same time, each on GPUs of its own."""
    found: list[list[int]] = []
    for degree in degrees:
        if found and sum(found[-1]) + degree <= num_gpus:
            found[-1].append(degree)
        else:
            found.append([degree])
    return found


def run_wave(degrees: Sequence[int], argv: Sequence[str], deadline: float) -> list[Result]:
    """Groups of these degrees, side by side; what each has measured before the deadline."""
    return [Result(**one) for one in run_processes(degrees, argv, deadline, MODULE)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for; the exit status is 1 if a case is missing."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--model", choices=sorted(MODELS | EXPERT_MODELS), default="dream-7b")
    parser.add_argument("--degree", type=int, action="append", help="default: 1, 2 and 4")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--long", type=_long, action="append", default=[], metavar="BATCH@CONTEXT", help="a step"
    )
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="ranks that cut the context"
    )
    parser.add_argument("--prefill", type=int, action="append", default=[], metavar="TOKENS")
    parser.add_argument("--seconds", type=float, default=500, help="for each group of GPUs")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_ranks.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.rank is not None:
        run_rank(asked)
    degrees = asked.degree or [1, 2, 4]
    results: list[Result] = []
    for wave in waves(degrees, max(1, torch.cuda.device_count())):
        results += run_wave(wave, argv, time.monotonic() + asked.seconds)
        write_record(asked.json, [asdict(each) for each in results], [])
    print(table(results))
    num_cases = len(asked.batch) + len(asked.prefill) + len(asked.long)
    return int(len(results) < len(degrees) * num_cases)


def _long(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split("@"))
    return batch, context


if __name__ == "__main__":
    sys.exit(main())
