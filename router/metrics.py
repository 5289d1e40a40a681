"""What a router counts, as Prometheus text on a port of its own. Names follow vLLM's suffixes.

Gauges are read when scraped and cost requests nothing. Not here: what workers report themselves.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from effuse.placement.records import Role
from effuse.router.ladder import REFUSALS, Failure, FailureKind
from effuse.router.policy import Candidate, Condition
from effuse.v1 import generation_pb2 as pb

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry per router; nothing is global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "effuse_requests", "Requests by the status they ended with", ["status"],
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            "effuse_refused", "Requests refused at the door", ["status"], registry=self.registry
        )
        self.poison = Counter(
            "effuse_refused_poison", "Requests refused since engines died of them",
            registry=self.registry,
        )  # fmt: skip
        self.repeated = Counter(
            "effuse_answers_repeated", "Answers given that were kept from before",
            registry=self.registry,
        )  # fmt: skip
        self.losses = Counter(
            "effuse_worker_losses", "Attempts lost, by worker", ["worker", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self.refusals = Counter(
            "effuse_worker_refusals", "Attempts that were not begun, by worker",
            ["worker", "reason"], registry=self.registry,
        )  # fmt: skip
        self.workers = Gauge(
            "effuse_workers", "Workers by what they do and how they are", ["role", "state"],
            registry=self.registry,
        )  # fmt: skip
        self.stalled = Gauge(
            "effuse_num_requests_stalled", "Admitted requests that wait for a worker, by why",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.tenants = Counter(
            "effuse_tenant_requests", "Requests of clients with keys, by how they ended",
            ["tenant", "status"], registry=self.registry,
        )  # fmt: skip
        self.tenant_tokens = Counter(
            "effuse_tenant_tokens", "Tokens of their prompts and answers", ["tenant"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "effuse_prompt_tokens", "Prompt tokens of answered requests", registry=self.registry
        )
        self.generation_tokens = Counter(
            "effuse_generation_tokens", "Tokens generated", registry=self.registry
        )
        self.first_block = self._histogram(
            "effuse_time_to_first_block_seconds", "Arrival to first committed block"
        )
        self.latency = self._histogram(
            "effuse_e2e_request_latency_seconds", "Arrival to the end of a request"
        )

    def count_end(self, tenant: str, status: str) -> None:
        """A request has ended; `tenant` is empty where clients have no keys."""
        self.requests.labels(status).inc()
        if tenant:
            self.tenants.labels(tenant, status).inc()

    def count_refusal(self, tenant: str, status: str) -> None:
        """A request was refused before anything was held for it."""
        self.refused.labels(status).inc()
        if tenant:
            self.tenants.labels(tenant, status).inc()

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """Tokens of a request that has ended, well or not."""
        if tenant:
            self.tenant_tokens.labels(tenant).inc(num_tokens)

    def count_answer(self, usage: pb.Usage, stats: pb.GenerationStats, tenant: str = "") -> None:
        """A request that ended well."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.first_block.observe(stats.first_block_s)
        self.latency.observe(stats.total_s)
        self.count_end(tenant, "OK")

    def count_repeated(self, tenant: str = "") -> None:
        """A request that was answered with what was kept."""
        self.repeated.inc()
        self.count_end(tenant, "OK")

    def count_failure(self, failure: Failure) -> None:
        """An attempt that failed, where another one may follow."""
        if failure.outcome is not FailureKind.FINAL:
            counter = self.refusals if failure.outcome in REFUSALS else self.losses
            counter.labels(failure.worker.worker_id, failure.error.reason).inc()

    def show_workers(self, candidates: Sequence[Candidate]) -> None:
        """How the workers are now."""
        counts = Counts((c.record.role, c.condition) for c in candidates)
        for role, condition in product(get_args(Role), Condition):
            self.workers.labels(role, condition.value).set(counts[role, condition])

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """A request waits: for a worker to come back, a seat, the retry budget, a worker alone."""
        with self.stalled.labels(reason).track_inprogress():
            yield

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a value that `read` gives at the time of a scrape."""
        Gauge(f"effuse_{name}", text, registry=self.registry).set_function(read)

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serves the text at `host`; port 0 takes a free one. Gives the port."""
        server, thread = start_http_server(port, host, self.registry)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5.0)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)
