"""Output of benchmarks on a GPU: results with date and machine, device time by kernel, waits.

A wait is a call of the host that returns once the device has come so far. The profiler counts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from effuse.benchmarks.gpu_timing import Run

# By parts of kernels' names, first match first.
_CLASSES = (
    ("attention", ("_attention", "merge", "sdpa", "flash", "cudnn")),
    ("SwiGLU", ("_swiglu",)),
    ("norms", ("_rms_norm",)),
    ("rotary and store", ("_rotary",)),
    ("sampling", ("confidence", "_sample", "_partial")),
    ("plan and advance", ("_plan", "_advance", "_fill", "_deal")),
    (
        "experts",
        ("_gate_up", "_down_kernel", "_route", "_sort_kernel", "_count_kernel", "_sum_ker"),
    ),
    ("products", ("nvjet", "gemm", "cutlass", "splitk", "cublas")),
)


class Row(Protocol):
    """The used fields of a line in the profiler's table."""

    key: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """One batch and context whose requests end, each of which is immediately replaced."""

    model: str
    batch: int
    context: int
    answer: int  # tokens of each request
    joined: int
    run: Run
    joined_profiled: int
    waits: dict[str, float]  # waiting calls of the host per step, in as many steps again


def profiled(run: Callable[[], object], repeats: int) -> Any:
    """The profiler's list of events of `repeats` runs: kernels, and calls of the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            run()
    return profile.key_averages()


def waits(table: Iterable[Row], repeats: int) -> dict[str, float]:
    """Waits of one run by the call's name: for an event, for a stream, for the whole device.

    The profiler waits once for the device itself, when it ends.
    """
    return {row.key: row.count / repeats for row in table if row.key.endswith("Synchronize")}


def waits_line(found: Mapping[str, float]) -> str:
    """The same in words."""
    each = [f"{name} {count:.2f}" for name, count in sorted(found.items())]
    return f"waits a step: {', '.join(each) or 'none'}"


def arrivals_line(found: Arrivals) -> str:
    """In words."""
    run = found.run
    return (
        f"{found.model}, batch {found.batch}, context {found.context}, answers of {found.answer}: "
        f"{found.joined} joined in {run.num_steps} steps of {run.rows:.0f} rows, "
        f"{run.step_ms:.2f} ms a step, idle {100 * run.idle_share:.1f} %, "
        f"{run.tokens_per_s:.0f} tokens/s, {run.captures} graphs captured; "
        f"{waits_line(found.waits)}, while {found.joined_profiled} joined"
    )


def longest_kernels(table: Any, repeats: int, most: int = 14) -> list[str]:
    """Device ms and launches of one run, for the kernels that take longest; of `profiled`."""
    rows = sorted(table, key=lambda row: -row.self_device_time_total)[:most]
    return [
        f"  {row.self_device_time_total / 1e3 / repeats:8.3f} ms x{row.count / repeats:5.1f}  "
        f"{str(row.key)[:90]}"
        for row in rows
    ]


def kernel_classes(run: Callable[[], object], repeats: int) -> list[str]:
    """Device ms and launches of one `run` by kind of kernel; others by their names."""
    if not torch.cuda.is_available():
        return ["no device"]
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    rows = [row for row in profile.key_averages() if row.self_device_time_total > 0]
    sums: dict[str, tuple[float, float]] = {}
    for row in rows:
        name = _class_of(row.key)
        spent, count = sums.get(name, (0.0, 0.0))
        sums[name] = (spent + row.self_device_time_total / 1e3, count + row.count)
    return [
        f"{name:24} {spent / repeats:8.3f} x{count / repeats:6.1f}"
        for name, (spent, count) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]


def busy_share(run: Callable[[], object], repeats: int) -> float:
    """Time of the device's kernels and copies over the time from the first to the last of them."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    )
    busy, last = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    return float(busy / (last - spans[0][0]))


def _class_of(kernel: str) -> str:
    lowered = kernel.lower()
    for name, marks in _CLASSES:
        if any(mark in lowered for mark in marks):
            return name
    return kernel[:40]


def write_record(path: Path, results: Sequence[dict[str, object]], notes: Sequence[str]) -> None:
    """Writes results as JSON, with the date and the machine."""
    on_cuda = torch.cuda.is_available()
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "results": list(results),
        "notes": list(notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
