"""Counters of a worker's front and their Prometheus text, served on a port of their own.

Names are vLLM's with our prefix, written as Prometheus asks. Not here: what the counters mean to a
router, which reads the worker's load instead.
"""

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effuse.placement.records import Link, Load, Quarantine

_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_REQUEST_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Histogram:
    """How often a duration fell under each bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one duration."""
        self.counts[bisect.bisect_left(_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def lines(self, name: str) -> list[str]:
        """Returns the histogram in Prometheus text."""
        seen, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), self.counts, strict=True):
            seen += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*lines, f"{name}_sum {self.total_s:.6f}", f"{name}_count {seen}"]


@dataclass(slots=True)
class WorkerMetrics:
    """What a front counts from its start on."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by how the attempt ended
    time_to_first_block: Histogram = field(default_factory=Histogram)
    request_latency: Histogram = field(default_factory=Histogram)
    handoff: Histogram = field(default_factory=Histogram)  # of the prompts that came verified


def render(
    metrics: WorkerMetrics,
    load: Load,
    restarts: int,
    tasks: int,
    links: Sequence[Link] = (),
    quarantines: Sequence[Quarantine] = (),
) -> str:
    """Returns all metrics in Prometheus text."""
    used = load.total_pages - load.free_pages
    gauges: dict[str, float] = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
        "kv_cache_usage_perc": used / load.total_pages if load.total_pages else 0.0,
        "kv_pages_quarantined": load.quarantined_pages,
        "front_tasks": tasks,
    }
    counters = {
        "prompt_tokens_total": metrics.prompt_tokens,
        "generation_tokens_total": metrics.generation_tokens,
        "engine_steps_total": load.steps,
        "engine_restarts_total": restarts,
        "num_preemptions_total": load.preemptions,
        "kv_transfer_bytes_total": load.kv_bytes,
    }
    lines: list[str] = []
    for name, gauge in gauges.items():
        lines += [f"# TYPE effuse_{name} gauge", f"effuse_{name} {gauge:g}"]
    for name, count in counters.items():
        lines += [f"# TYPE effuse_{name} counter", f"effuse_{name} {count}"]
    lines.append("# TYPE effuse_request_success_total counter")
    for reason, count in sorted(metrics.finished.items()):
        lines.append(f'effuse_request_success_total{{finished_reason="{reason}"}} {count}')
    lines += _link_lines(links)
    lines += _quarantine_lines(quarantines)
    lines += metrics.time_to_first_block.lines("effuse_time_to_first_block_seconds")
    lines += metrics.request_latency.lines("effuse_e2e_request_latency_seconds")
    lines += metrics.handoff.lines("effuse_kv_handoff_seconds")
    return "\n".join(lines) + "\n"


def _link_lines(links: Sequence[Link]) -> list[str]:
    name = "effuse_kv_link_bytes_per_second"
    lines = [f"# TYPE {name} gauge"] if links else []
    for link in links:
        labels = f'peer="{_quoted(link.peer)}",transport="{_quoted(link.transport)}"'
        lines.append(f"{name}{{{labels}}} {link.bytes_per_second:.0f}")
    return lines


def _quarantine_lines(quarantines: Sequence[Quarantine]) -> list[str]:
    if not quarantines:
        return []
    pages, age = "effuse_kv_quarantine_pages", "effuse_kv_quarantine_age_seconds"
    labels = [f'{{writer="{_quoted(one.writer)}"}}' for one in quarantines]
    return [
        f"# TYPE {pages} gauge",
        *(f"{pages}{told} {one.pages}" for told, one in zip(labels, quarantines, strict=True)),
        f"# TYPE {age} gauge",
        *(f"{age}{told} {one.age_s:.1f}" for told, one in zip(labels, quarantines, strict=True)),
    ]


def _quoted(text: str) -> str:
    """A label's value: others chose it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def serve(host: str, port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answers every HTTP request on `port` (0 takes a free one) with `text()`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(text()))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # a scraper that does not speak HTTP, or went away
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port)


def _response(text: str) -> bytes:
    body = text.encode()
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
