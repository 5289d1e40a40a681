"""Times of device work: calls in one CUDA graph over rotated inputs, and limits of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def median_us(calls: Sequence[Call], repeats: int = 7) -> float:
    """Microseconds a call: all ``calls`` after one another in a graph, the median replay.

    Calls should read different inputs, more than the L2 cache holds, so that each finds them in
    the device's memory.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / len(calls))
    return sorted(times)[len(times) // 2]


def copy_bytes_per_us(num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written in a microsecond of a large copy on the device.

    By a kernel: a copy node of a graph reached 2.7 TB/s where kernels reach 4.2.
    """
    source = torch.randn(num_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / median_us([lambda: torch.neg(source, out=target)] * 3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
