"""Every metric of the processes, from idle processes."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from router.fake_model import byte_tokenizer
from router.fakes import FakeStore

from effuse.placement.records import Load
from effuse.router.config import RouterConfig
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer
from effuse.telemetry.metrics import ProcessMetrics
from effuse.worker.shell import WorkerMetrics, WorkerReadings


def worker_metrics() -> ProcessMetrics:
    return WorkerMetrics(
        lambda: WorkerReadings(role="decode", model_name="tiny", load=Load(), restarts=0, tasks=0)
    )


def router_metrics() -> ProcessMetrics:
    return Router(RouterConfig(), Tokenizer(byte_tokenizer()), FakeStore()).metrics


def scraped_name(family: Metric) -> str:
    """As documents name it: a counter with its `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def sample_names(family: Metric) -> set[str]:
    """As queries name its samples."""
    if family.type == "histogram":
        return {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}
    return {scraped_name(family)}
