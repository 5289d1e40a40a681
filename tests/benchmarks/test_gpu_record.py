"""Counts of GPU benchmarks: waits of the host, and time by kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from effuse.benchmarks.gpu_record import longest_kernels, profiled, waits, waits_line


@dataclass
class Line:
    key: str
    count: int
    self_device_time_total: float = 0.0  # microseconds


def test_every_call_that_waits_is_counted_and_no_other() -> None:
    table = [
        Line("cudaEventSynchronize", 10),
        Line("cudaStreamSynchronize", 2),
        Line("cudaDeviceSynchronize", 1),
        Line("cudaEventRecord", 40),
        Line("cudaGraphLaunch", 16),
    ]
    found = waits(table, 8)
    assert found == {
        "cudaEventSynchronize": 1.25,
        "cudaStreamSynchronize": 0.25,
        "cudaDeviceSynchronize": 0.125,
    }
    assert "cudaStreamSynchronize 0.25" in waits_line(found)
    assert waits_line({}) == "waits a step: none"


def test_kernels_that_take_longest_come_first() -> None:
    table = [Line("short", 16, 800.0), Line("long", 8, 16_000.0), Line("least", 8, 8.0)]
    first, second = longest_kernels(table, 8, most=2)
    assert first.split() == ["2.000", "ms", "x", "1.0", "long"]
    assert second.split() == ["0.100", "ms", "x", "2.0", "short"]


def test_the_profiler_counts_what_runs() -> None:
    one = torch.ones(3)
    table = profiled(lambda: one + one, 5)
    assert {row.key: row.count for row in table}["aten::add"] == 5
    assert waits(table, 5) == {}
