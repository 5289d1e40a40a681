"""`python -m effuse.benchmarks.gpu_kernels`: every kernel with its limit and its rivals.

Attention over the grid of the aims (batch 16 to 64, 32 to 128 rows in flight, 2k to 8k cached),
sampling compared with one read of the logits and with torch's chain, row-wise kernels compared with
a copy. The tables come first, the aims last; everything is written as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from effuse.benchmarks import gpu_attention, gpu_rows
from effuse.benchmarks.gpu_attention import HEADS, Point
from effuse.benchmarks.gpu_rows import Moved, Sampled
from effuse.benchmarks.gpu_timing import copy_bytes_per_us
from effuse.benchmarks.report import Figure, Report

BATCHES, IN_FLIGHT, CONTEXTS = (16, 32, 64), (32, 64, 128), (2048, 4096, 8192)
LLADA = (Point("llada", 16, 32, 2048, 32), Point("llada", 16, 128, 2048, 32))
OTHER_PAGES = tuple(
    Point("dream", batch, 64, context, page)
    for page in (16, 64)
    for batch, context in ((16, 2048), (64, 4096))
)
RIVALS = ("cudnn", "gather cudnn", "gather flex", "gather flex unpacked")
Found = list[tuple[Point, dict[str, float]]]


@dataclass(slots=True)
class Run:
    """Results of the parts of one run."""

    report: Report
    copy: float  # bytes a microsecond
    deadline: float
    points: list[dict[str, object]] = field(default_factory=list)


def grid(page_size: int = 32) -> Iterator[Point]:
    """The points of the aims; those of the middle batch without the middle context."""
    for context in CONTEXTS:
        for batch in BATCHES:
            for in_flight in IN_FLIGHT:
                yield Point("dream", batch, in_flight, context, page_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 if an aim does not hold, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_kernels")
    parts: dict[str, Callable[[Run], None]] = {
        "sampling": _sampling,
        "rows": _rows,
        "split": _split,
        "attention": _attention,
    }
    parser.add_argument("--only", choices=sorted(parts), action="append")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_kernels.json"))
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    report = Report("Kernels on one GPU, each figure beside its aim")
    run = Run(report, copy_bytes_per_us(), time.monotonic() + asked.seconds)
    report.settings = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, Triton {triton.__version__}",
        "copy": f"{run.copy / 1e6:.2f} TB/s read and written",
    }
    for name, part in parts.items():
        if not asked.only or name in asked.only:
            part(run)
            report.write(asked.json)
            points = json.dumps(run.points, indent=1)
            asked.json.with_name(f"{asked.json.stem}_points.json").write_text(points + "\n")
    report.print()
    return report.exit_status


def _sampling(run: Run) -> None:
    _line("sampling, bf16 logits of 152064 tokens: us (over one read of the logits)")
    for rows in (2048, 64):
        found = gpu_rows.measure_sampling(rows)
        _line(_sampling_line(found))
        run.points.append(asdict(found))
        if rows == 2048:
            sampling_aims(run.report, found)


def _sampling_line(found: Sampled) -> str:
    modes = ", ".join(f"{k} {us:.0f} ({us / found.read:.2f})" for k, us in found.modes.items())
    chains = ", ".join(
        f"{pair.chain:.0f} beside {pair.ours:.0f} of {name} ({pair.ratio:.1f})"
        for name, pair in found.chains.items()
    )
    return f"{found.rows:5} rows: read {found.read:.0f}, {modes}; torch's chain {chains}"


def sampling_aims(report: Report, found: Sampled) -> None:
    """Greedy compared with the read; torch's chain with the mode that gives the same results."""
    greedy = found.modes["greedy"] / found.read
    against = f"one read of the logits, {found.read:.0f} us, in turns"
    name = f"confidence sampling, {found.rows} x {gpu_rows.VOCABULARY}"
    _aim(report, name, greedy, 1.25, "at most", against)
    for mode, with_entropy in gpu_rows.BESIDE_CHAIN.items():
        pair = found.chains[mode]
        title = f"torch's chain, {'with' if with_entropy else 'without'} entropy"
        against = f"ours for the same, {pair.ours:.0f} and {pair.chain:.0f} us in turns"
        _aim(report, title, pair.ratio, 5.0, "at least", against)


def _rows(run: Run) -> None:
    _line("row-wise kernels, 4096 rows of Dream-7B in bf16: us, TB/s, share of copy bandwidth")
    for moved in [*gpu_rows.measure_rows(), *gpu_rows.measure_pages()]:
        _line(_moved_line(moved, run.copy))
        run.points.append(asdict(moved))


def _moved_line(moved: Moved, copy: float) -> str:
    rate = moved.num_bytes / moved.us
    return f"{moved.name:28} {moved.us:7.1f} {rate / 1e6:6.2f} {rate / copy:6.2f}"


def _split(run: Run) -> None:
    """Only Dream's heads: without a split LLaDA's 32 KV heads are 32 programs, not 4."""
    for model in HEADS:
        found = gpu_attention.measure_split(Point(model, 1, 32, 8192, 32))
        one, split = found["one program"], found["split"]
        _line(f"batch 1, context 8192, one block, {model}: split {split:.1f} us, not {one:.1f} us")
        if model == "dream":
            against = f"no split, {one:.0f} us; split {split:.1f} us"
            name = "batch 1, context 8192, one block"
            _aim(run.report, name, one / split, 5.0, "at least", against)


def _attention(run: Run) -> None:
    gpu_attention.check(Point("dream", 16, 64, 2048, 32))
    _line("attention, bf16, TFLOP/s on visible pairs (cudnn: on all), us of ours")
    columns = ("ours", "contiguous", "portable", "distinct", *RIVALS)
    _line(f"{'heads':6} {'B':>3} {'q':>4} {'ctx':>5} {'page':>4}" + _headings(columns) + "      us")
    found: Found = []
    for point in [*grid(), *LLADA, *OTHER_PAGES]:
        if time.monotonic() > run.deadline:
            run.report.notes.append(f"stopped before {point}: out of time")
            break
        times = gpu_attention.measure(point)
        found.append((point, times))
        _line(_attention_line(point, times, columns))
        run.points.append(asdict(point) | times)
    _attention_aims(run.report, [pair for pair in found if pair[0] in set(grid())])
    _layouts(run.report, found)


def _headings(columns: Sequence[str]) -> str:
    return "".join(f"{name.replace('gather ', 'g '):>15}" for name in columns)


def _attention_line(point: Point, times: dict[str, float], columns: Sequence[str]) -> str:
    rates = "".join(f"{_rate(point, times, name):15.0f}" for name in columns)
    shape = f"{point.batch:3} {point.in_flight:4} {point.context:5} {point.page_size:4}"
    return f"{point.model:6} {shape}{rates} {times['ours']:7.1f}"


def _rate(point: Point, times: dict[str, float], name: str) -> float:
    """TFLOP/s; nan if it was not measured."""
    flop = point.dense_flop if "cudnn" in name else point.flop
    return flop / times[name] / 1e6 if name in times else math.nan


def _attention_aims(report: Report, found: Found) -> None:
    """Only for the grid: Dream's heads, pages of 32."""
    if not found:
        return
    cudnn = [_rate(p, t, "ours") / _rate(p, t, "cudnn") for p, t in found]
    pages = [t["ours"] / t["contiguous"] for _, t in found]
    packed = [t["gather flex"] / t["ours"] for _, t in found]
    unpacked = [t["gather flex unpacked"] / t["ours"] for p, t in found if p.in_flight == 32]
    points = f"{len(found)} points"
    _aim(report, "attention, mean", _mean(cudnn), 0.80, "at least", f"packed cuDNN, {points}")
    _aim(report, "attention, worst point", min(cudnn), 0.65, "at least", "packed cuDNN")
    _aim(report, "random pages, mean", _mean(pages), 1.05, "at most", "pages in order")
    _aim(report, "random pages, worst point", max(pages), 1.05, "at most", "pages in order")
    _aim(report, "gather + packed flex, worst", min(packed), 1.0, "at least", "ours")
    if unpacked:
        _aim(report, "unpacked flex, 32 rows, worst", min(unpacked), 3.0, "at least", "ours")


def _aim(report: Report, name: str, value: float, limit: float, bound: str, against: str) -> None:
    side: dict[str, str] = {"name": name, "against": against}
    if bound == "at least":
        report.add(Figure(value=value, limit=limit, unit="x", bound="at least", **side))
    else:
        report.add(Figure(value=value, limit=limit, unit="x", bound="at most", **side))


def _layouts(report: Report, found: Found) -> None:
    """Distinct over unified by the kernels that only differ in layout, and by the best ones."""
    if not found:
        return
    same = [t["portable"] / t["distinct"] for _, t in found]
    best = [t["ours"] / t["distinct"] for _, t in found]
    report.notes.append(
        f"distinct is {_mean(same):.3f} ({min(same):.2f} to {max(same):.2f}) times as fast as "
        f"unified by the same kind of kernel, {_mean(best):.3f} ({min(best):.2f} to "
        f"{max(best):.2f}) times by the best kernel of each"
    )


def _mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
