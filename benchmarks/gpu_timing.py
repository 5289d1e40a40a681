"""Times of device work: steps, calls in CUDA graphs over rotated inputs, limits of the memory.

Rivals take turns: a device lowers its clock under long work, and the first would have had an
advantage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.kernels.step_slots import Column, RecordColumn, SlotLayout
from effuse.worker.rank_messages import LaunchStep

Call = Callable[[], object]


class Stamp:
    """A moment in a device's queue, once all earlier work has ended; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event = _event() if device.type == "cuda" else None
        self._host_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def ms_until(self, later: Stamp) -> float:
        """Milliseconds from this moment to a later one, for which it waits."""
        if self._event is None or later._event is None:
            return 1e3 * (later._host_s - self._host_s)
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


@dataclass(slots=True)
class Marks:
    """Begin and end of steps, in order, and their computed (rows, candidates)."""

    begin: list[Stamp] = field(default_factory=list)
    end: list[Stamp] = field(default_factory=list)
    buckets: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle_share(self) -> float:
        """Time between the end of a step and the begin of the next, over all of the time."""
        idle = sum(a.ms_until(b) for a, b in zip(self.end, self.begin[1:], strict=False))
        return idle / self.begin[0].ms_until(self.end[-1])


class MarkedStepper(DeviceStepper):
    """Counts its steps' work; if it has marks, records in them where steps begin and end."""

    marks: Marks | None = None
    captures = 0
    written = 0  # tokens, as the records tell
    launch_s = 0.0  # of the host

    @property
    def device(self) -> torch.device:
        return self.step.model.device

    def launch(self) -> None:
        begin = time.perf_counter()
        super().launch()
        self.launch_s += time.perf_counter() - begin

    def read(self) -> Integers:
        records = super().read()
        self.written += int(records[:, RecordColumn.NUM_WRITTEN].sum())
        return records

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self.captures += 1
        return super()._capture(run)

    def _run(self, step: LaunchStep) -> Tensor:
        if self.marks is None:
            return super()._run(step)
        self.marks.begin.append(Stamp(self.device))
        records = super()._run(step)
        self.marks.end.append(Stamp(self.device))
        self.marks.buckets.append((step.rows, step.candidates))
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps after steps; means of a step."""

    num_steps: int
    step_ms: float
    launch_ms: float  # of the host
    idle_share: float
    rows: float  # that were computed
    candidates: float
    tokens_per_s: float
    captures: int  # graphs captured meanwhile, which take long


def fill(stepper: DeviceStepper, requests: Sequence[Integers]) -> None:
    """Puts these rows of the slot table into the slots, instead of the previous ones, and launches
    a step ahead.
    """
    while stepper.num_ahead:
        stepper.read()
    for slot, row in enumerate(requests):
        stepper.leave(slot)
        stepper.join(slot, row)
    stepper.launch()


def next_step(stepper: DeviceStepper) -> Integers:
    """Launches a step and reads the previous one: its records [S, record_width]."""
    stepper.launch()
    return stepper.read().copy()


def run_marked(stepper: MarkedStepper, go: Call, times: int) -> Run:
    """Calls `go`, which launches a step or none, this many times, and waits for the last step.

    Earlier launched work has ended when it begins, so its time does not count.
    """
    device = stepper.device
    synchronize(device)
    marks = stepper.marks = Marks()
    before = stepper.written, stepper.launch_s, stepper.captures
    begin = time.perf_counter()
    for _ in range(times):
        go()
    synchronize(device)
    total_s = time.perf_counter() - begin
    stepper.marks = None
    rows, candidates = np.mean(marks.buckets, axis=0).tolist()
    num_steps = len(marks.buckets)
    return Run(
        num_steps=num_steps,
        step_ms=1e3 * total_s / num_steps,
        launch_ms=1e3 * (stepper.launch_s - before[1]) / num_steps,
        idle_share=marks.idle_share,
        rows=rows,
        candidates=candidates,
        tokens_per_s=(stepper.written - before[0]) / total_s,
        captures=stepper.captures - before[2],
    )


def run_alone(stepper: MarkedStepper, steps: int) -> tuple[Run, Sequence[Integers]]:
    """Times so many steps by themselves; also their records."""
    kept: list[Integers] = []
    alone = run_marked(stepper, lambda: kept.append(next_step(stepper)), steps)
    assert not alone.captures, "no graph is captured in timed steps"
    return alone, kept


def used_in(records: Sequence[Integers], layout: SlotLayout) -> Integers:
    """Rows and candidates [steps, 2] of the steps launched in these turns: a record has its slot's
    state after the previous step.
    """
    seen = np.stack(records)
    rows = seen[:, :, Column.NUM_BLOCKS].sum(1) * layout.block_size
    return np.stack([rows, seen[:, :, Column.NUM_MASKS].sum(1)], axis=1)


def median_us(calls: Sequence[Call], repeats: int = 7) -> float:
    """Microseconds per call: all ``calls`` after one another in a graph, the median replay.

    Calls should read different inputs, more than fit in the L2 cache, so that each reads the
    device's memory.
    """
    return medians_us({"": calls}, repeats)[""]


def medians_us(rivals: Mapping[str, Sequence[Call]], repeats: int = 7) -> dict[str, float]:
    """`median_us` of each rival's calls; replays of all rivals take turns."""
    device = torch.device("cuda")
    graphs = {name: _graph(calls) for name, calls in rivals.items()}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(-1, repeats):
        for name, graph in graphs.items():
            begin = Stamp(device)
            graph.replay()
            elapsed = begin.ms_until(Stamp(device))
            if turn >= 0:
                times[name].append(1e3 * elapsed / len(rivals[name]))
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def _graph(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def copy_bytes_per_us(num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written in a microsecond of a large copy on the device.

    By a kernel: a copy node of a graph reached 2.7 TB/s where kernels reach 4.2.
    """
    source = torch.randn(num_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / median_us([lambda: torch.neg(source, out=target)] * 3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Returns once all queued work has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize()
