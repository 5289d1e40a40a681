"""The metrics of a router, and the blocks in flight for people who watch. Gauges are read when
scraped and cost requests nothing, and so does watching without watchers. With watchers, decode
workers are asked for drafts of new requests. Not here: the metrics of workers."""

import asyncio
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, product
from typing import Final, get_args

from prometheus_client import Counter

from effuse.client.answer import Stats
from effuse.placement.records import Role
from effuse.protos.errors import EffuseError, Overloaded
from effuse.router.failures import REFUSALS, Failure, FailureKind
from effuse.router.measures import KeptShares
from effuse.router.policy import Candidate, Condition
from effuse.router.prefixes import KnownPrefix
from effuse.router.request import Request
from effuse.router.steering import ModelPlan
from effuse.router.tenants import QUOTA
from effuse.telemetry.metrics import TOKENS_PER_FORWARD, ProcessMetrics
from effuse.v1 import worker_pb2
from effuse.v1.monitor_pb2 import RunningBlock

MODEL = "model_name"
BY_CLIENTS: Final = ("CANCELLED", "ABORTED", "INVALID_ARGUMENT", "ALREADY_EXISTS")
"""Statuses of requests that ended before anything could be kept, and by no fault of the fleet."""
_SECONDS: Final = {
    "request_queue_time": "From arrival to placement on workers",
    "time_to_first_block": "From arrival to the first committed block",
    "inter_block_latency": "From one commit of an answer to the next",
    "e2e_request_latency": "From arrival to the end of a request",
}
"""Histograms of times, by model."""
MOST_WATCHERS: Final = 16
MOST_SERIES: Final = 4096
"""Series of workers and the reasons of their failures."""


class RouterMetrics(ProcessMetrics):
    """One per router. Metrics of requests have the model as a label."""

    def __init__(self) -> None:
        super().__init__(lambda: {"role": "router"})
        self.requests = self.counter(
            "requests", "Requests by the status they ended with", MODEL, "status"
        )
        self.refused = self.counter(
            "refused", "Requests refused before they began", "status", "quota"
        )
        self.http = self.counter("http_responses", "Responses of the HTTP API", "route", "status")
        self.poison = self.counter("refused_poison", "Requests refused because they killed engines")
        self.repeated = self.counter("answers_repeated", "Requests answered with a stored answer")
        self.tenants = self.counter(
            "tenant_requests",
            "Requests of tenants, by status",
            "tenant",
            "status",
        )
        self.tenant_tokens = self.counter(
            "tenant_tokens", "Tokens of tenants' prompts and answers", "tenant"
        )
        self.prompt_tokens = self.counter(
            "prompt_tokens", "Prompt tokens of answered requests", MODEL
        )
        self.known_tokens = self.counter(
            "prefix_known_tokens", "Prompt tokens expected in prefix caches, by source", "source"
        )
        self.generation_tokens = self.counter("generation_tokens", "Tokens generated", MODEL)
        self.within = self.counter(
            "requests_within_objectives",
            "Requests with an objective, and whether they met it",
            *(MODEL, "class", "objective", "met"),
        )
        self.kept_shares = KeptShares()
        self.losses = self.counter("worker_losses", "Attempts lost, by worker", "worker", "reason")
        self.refusals = self.counter(
            "worker_refusals", "Attempts refused, by worker", "worker", "reason"
        )
        # Of both, those that were counted last behind the others.
        self._series: OrderedDict[tuple[Counter, str, str], None] = OrderedDict()
        self.workers = self.gauge("workers", "Workers by role and state", "worker_role", "state")
        self.plans = PlanMetrics(self)
        self.stalled = self.gauge(
            "num_requests_stalled", "Requests that wait for a worker, by reason", "reason"
        )
        self.seconds = {
            name: self.histogram(f"{name}_seconds", about, MODEL)
            for name, about in _SECONDS.items()
        }
        self.tokens_per_forward = self.histogram(
            "tokens_per_forward", "Tokens of an answer divided by its forwards", MODEL,
            bounds=TOKENS_PER_FORWARD,
        )  # fmt: skip

    def count_end(self, request: Request, status: str, stats: Stats) -> None:
        model = request.asked.model.name
        self.seconds["e2e_request_latency"].labels(model).observe(stats.total_s)
        self.requests.labels(model, status).inc()
        if tenant := request.tenant.name:
            self.tenants.labels(tenant, status).inc()
            num_tokens = len(request.prompt.token_ids) + request.num_written
            self.tenant_tokens.labels(tenant).inc(num_tokens)
        if request.kept_prompt_tokens is not None:
            self.repeated.inc(status == "OK")
            return
        if status == "OK":
            self._count_answer(request, stats)
        if status not in BY_CLIENTS:
            self._count_kept(request, status, stats)

    def _count_kept(self, request: Request, status: str, stats: Stats) -> None:
        """Counts each objective of a request; one that failed has kept none."""
        asked, kept = request.asked, request.asked.goals.missed()
        if status == "OK":
            gaps = (gap for one in request.parts for gap in one.costs.block_gaps())
            kept = asked.goals.kept(stats.first_block_s, gaps)
        labels = asked.model.name, asked.sent.request_class
        for name, is_kept in (
            ("first_block", kept.first_block),
            ("gap", kept.gap),
            ("all", kept.all),
        ):
            if is_kept is not None:
                self.within.labels(*labels, name, str(is_kept).lower()).inc()
        if kept.all is not None:
            self.kept_shares.note(*labels, is_kept=kept.all)

    def count_known(self, claim: KnownPrefix) -> None:
        """An attempt began at a worker that should have this of its prompt."""
        self.known_tokens.labels("own").inc(claim.own)
        self.known_tokens.labels("shared").inc(claim.shared)

    def count_refusal(self, tenant: str, error: EffuseError) -> None:
        """A request was refused before anything was held; `tenant` is empty without keys."""
        status = error.code.name
        self.refused.labels(status, str(QUOTA in error.labels).lower()).inc()
        if tenant:
            self.tenants.labels(tenant, status).inc()

    def _count_answer(self, request: Request, stats: Stats) -> None:
        model = request.asked.model.name
        self.prompt_tokens.labels(model).inc(len(request.prompt.token_ids))
        self.generation_tokens.labels(model).inc(request.num_tokens)
        self.seconds["request_queue_time"].labels(model).observe(stats.queue_s)
        self.seconds["time_to_first_block"].labels(model).observe(stats.first_block_s)
        between = self.seconds["inter_block_latency"].labels(model)
        for one in request.parts:
            for seconds in one.costs.block_gaps():
                between.observe(seconds)
        if stats.forward_passes:
            self.tokens_per_forward.labels(model).observe(stats.tokens_per_forward)

    def count_failure(self, failure: Failure) -> None:
        """An attempt that failed, if another one may follow. Workers are replaced under other
        names for as long as this router lives, so beyond `MOST_SERIES` the one that was counted
        longest ago goes."""
        if failure.outcome is FailureKind.FINAL:
            return
        counter = self.refusals if failure.outcome in REFUSALS else self.losses
        series = counter, failure.worker.worker_id, failure.error.reason
        counter.labels(*series[1:]).inc()
        self._series[series] = None
        self._series.move_to_end(series)
        if len(self._series) > MOST_SERIES:
            (counter, *labels), _ = self._series.popitem(last=False)
            counter.remove(*labels)

    def show_workers(self, candidates: Sequence[Candidate]) -> None:
        counts = Counts((c.record.role, c.condition) for c in candidates)
        for role, condition in product(get_args(Role), Condition):
            self.workers.labels(role, condition.value).set(counts[role, condition])

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """A request waits: for a worker to come back, a seat, the retry budget, or a worker without
        other requests."""
        with self.stalled.labels(reason).track_inprogress():
            yield


class PlanMetrics:
    """The plans, and the changes of roles that carry them out."""

    def __init__(self, metrics: ProcessMetrics) -> None:
        role = "worker_role"
        self._planned = metrics.gauge(
            "planned_workers", "Best roles of the present workers", MODEL, role
        )
        self._desired = metrics.gauge(
            "desired_workers", "Workers that the load needs, for a scaler", MODEL, role
        )
        self._share = metrics.gauge(
            "planned_prompt_share", "Share of prompts that decode workers should compute", MODEL
        )
        self.changes = metrics.counter(
            "role_changes", "Changes of roles that this router asked for", MODEL, "to", "result"
        )
        self._shown: set[str] = set()

    def show(self, plans: Mapping[str, ModelPlan]) -> None:
        for model in self._shown - plans.keys():
            for gauge, role in product((self._planned, self._desired), get_args(Role)):
                with suppress(KeyError):
                    gauge.remove(model, role)
            with suppress(KeyError):
                self._share.remove(model)
        self._shown = set(plans)
        for model, one in plans.items():
            for gauge, held in ((self._planned, one.roles.plan), (self._desired, one.desired.plan)):
                for role, number in zip(get_args(Role), held.roles if held else (), strict=False):
                    gauge.labels(model, role).set(number)
            if one.roles.plan is not None:
                self._share.labels(model).set(one.roles.plan.share)


class Monitor:
    """The number of watchers, and the drafts for them. One per router."""

    def __init__(self) -> None:
        self.num_watchers = 0
        self.num_tokens = 0
        """Tokens of answers that became final so far."""
        self.num_first_blocks = 0
        """Answers that got their first final block so far."""
        self.first_block_s = 0.0
        """Seconds from arrival to that block, added up over these answers."""
        self.is_over = asyncio.Event()
        """Set once the router drains."""
        self._drafts: dict[str, dict[int, worker_pb2.BlockState]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a watcher; raises `Overloaded` if there are enough."""
        if self.num_watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} watch already", retry_after_s=1.0)
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1

    def note_commit(self, request: Request, before: int) -> None:
        """A request has more final tokens than `before`, and 0 are before its first block."""
        tokens = len(request.answer.token_ids) - before
        self.num_tokens += tokens
        if tokens and not before:
            self.num_first_blocks += 1
            self.first_block_s += request.costs.commit_times[0] - request.arrived

    def note_draft(self, request: Request, draft: worker_pb2.DecodeDraft) -> None:
        if self.num_watchers:
            self._drafts.setdefault(request.name, {})[draft.token_offset] = draft.block

    def keep_drafts_of(self, requests: list[Request]) -> None:
        names = {request.name for request in requests}
        self._drafts = {name: drafts for name, drafts in self._drafts.items() if name in names}

    def blocks(self, request: Request) -> list[RunningBlock]:
        """Its blocks in flight, as far as they are known: those of the last commit, and drafts."""
        size, first = request.asked.model.block_size, len(request.answer.token_ids)
        offsets = accumulate([size] * len(request.answer.frontier), initial=first)
        known = dict(zip(offsets, request.answer.frontier, strict=False))
        for offset, block in self._drafts.get(request.name, {}).items():
            earlier = known.get(offset)
            if offset + size > first and (
                earlier is None or block.denoise_count >= earlier.denoise_count
            ):
                known[offset] = block
        return [
            RunningBlock(token_offset=at, num_tokens=len(one.token_ids), masks=one.masks)
            for at, one in sorted(known.items())
        ]
