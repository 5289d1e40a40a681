"""`python -m effuse.benchmarks.gpu_step`: whole decode steps beside a bare graph of their products.

Model shapes with random weights, a scripted acceptance (`gpu_script`), window 4 x 32, every batch
and context in one process: step time, its ratio to the products of the same rows, tokens a second,
and how long the device had nothing to do between steps. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from effuse.benchmarks.gpu_floor import mean_bare_ms
from effuse.benchmarks.gpu_models import MODELS, random_model
from effuse.benchmarks.gpu_script import Dealer, deal
from effuse.decode_worker import denoise
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_slots import slot_row
from effuse.decode_worker.device_step import DeviceStep, StepBuffers
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.sequence import Sequence as Tokens
from effuse.decode_worker.settings import (
    Algorithm,
    DecodeSettings,
    Remasking,
    Sampling,
    Score,
    Stopping,
)
from effuse.kernels.slots import RecordColumn, SlotLayout
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.models.transformer import Transformer

WINDOW = 4
PAGE_SIZE = 32
ANSWER = 640
RAMP_STEPS = 40  # until blocks settle at an even pace
WARM_STEPS = 6
AHEAD = 2
# (batch, steps that are timed, repeats of the bare products)
BATCHES = ((1, 64, 48), (8, 32, 16), (16, 24, 12), (32, 16, 8), (64, 16, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One batch and context; times in ms a step."""

    model: str
    batch: int
    context: int
    rows: float  # in use, mean
    candidates: float
    padded_rows: float
    padded_candidates: float
    step_ms: float
    bare_ms: float
    idle_share: float  # of the device between steps
    waits: int  # times that a request did not fit a step
    tokens_per_s: float
    host_ms: float  # the host's own work a step

    @property
    def ratio(self) -> float:
        """Step over bare products."""
        return self.step_ms / self.bare_ms


@dataclass(slots=True)
class Marks:
    """Device events around each step, and the buckets it ran in."""

    begin: list[torch.cuda.Event] = field(default_factory=list)
    end: list[torch.cuda.Event] = field(default_factory=list)
    buckets: list[tuple[int, int]] = field(default_factory=list)


class MarkedStepper(DeviceStepper):
    """Marks where steps begin and end on the device."""

    marks: Marks | None = None
    captures = 0

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self.captures += 1
        return super()._capture(run)

    def _run(self, rows: int, candidates: int, context: int) -> None:
        if self.marks is None:
            super()._run(rows, candidates, context)
            return
        self.marks.begin.append(_mark())
        super()._run(rows, candidates, context)
        self.marks.end.append(_mark())
        self.marks.buckets.append((rows, candidates))


class Bench:
    """One model, its pages and the settings that all batches share."""

    def __init__(self, name: str, device: torch.device, most_tokens: int) -> None:
        config = MODELS[name]
        self.name = name
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = random_model(config, device, dtype)
        layout = KVLayout(
            "unified",
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            PAGE_SIZE,
            str(dtype).removeprefix("torch."),
        )
        self.memory = PageMemory(layout, most_tokens // PAGE_SIZE, device)
        self.memory.tensor.normal_()

    def measure(self, batch: int, context: int, pace: int, steps: int, repeats: int) -> Result:
        """Runs `steps` steps of `batch` requests, then the bare products of their mean rows."""
        stepper, step = self._begin(batch, context, pace)
        for _ in range(WARM_STEPS):
            _turn(stepper)
        _synchronize(self.model)
        stepper.marks = Marks() if self.model.device.type == "cuda" else None
        marks, kept, host_s, captures = stepper.marks, [], 0.0, stepper.captures
        begin = time.perf_counter()
        for _ in range(steps):
            records, busy_s = _turn(stepper)
            kept.append(records)
            host_s += busy_s
        _synchronize(self.model)
        total_s = time.perf_counter() - begin
        stepper.marks = None
        assert stepper.captures == captures, "no graph is captured in timed steps"
        seen = np.stack(kept)
        used = _used(seen, step.buffers.table.layout)
        rows, candidates = used.mean(0)
        # A step's marks are those of the launch AHEAD - 1 turns before it was read.
        buckets = np.mean(marks.buckets if marks else [(rows, candidates)], axis=0)
        bare = self._bare_ms(used, repeats)
        return Result(
            model=self.name,
            batch=batch,
            context=context,
            rows=float(rows),
            candidates=float(candidates),
            padded_rows=float(buckets[0]),
            padded_candidates=float(buckets[1]),
            step_ms=1e3 * total_s / steps,
            bare_ms=bare,
            idle_share=_idle_share(marks) if marks else 0.0,
            waits=int((seen[:, :, RecordColumn.STEPPED] == 0).sum()),
            tokens_per_s=float(seen[:, :, RecordColumn.NUM_WRITTEN].sum()) / total_s,
            host_ms=1e3 * host_s / steps,
        )

    def profile(self, batch: int, context: int, pace: int, path: Path) -> list[str]:
        """Device time by kernel over a few steps, and the host's calls that wait."""
        stepper, _ = self._begin(batch, context, pace)
        for _ in range(WARM_STEPS):
            _turn(stepper)
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(8):
                _turn(stepper)
            torch.cuda.synchronize()
        table = profile.key_averages()
        path.write_text(table.table(sort_by="self_device_time_total", row_limit=40))
        names = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
        waits = [f"{row.key} x{row.count}" for row in table if row.key in names]
        kernels = sorted(table, key=lambda row: -row.self_device_time_total)[:14]
        return [
            f"{self.name}, batch {batch}, context {context}, 8 steps: {', '.join(waits)}",
            *map(_kernel_line, kernels),
        ]

    def _begin(self, batch: int, context: int, pace: int) -> tuple[MarkedStepper, DeviceStep]:
        """Requests in mid-answer, their blocks at different stages."""
        size = self.model.config.block_size
        pages = -(-(context + ANSWER) // PAGE_SIZE)
        layout = SlotLayout(batch, size, max_window=WINDOW, max_stops=4, max_pages=pages)
        buffers = StepBuffers.empty(self.model, layout, batch * (WINDOW + 2) * size)
        dealer = Dealer(buffers.table, buffers.rows.first_candidate, pace)
        on_cuda = self.model.device.type == "cuda"
        step = DeviceStep(
            self.model,
            self.memory.layer_views(),
            buffers,
            page_size=PAGE_SIZE,
            adjust=dealer if on_cuda else None,
        )
        stepper = MarkedStepper(step, uses_graphs=True)
        order = np.random.default_rng(1).permutation(self.memory.num_pages).astype(np.int32)
        for slot in range(batch):
            row = _row(self.model, layout, slot, context, pace, order[slot * pages :][:pages])
            stepper.join(slot, row)
        rows, masks = batch * WINDOW * size, batch * (WINDOW - 2) * size
        # Whatever the steps may need: a graph captured in between would be timed with them.
        stepper.prepare(
            range(rows - size, rows + max(size, rows // 8) + 1),
            range(masks * 3 // 4, max(masks * 3 // 2, masks + 2 * size) + 1),
            range(context, context + ANSWER),
        )
        for _ in range(AHEAD - 1):
            stepper.launch()
        return stepper, step

    def _bare_ms(self, used: Integers, repeats: int) -> float:
        return mean_bare_ms(self.model, used, repeats) if self.model.device.type == "cuda" else 1.0


def _kernel_line(row: torch.autograd.profiler_util.FunctionEventAvg) -> str:
    milliseconds, launches = row.self_device_time_total / 8e3, row.count / 8
    return f"  {milliseconds:8.3f} ms x{launches:5.1f}  {str(row.key)[:90]}"


def _turn(stepper: DeviceStepper) -> tuple[Integers, float]:
    """Launches a step, reads the one before: its records, and the host's seconds."""
    begin = time.perf_counter()
    stepper.launch()
    launched = time.perf_counter()
    records = stepper.read().copy()
    return records, launched - begin


def _row(
    model: Transformer, layout: SlotLayout, slot: int, context: int, pace: int, pages: Integers
) -> Integers:
    """A request in mid-answer, its blocks at all stages; slots are 0 to 7 steps apart, drawn."""
    config = model.config
    settings = DecodeSettings(
        algorithm=Algorithm.D2F,
        window=WINDOW,
        confidence_threshold=0.9,
        block_add_threshold=0.1,
        # At 1 no block is forced to advance beside the script.
        full_activation_threshold=0.95 if pace >= WINDOW else 1.0,
        score=Score.CONFIDENCE,
        remasking=Remasking.LOW_CONFIDENCE_DYNAMIC,
        denoising_steps=layout.block_size,
    )
    prompt = np.random.default_rng(slot).integers(0, config.mask_token_id, context).tolist()
    sequence = Tokens(
        prompt,
        origin=context,
        block_size=layout.block_size,
        mask_token_id=config.mask_token_id,
        stopping=Stopping.of(ANSWER, []),
    )
    sequence.store(context)
    for _ in range(RAMP_STEPS + int(np.random.default_rng([7, slot]).integers(8))):
        plan = denoise.open_step(sequence, settings)
        _scripted(sequence, settings, plan, pace)
    denoise.open_step(sequence, settings)
    return slot_row(
        layout,
        sequence,
        settings,
        Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=slot),
        generation=slot + 1,
        pages=pages.tolist(),
        page_size=PAGE_SIZE,
    )


def _scripted(sequence: Tokens, settings: DecodeSettings, plan: StepPlan, pace: int) -> None:
    left = [block.masks_left for block in sequence.blocks]
    denoise.apply_step(sequence, settings, plan, deal(plan, left, pace))


def _used(records: Integers, layout: SlotLayout) -> Integers:
    """Rows and candidates of each step [steps, 2], from the states that the records left."""
    rows = records[:, :, RecordColumn.NUM_BLOCKS].sum(1) * layout.block_size
    return np.stack([rows, records[:, :, RecordColumn.NUM_MASKS].sum(1)], axis=1)


def _idle_share(marks: Marks) -> float:
    """Time between the end of a step and the begin of the next, over all of the time."""
    pairs = zip(marks.end, marks.begin[1:], strict=False)
    idle = sum(end.elapsed_time(begin) for end, begin in pairs)
    return float(idle / marks.begin[0].elapsed_time(marks.end[-1]))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _synchronize(model: Transformer) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _table(results: Sequence[Result]) -> str:
    lines = [
        "model      ctx batch   rows  cands  padding  step ms  bare ms  ratio  idle  tok/s  host ms"
    ]
    for r in results:
        padding = r.padded_rows / r.rows - 1
        lines.append(
            f"{r.model:9} {r.context:5} {r.batch:5} {r.rows:6.0f} {r.candidates:6.0f} "
            f"{100 * padding:7.1f}% {r.step_ms:8.2f} {r.bare_ms:8.2f} {r.ratio:6.3f} "
            f"{100 * r.idle_share:4.1f}% {r.tokens_per_s:6.0f} {r.host_ms:8.3f}"
        )
    return "\n".join(lines)


def _write(path: Path, results: Sequence[Result], notes: Sequence[str]) -> None:
    on_cuda = torch.cuda.is_available()
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "results": [asdict(result) | {"ratio": result.ratio} for result in results],
        "notes": list(notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_step")
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--pace", type=int, default=4, help="tokens a request and step")
    parser.add_argument("--profile", action="store_true", help="also device time by kernel")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_step.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after that")
    asked = parser.parse_args(argv)
    deadline = time.monotonic() + asked.seconds
    results: list[Result] = []
    notes: list[str] = []
    for name in asked.model or ["dream-7b", "llada-8b"]:
        _measure_model(name, asked, deadline, results, notes)
        torch.cuda.empty_cache()
    print("\n".join(notes))
    print(_table(results))
    _write(asked.json, results, notes)
    return 0


def _measure_model(
    name: str,
    asked: argparse.Namespace,
    deadline: float,
    results: list[Result],
    notes: list[str],
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contexts = asked.context or [512, 2048]
    batches = [row for row in BATCHES if not asked.batch or row[0] in asked.batch]
    most = max(row[0] for row in batches) * (max(contexts) + ANSWER + PAGE_SIZE)
    bench = Bench(name, device, most)
    for context in contexts:
        for batch, steps, repeats in batches:
            if time.monotonic() > deadline:
                return
            result = bench.measure(batch, context, asked.pace, steps, repeats)
            results.append(result)
            print(_table([result]).splitlines()[1], flush=True)
    if asked.profile:
        for batch in (1, 16):
            path = asked.json.with_name(f"profile_{name}_{batch}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            notes += bench.profile(batch, contexts[-1], asked.pace, path)


if __name__ == "__main__":
    sys.exit(main())
