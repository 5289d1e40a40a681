"""The figures of a load on a fleet: arithmetic over its requests. Seconds everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from effuse.benchmarks.fleet_load import Taken, Window
from effuse.cli.figures import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One load; NaN for figures without a sample."""

    requests: int  # that began in the window
    failed: int
    tokens_per_s: float  # of blocks that arrived in the window
    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float  # of blocks that arrived in the window
    gap_p99_s: float
    forwards_a_block: float
    prefill_p50_s: float
    handoff_p50_s: float
    handoff_p99_s: float
    batch: float  # requests being decoded at a time, on average, over all decode workers
    failures: tuple[str, ...]


def figures(window: Window) -> Figures:
    """Of requests that began in the window; tokens and gaps of everything that arrived in it."""
    inside = [one for one in window.requests if window.begin <= one.sent < window.end]
    well = [one for one in inside if not one.failure and one.blocks]
    tokens = sum(
        size
        for one in window.requests
        for at, size in zip(one.blocks, one.sizes, strict=True)
        if window.begin <= at < window.end
    )
    gaps = [
        gap
        for one in window.requests
        for gap, at in zip(one.gaps, one.blocks[1:], strict=True)
        if window.begin <= at < window.end
    ]
    firsts = [one.first_s for one in well]
    moved = [one.handoff_s for one in well if one.kv_bytes]
    return Figures(
        requests=len(inside),
        failed=len(inside) - len(well),
        tokens_per_s=tokens / window.seconds,
        first_p50_s=percentile(firsts, 0.5),
        first_p99_s=percentile(firsts, 0.99),
        gap_p50_s=percentile(gaps, 0.5),
        gap_p99_s=percentile(gaps, 0.99),
        forwards_a_block=forwards_a_block(window),
        prefill_p50_s=percentile([one.prefill_s for one in well], 0.5),
        handoff_p50_s=percentile(moved, 0.5),
        handoff_p99_s=percentile(moved, 0.99),
        batch=decoding(window),
        failures=tuple(sorted({one.failure for one in inside if one.failure})),
    )


def forwards_a_block(window: Window) -> float:
    """Of requests that ended in the window; NaN if none did."""
    ended = [
        one
        for one in window.requests
        if not one.failure and one.blocks and window.begin <= one.ended < window.end
    ]
    blocks = sum(len(one.blocks) for one in ended)
    return sum(one.forwards for one in ended) / blocks if blocks else math.nan


def decoding(window: Window) -> float:
    """Requests that were being decoded at a time, on average. The time of a request's first forward
    is not visible from outside; it is assumed to be one of its gaps before its first block.
    """
    spent = 0.0
    for one in window.requests:
        if not one.blocks:
            continue
        lead = one.gaps[0] if one.gaps else 0.0
        begin, end = max(one.blocks[0] - lead, window.begin), min(one.blocks[-1], window.end)
        spent += max(0.0, end - begin)
    return spent / window.seconds


def links(requests: Sequence[Taken]) -> dict[str, float]:
    """Bytes a second of handoffs by pair of workers, medians; of requests whose KV was moved."""
    rates: dict[str, list[float]] = {}
    for one in requests:
        if one.kv_bytes and one.handoff_s:
            pair = f"{one.prefill_worker} to {one.decode_worker}"
            rates.setdefault(pair, []).append(one.kv_bytes / one.handoff_s)
    return {pair: percentile(values, 0.5) for pair, values in sorted(rates.items())}
