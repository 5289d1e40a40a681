"""`python -m effuse.benchmarks.gpu_serve`: whole requests through one engine on one GPU.

One decode engine with device steps and local prefill serves prompts of a data set's lengths, up to
64 at a time, with answers of 255 tokens; acceptance is scripted (`gpu_pace`), weights are random.
There is no front, no gRPC and no handoff: `gpu_fleet` measures a fleet of processes. The rate
counts tokens of answers from the first submission to the last end. Limits are the needed products
at the measured peak of a product, and those products in graphs, timed separately afterwards. Prints
a table and writes JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import msgspec
import numpy as np
import torch

from effuse.benchmarks.gpu_engines import Paged, decode_engine, paged
from effuse.benchmarks.gpu_floor import Floor, graph_of, mean_ms
from effuse.benchmarks.gpu_lengths import RULE, read_lengths
from effuse.benchmarks.gpu_load import ClosedLoad, CountingRunner, requests
from effuse.benchmarks.gpu_models import MODELS, random_model
from effuse.benchmarks.gpu_pace import MEAN, Pacer
from effuse.benchmarks.gpu_record import busy_share, kernel_classes, write_record
from effuse.benchmarks.gpu_timing import synchronize
from effuse.benchmarks.prefill_rivals import bare_prefill
from effuse.config.decoding import Stopping
from effuse.decode_worker.device_buckets import Integers, bucket
from effuse.decode_worker.device_step import DeviceStep
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.intake import Boundary
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.decode_worker.sequence import Sequence as Tokens
from effuse.kernels.step_slots import Column, RecordColumn, SlotLayout, Status
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import BoundaryState
from effuse.models.config import ModelConfig
from effuse.models.part import Part, PartResult
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

PAGE_SIZE = 32
MAX_TOKENS = 255
MOST_AT_ONCE = 64
PROMPT_ROWS = 2048  # of one step, in addition to the blocks in flight
# (block size, window) of the runs
SHAPES = ((32, 2), (32, 4), (32, 1), (16, 4), (16, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One data set in one shape of window."""

    dataset: str
    block_size: int
    window: int
    at_once: int
    requests: int
    prompt_len: float  # mean
    tokens_per_s: float
    tokens_per_forward: float  # of a request
    rows: float  # of a step, mean
    latency_s: tuple[float, float]  # of a request, median and 95th percentile
    first_block_s: tuple[float, float]
    prefill_forwards: int
    roofline_share: float  # products needed at the rate after a pause, over the time taken
    floor_share: float  # the same products in graphs, over the time taken


class CountingStepper(DeviceStepper):
    """Counts steps, and the masks left for the next one."""

    num_steps = 0
    num_masks = 0

    def read(self) -> Integers:
        records = super().read()
        self.num_steps += 1
        runs = records[:, Column.STATUS] == Status.RUNNING
        stepped = runs & (records[:, RecordColumn.STEPPED] == 1)
        self.num_masks += int(records[stepped, Column.NUM_MASKS].sum())
        return records


class HandedOver:
    """Replaces prefill for prompts that another worker computes: their pages have arbitrary
    content, and their boundary is accepted like a handed-over one.
    """

    def __init__(self, model: Transformer, prompt_len: int) -> None:
        config = model.config
        size = config.hidden_size if config.shift_logits else None
        prompt = [0] * prompt_len
        self._accept = Boundary(hidden_size=size, dtype=model.dtype, device=model.device).accept
        self._sequence = Tokens(
            prompt,
            origin=config.block_origin(prompt_len),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            stopping=Stopping(max_tokens=1),
        )
        self._state = BoundaryState(
            prompt_len=prompt_len,
            prompt_digest=prompt_digest(prompt),
            tail_token_ids=tuple(prompt[self._sequence.first_block_start :]),
            hidden=bytes(size * model.dtype.itemsize) if size else None,
        )

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        return [PartResult([], [], [], self._accept(self._state, self._sequence)) for _ in parts]


def replacing(
    config: ModelConfig, count: int, at_once: int, prompt_len: int, window: int, answer: int
) -> list[StartDecode]:
    """Requests for a closed load of `at_once` in which one ends after another: the first ones have
    1, 2, .. `at_once` times an equal part of `answer` tokens, all others `answer`.
    """
    messages = requests(config, [prompt_len] * count, window, answer)
    first = [
        msgspec.structs.replace(
            message, stopping=Stopping(max_tokens=max(1, answer * number // at_once))
        )
        for number, message in enumerate(messages[:at_once], start=1)
    ]
    return first + messages[at_once:]


class Bench:
    """One block size: an engine whose slots have room for every measured window."""

    def __init__(
        self, model: Transformer, max_window: int, longest_prompt: int, peak_flops: float
    ) -> None:
        self.model = model
        self._peak = peak_flops
        size = model.config.block_size
        length = -(-(longest_prompt + MAX_TOKENS) // PAGE_SIZE) * PAGE_SIZE
        most_rows = MOST_AT_ONCE * (max_window + 1) * size
        self.paged: Paged = paged(model, 2 * MOST_AT_ONCE * length, page_size=PAGE_SIZE)
        self._limits = DecodeLimits(
            max_num_batched_tokens=most_rows + PROMPT_ROWS,
            max_num_seqs=MOST_AT_ONCE,
            max_model_len=length,
            num_pages=self.paged.memory.num_pages,
            page_size=PAGE_SIZE,
            block_size=size,
        )
        self.stepper = self._stepper(max_window)
        counts = range(1, most_rows + 1)
        self.stepper.prepare(counts, counts, range(length + 1))

    def measure(
        self, dataset: str, lengths: Sequence[int], window: int, at_once: int = MOST_AT_ONCE
    ) -> Result:
        """Serves prompts of these lengths in order, this many at a time."""
        engine, prompts = self._engine()
        stepper = self.stepper
        messages = requests(self.model.config, lengths, window, MAX_TOKENS)
        stepper.num_steps = stepper.num_masks = 0
        load = ClosedLoad(engine, messages, at_once)
        seconds = load.run()
        tokens = sum(served.tokens for served in load.served)
        rows = engine.counters.step_tokens - sum(prompts.rows)
        # Each request's first step is its first block, which is in no record.
        masks = stepper.num_masks + len(lengths) * self.model.config.block_size
        needed = _needed_flops(self.model, rows, masks, sum(lengths))
        steps = stepper.num_steps
        floor = steps * self._bare_ms(rows / steps, masks / steps)
        floor += len(prompts.rows) * self._bare_prefill_ms(float(np.mean(prompts.rows)))
        return Result(
            dataset=dataset,
            block_size=self.model.config.block_size,
            window=window,
            at_once=at_once,
            requests=len(lengths),
            prompt_len=float(np.mean(lengths)),
            tokens_per_s=tokens / seconds,
            tokens_per_forward=tokens / sum(served.forwards for served in load.served),
            rows=rows / steps,
            latency_s=_percentiles([served.total_s for served in load.served]),
            first_block_s=_percentiles([served.first_block_s for served in load.served]),
            prefill_forwards=len(prompts.rows),
            roofline_share=needed / self._peak / seconds,
            floor_share=floor / 1e3 / seconds,
        )

    def profile(self, lengths: Sequence[int], window: int) -> list[str]:
        """Device time by kind of kernel in the middle of such a load, and its utilisation."""
        engine, _ = self._engine()
        messages = requests(self.model.config, lengths, window, MAX_TOKENS)
        load = ClosedLoad(engine, messages, MOST_AT_ONCE)
        for _ in range(100):  # the first requests have ended, and newcomers join at any step
            load.step()
        share = busy_share(load.step, repeats=24)
        classes = kernel_classes(load.step, repeats=24)
        synchronize(self.model.device)
        lines = [
            f"block {self.model.config.block_size}, window {window}: the device is busy "
            f"{100 * share:.1f} % of the time; ms of kernels and launches a step",
            *(f"  {line}" for line in classes),
        ]
        print("\n".join(lines), flush=True)
        return lines

    def _engine(self) -> tuple[DecodeEngine, CountingRunner]:
        prompts = CountingRunner(self.paged.runner, [])
        return decode_engine(self.paged, self._limits, self.stepper, prompts), prompts

    def _stepper(self, max_window: int) -> CountingStepper:
        limits = self._limits
        layout = SlotLayout(
            limits.max_num_seqs,
            limits.block_size,
            max_window=max_window,
            max_stops=4,
            max_pages=limits.pages_for(limits.max_model_len),
        )
        num_rows, kv = bucket(limits.max_num_batched_tokens), self.paged.memory.layer_views()
        step = DeviceStep(self.model, kv, layout, num_rows, page_size=PAGE_SIZE)
        step.adjust = Pacer(step.table, step.rows.first_candidate)
        return CountingStepper(step)

    def _bare_ms(self, rows: float, candidates: float) -> float:
        if self.model.device.type != "cuda":
            return 0.0
        floor = Floor(self.model, round(rows)).replay(round(rows), round(candidates))
        return mean_ms(floor, repeats=12, warm_s=1.0)

    def _bare_prefill_ms(self, rows: float) -> float:
        if self.model.device.type != "cuda":
            return 0.0
        return mean_ms(graph_of(bare_prefill(self.model, 1, round(rows))), repeats=8, warm_s=0.2)


def _needed_flops(model: Transformer, rows: int, candidates: int, prompt_rows: int) -> float:
    """FLOP of products: all layers for rows of steps, the head for candidates, and for prompts all
    layers but the last, which only needs K and V.
    """
    config, layers = model.config, model.weights.layers
    sizes = [
        each.qkv.numel() + each.attn_out.numel() + each.gate_up.numel() + each.down.numel()
        for each in layers
    ]
    last_kv = 2 * config.num_kv_heads * config.head_dim * config.hidden_size
    total = rows * sum(sizes) + candidates * model.weights.head.numel()
    return 2.0 * (total + prompt_rows * (sum(sizes[:-1]) + last_kv))


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 95))


def peak_flops(device: torch.device) -> tuple[float, float]:
    """Rates of a bf16 product of 8192 x 8192 x 8192 on random data: after a pause, and sustained.

    The chip lowers its clock during long products; the first is the roofline, the second shows the
    loss.
    """
    if device.type != "cuda":
        return 1e12, 1e12
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    product()
    synchronize(device)
    time.sleep(0.3)
    flops = 2e3 * 8192**3
    return flops / mean_ms(product, 4, warm_s=0.0), flops / mean_ms(product, 24, warm_s=1.0)


def table(results: Sequence[Result]) -> str:
    """One line a run."""
    lines = [
        "data set   block window at once  requests prompt  tok/s  tok/fwd   rows  "
        "latency p50  p95 s  first block p50  p95 s  roofline  floor"
    ]
    for r in results:
        lines.append(
            f"{r.dataset:10} {r.block_size:5} {r.window:6} {r.at_once:7} {r.requests:9} "
            f"{r.prompt_len:6.0f} {r.tokens_per_s:6.0f} {r.tokens_per_forward:8.2f} {r.rows:6.0f} "
            f"{r.latency_s[0]:12.2f} {r.latency_s[1]:6.2f} {r.first_block_s[0]:16.2f} "
            f"{r.first_block_s[1]:6.2f} {100 * r.roofline_share:8.1f}% {100 * r.floor_share:5.1f}%"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """Measurements of one run of the command."""

    datasets: dict[str, list[int]]
    shapes: Sequence[tuple[int, int]]
    num_requests: int
    at_once: int
    profile: bool
    deadline: float

    def lengths(self, name: str, count: int) -> list[int]:
        """The first `count` of a data set, repeated if it is shorter."""
        return list(islice(cycle(self.datasets[name]), count))

    @property
    def longest(self) -> int:
        return max(max(lengths) for lengths in self.datasets.values())


def measure_all(plan: Plan, made: Transformer, peak: float) -> tuple[list[Result], list[str]]:
    """Every data set in every shape; results and notes."""
    results: list[Result] = []
    notes: list[str] = []
    for size in dict.fromkeys(size for size, _ in plan.shapes):
        model = Transformer(replace(made.config, block_size=size), made.weights)
        windows = [window for each, window in plan.shapes if each == size]
        begin = time.monotonic()
        bench = Bench(model, max(windows), plan.longest, peak)
        print(f"block {size}: ready in {time.monotonic() - begin:.0f} s", flush=True)
        for window in windows:
            for name in plan.datasets:
                if time.monotonic() > plan.deadline:
                    return results, notes
                lengths = plan.lengths(name, plan.num_requests)
                results.append(bench.measure(name, lengths, window, plan.at_once))
                print(table(results[-1:]).splitlines()[1], flush=True)
            if plan.profile:
                first = next(iter(plan.datasets))
                notes += bench.profile(plan.lengths(first, 160), window)
        del bench
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return results, notes


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_serve")
    parser.add_argument("--model", choices=sorted(MODELS), default="dream-7b")
    parser.add_argument(
        "--dataset", type=Path, action="append", required=True, help=f".jsonl ({RULE}) or .json"
    )
    parser.add_argument("--shape", action="append", help="BLOCKxWINDOW, such as 32x2")
    parser.add_argument("--requests", type=int, default=192, help="of each run")
    parser.add_argument("--at-once", type=int, default=MOST_AT_ONCE, help=f"to {MOST_AT_ONCE}")
    parser.add_argument("--profile", action="store_true", help="also device time by kernel")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_serve.json"))
    asked = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(
        datasets={path.stem: read_lengths(path) for path in asked.dataset},
        shapes=[row for row in SHAPES if not asked.shape or f"{row[0]}x{row[1]}" in asked.shape],
        num_requests=asked.requests,
        at_once=asked.at_once,
        profile=asked.profile and device.type == "cuda",
        deadline=time.monotonic() + asked.seconds,
    )
    peak, sustained = peak_flops(device)
    setting = (
        f"product of 8192^3: {peak / 1e12:.0f} TFLOP/s after a pause, {sustained / 1e12:.0f} "
        f"sustained; prompt lengths: {RULE}; script: 2, 3 or 4 tokens a request and step, "
        f"{MEAN:g} on average"
    )
    print(setting, flush=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results, notes = measure_all(plan, random_model(MODELS[asked.model], device, dtype), peak)
    print(table(results))
    write_record(asked.json, [asdict(result) for result in results], [setting, *notes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
