"""Counters of a worker, and values that it reads at a scrape.

Routers use the worker's load instead of these metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from effuse.placement.records import Link, Load, Quarantine, Role
from effuse.telemetry.metrics import PREFIX, TOKENS_PER_FORWARD, ProcessMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReadings:
    """State of a worker at one moment."""

    role: Role
    model_name: str  # empty before the first engine is ready
    load: Load
    restarts: int  # of the engine, so far
    tasks: int  # of the front's event loop
    links: Sequence[Link] = ()
    quarantines: Sequence[Quarantine] = ()


class WorkerMetrics(ProcessMetrics):
    """Counts from the start of the front on; `read` returns the other values at a scrape."""

    def __init__(self, read: Callable[[], WorkerReadings]) -> None:
        super().__init__(lambda: _labels(read()))
        self._readings = read
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of attempts begun here")
        self.generation_tokens = self.counter("generation_tokens", "Tokens written")
        self.succeeded = self.counter(
            "request_success", "Attempts that ended well, by outcome", "finished_reason"
        )
        self.failed = self.counter(
            "request_failure", "Attempts that failed, by the engine's reason", "reason"
        )
        self.queue_time = self.histogram(
            "request_queue_time_seconds",
            "Time that an attempt waited for its turn or for its pages",
        )
        self.prefill_time = self.histogram(
            "request_prefill_time_seconds", "Time to compute a prompt, from its turn on"
        )
        self.first_block = self.histogram(
            "time_to_first_block_seconds", "From the start of an attempt to its first block"
        )
        self.inter_block = self.histogram(
            "inter_block_latency_seconds", "From one commit of an attempt to the next"
        )
        self.latency = self.histogram(
            "e2e_request_latency_seconds", "From the start of an attempt to its end"
        )
        self.tokens_per_forward = self.histogram(
            "tokens_per_forward",
            "Tokens of an attempt divided by its forwards",
            bounds=TOKENS_PER_FORWARD,
        )
        self.handoff = self.histogram(
            "kv_handoff_seconds", "Handoff of a prompt's KV, from when its pages could be pushed",
            "transport",
        )  # fmt: skip
        self.kv_bytes = self.counter(
            "kv_transfer_bytes", "Bytes of KV pages pushed or received", "transport"
        )

    def count_handoff(self, transport: str, num_bytes: int, seconds: float) -> None:
        """A prompt's KV has moved from worker to worker."""
        self.handoff.labels(transport).observe(seconds)
        self.kv_bytes.labels(transport).inc(num_bytes)

    def families(self) -> Iterator[Metric]:
        """Counters first, then the values that are read."""
        yield from super().families()
        now = self._readings()
        yield from _load_families(now.load)
        yield _gauge("front_tasks", "Tasks of the front's event loop", now.tasks)
        yield _counter("engine_restarts", "Engines that were replaced", now.restarts)
        yield _link_family(now.links)
        yield from _quarantine_families(now.quarantines)


def _labels(now: WorkerReadings) -> dict[str, str]:
    return {"role": now.role, "model_name": now.model_name}


def _load_families(load: Load) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Attempts that hold pages", load.running)
    yield _gauge("num_requests_waiting", "Attempts that wait for pages", load.waiting)
    used = load.total_pages - load.free_pages
    share = used / load.total_pages if load.total_pages else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of pages that are not free, 0 to 1", share)
    pages = GaugeMetricFamily(PREFIX + "kv_pages", "KV pages by state", labels=["state"])
    for state, count in load.pages_by_state().items():
        pages.add_metric([state], count)
    yield pages
    for name, text, count in (
        ("num_preemptions", "Requests that lost their pages to older ones", load.preemptions),
        (
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache",
            load.prefix_queries,
        ),
        ("prefix_cache_hits", "Prompt tokens whose KV the prefix cache had", load.prefix_hits),
        ("prompts_shared", "Prompts whose KV came from another attempt", load.prompts_shared),
        ("engine_steps", "Forwards", load.steps),
        ("engine_step_requests", "Sum of the requests in each forward", load.step_requests),
        ("engine_step_tokens", "Sum of the rows of each forward", load.step_tokens),
    ):
        yield _counter(name, text, count)


def _link_family(links: Sequence[Link]) -> Metric:
    family = GaugeMetricFamily(
        PREFIX + "kv_link_bytes_per_second", "Rates of links to decode workers, as measured",
        labels=["peer", "transport"],
    )  # fmt: skip
    for link in links:
        family.add_metric([link.peer, link.transport], link.bytes_per_second)
    return family


def _quarantine_families(quarantines: Sequence[Quarantine]) -> Iterator[Metric]:
    text = "Pages that a prefill worker has not released"
    pages = GaugeMetricFamily(PREFIX + "kv_quarantine_pages", text, labels=["writer"])
    age = GaugeMetricFamily(
        PREFIX + "kv_quarantine_age_seconds",
        "Time that the oldest of these pages have waited",
        labels=["writer"],
    )
    for one in quarantines:
        pages.add_metric([one.writer], one.pages)
        age.add_metric([one.writer], one.age_s)
    yield from (pages, age)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)
