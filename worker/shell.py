"""Shared parts of a front's servicers: admission, the end of an attempt, the worker's identity, and
its metrics.

Speaks no gRPC itself: it takes checked messages and raises the errors of `protos/errors.py`.
Routers use the worker's load instead of its metrics.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import (
    Kind,
    Link,
    Load,
    Quarantine,
    Role,
    WorkerRecord,
    WorkerState,
)
from effuse.placement.waste import Waste, waste_of
from effuse.protos.channels import OPEN, FleetAccess
from effuse.protos.errors import Draining, EffuseError, Replaced, Starting
from effuse.telemetry.metrics import PREFIX, TOKENS_PER_FORWARD, ProcessMetrics, gauges
from effuse.telemetry.traces import Carrier, Traces
from effuse.worker import peer
from effuse.worker.attempts import Attempts, Duty, OpenAttempt, Quarantines
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import Abort, AbortDone, StartDecode, StartPrefill, ToEngine
from effuse.worker.supervisor import EngineLife, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReadings:
    """State of a worker at one moment."""

    role: Role
    model_name: str  # empty before the first engine is ready
    load: Load
    restarts: int  # of the engine, so far
    tasks: int  # of the front's event loop
    page_size: int = 1  # tokens
    page_bytes: int = 0
    max_model_len: int = 0  # tokens
    links: Sequence[Link] = ()
    quarantines: Sequence[Quarantine] = ()


_COUNTED: Final = (
    ("num_preemptions", "Requests preempted for older ones", "preemptions"),
    ("prefix_cache_queries", "Tokens that were looked up in the prefix cache", "prefix_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache", "prefix_hits"),
    ("prefix_cache_evictions", "Units evicted from the prefix cache", "prefix_evictions"),
    ("kv_offload_saved_bytes", "KV bytes copied from pages to host memory", "offload_saved"),
    ("kv_offload_loaded_bytes", "KV bytes copied from host memory to pages", "offload_loaded"),
    ("kv_offload_filed_bytes", "KV bytes written to files", "offload_file_kept"),
    ("kv_offload_read_bytes", "KV bytes read from files", "offload_file_read"),
    ("kv_offload_corrupt", "Units that came back with a wrong digest", "offload_corrupt"),
    ("kv_offload_file_failures", "Errors and timeouts of files", "offload_file_failures"),
    ("kv_pool_kept_bytes", "KV bytes written to the shared pool", "offload_pool_kept"),
    ("kv_pool_read_bytes", "KV bytes read from the shared pool", "offload_pool_read"),
    ("kv_pool_failures", "Errors and timeouts of the shared pool", "offload_pool_failures"),
    ("kv_held_bytes", "KV bytes not received, because the prefix cache had them", "kv_bytes_held"),
    ("prompts_shared", "Prompts whose KV came from another attempt", "prompts_shared"),
    ("own_prompt_tokens", "Prompt tokens that a decode worker computed", "prompt_tokens"),
    (
        "own_prompts_overdue",
        "Forwards with overdue prompt pieces, despite no room beside answers",
        "prompts_overdue",
    ),
    ("engine_steps", "Forwards", "steps"),
    ("engine_step_requests", "Sum of the requests in each forward", "step_requests"),
    ("engine_step_tokens", "Sum of the rows of each forward", "step_tokens"),
    (
        "engine_steps_sharing",
        "Forwards in which requests read a common prefix together",
        "steps_sharing",
    ),
)
"""Counters of a load, with their texts and its fields."""


class WorkerMetrics(ProcessMetrics):
    """Counts from the start of the front on; `read` returns the other values at a scrape."""

    def __init__(self, read: Callable[[], WorkerReadings]) -> None:
        super().__init__(lambda: {"role": (now := read()).role, "model_name": now.model_name})
        self._readings = read
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of attempts begun here")
        self.generation_tokens = self.counter("generation_tokens", "Tokens written")
        self.succeeded = self.counter(
            "request_success", "Attempts that succeeded, by outcome", "finished_reason"
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
        self.handoff.labels(transport).observe(seconds)
        self.kv_bytes.labels(transport).inc(num_bytes)

    def families(self) -> Iterator[Metric]:
        """Counters first, then the values that are read."""
        yield from super().families()
        now = self._readings()
        load, used = now.load, now.load.total_pages - now.load.free_pages
        for name, text, value in (
            ("num_requests_running", "Attempts that hold pages", load.running),
            ("num_requests_waiting", "Attempts that wait for pages", load.waiting),
            (
                "kv_cache_usage_perc",
                "Share of pages that are not free, 0 to 1",
                used / max(1, load.total_pages),
            ),
            ("prefix_cache_pages", "Pages that the prefix cache holds", load.prefix_pages),
            ("prefix_cache_units", "Units that the prefix cache holds", load.prefix_units),
            ("kv_offload_pages", "Pages of host memory that hold KV", load.offload_pages),
            ("kv_offload_file_bytes", "Bytes of files with KV", load.offload_file_bytes),
            ("kv_pool_usable", "1 if the shared pool takes units", bool(load.offload_pool)),
            ("front_tasks", "Tasks of the front's event loop", now.tasks),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        restarts = ("engine_restarts", "Engines that were replaced", now.restarts)
        text = "KV bytes neither computed nor received, because the prefix cache had them"
        reused = ("kv_reused_bytes", text, load.prefix_hits * now.page_bytes // now.page_size)
        counted = ((name, text, getattr(load, field)) for name, text, field in _COUNTED)
        for name, text, value in (*counted, reused, restarts):
            yield CounterMetricFamily(PREFIX + name, text, value)
        yield from _waste(waste_of(load, now.page_size, now.max_model_len))
        pages = (([state], count) for state, count in load.pages_by_state().items())
        yield gauges("kv_pages", "KV pages by state", ["state"], pages)
        rates = (([one.peer, one.transport], one.bytes_per_second) for one in now.links)
        text = "Measured rates of links to decode workers"
        yield gauges("kv_link_bytes_per_second", text, ["peer", "transport"], rates)
        held = (([one.writer], one.pages) for one in now.quarantines)
        text = "Pages in quarantine until a prefill worker releases them"
        yield gauges("kv_quarantine_pages", text, ["writer"], held)
        ages = (([one.writer], one.age_s) for one in now.quarantines)
        text = "Age of the oldest page in quarantine"
        yield gauges("kv_quarantine_age_seconds", text, ["writer"], ages)


def _waste(waste: Waste) -> Iterator[Metric]:
    """Pages without tokens, and beside them the buffers of a server without pages."""
    shares = (([kind], getattr(waste, kind)) for kind in ("reserved", "internal", "external"))
    text = "Share of the pool that is allocated but empty, by cause"
    yield gauges("kv_waste_ratio", text, ["cause"], shares)
    shares = (([kind], getattr(waste, kind)) for kind in ("paged", "contiguous"))
    text = "Empty share of requests' KV memory, in pages or in buffers of max-model-len tokens"
    yield gauges("kv_unused_ratio", text, ["allocation"], shares)


LOG = logging.getLogger(__name__)

_ABORT_WARN_S = 30.0
_STARTING_RETRY_S = 1.0
AndThen = Callable[[], Awaitable[None]]
_KINDS: Mapping[type, Kind] = {StartPrefill: "prefill", StartDecode: "decode"}


class Shell:
    """One worker's front, without its sockets."""

    def __init__(
        self,
        duty: Duty,
        config: WorkerConfig,
        attempts: Attempts,
        supervisor: Supervisor,
        tasks: asyncio.TaskGroup,
        access: FleetAccess = OPEN,
    ) -> None:
        self.duty = duty
        self.access = access
        self.worker_id = ""  # known once the port is, like the next one
        self.address = ""  # host:port for other processes
        self.config = config
        self.attempts = attempts
        self.supervisor = supervisor
        self.metrics = WorkerMetrics(self._readings)
        self.traces = Traces.to(config.otlp_traces_endpoint, duty.role)
        self.is_draining = False
        # Of a prefill worker, in the form of placement.records.WorkerRecord; links by the engine's
        # life for which they were measured.
        self.links: Mapping[str, tuple[Link, ...]] = {}
        self.min_handoff_gbps = 0.0
        self.warms_links = False
        # Of a prefill worker: called with the life that got a prompt, its bytes and their seconds.
        self.saw_handoff: Callable[[str, int, float], None] = lambda life, num_bytes, seconds: None
        self.place = peer.here()
        self.quarantines = Quarantines()
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._spawned: set[asyncio.Task[None]] = set()

    @property
    def incarnation(self) -> str:
        """Id of the engine's life; empty while none is ready."""
        life = self.supervisor.life
        return "" if life is None else life.incarnation

    def where(self) -> str:
        return self.address

    def admit(self, incarnation: str, kind: Kind | None = None) -> EngineLife:
        """Returns the engine for a new attempt of this kind; raises the reason for a refusal.

        `incarnation` is the life that the caller means.
        """
        if self.is_draining:
            raise Draining("this worker is draining", retry_after_s=_STARTING_RETRY_S)
        life = self.supervisor.life
        if life is None:
            raise Starting(
                "this worker's engine is still starting", retry_after_s=_STARTING_RETRY_S
            )
        if incarnation != life.incarnation:
            raise Replaced(
                f"this is incarnation {life.incarnation} of {self.worker_id}, but the "
                f"request is for {incarnation!r}"
            )
        self.duty.check(kind)
        return life

    def begin(self, attempt_id: AttemptId, incarnation: str, start: ToEngine) -> OpenAttempt:
        """Admits an attempt and starts it; the caller must call `end` later."""
        kind = _KINDS.get(type(start))
        life = self.admit(incarnation, kind)
        attempt = self.attempts.open(attempt_id, life.incarnation, kind)
        life.client.send(start)
        return attempt

    def send(self, attempt: OpenAttempt, message: ToEngine) -> None:
        self.supervisor.send(message, attempt.incarnation)

    def time_left(self, remaining_s: float | None) -> float:
        """Returns the time limit of a call, given its client's; None is no limit."""
        most = self.config.max_request_s
        return most if remaining_s is None else min(remaining_s, most)

    def span(self, name: str, metadata: Carrier | None) -> AbstractContextManager[object]:
        """The work of this worker for a call, within the call's span."""
        attributes = {"effuse.worker": self.worker_id}
        return self.traces.span(name, metadata or (), attributes)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs work that must happen although its caller may be gone."""
        task = self._tasks.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def abandon(self) -> None:
        """Abandons spawned work: the process ends, and its memory with it."""
        for task in self._spawned:
            task.cancel()

    def leave(self, attempt: OpenAttempt, and_then: AndThen | None = None) -> None:
        """Ends an attempt whose stream ended before it did, although no caller waits for it."""
        if not attempt.ended.is_set():
            self.spawn(self._end(attempt, and_then))

    async def _end(self, attempt: OpenAttempt, and_then: AndThen | None) -> None:
        try:
            await self._end_in_engine(attempt)
            if and_then is not None:
                await and_then()
        finally:
            self.attempts.close(attempt)

    async def _end_in_engine(self, attempt: OpenAttempt) -> None:
        """Returns once the engine has released the attempt, or is dead.

        It may take long while a transfer is in flight. The supervisor replaces an engine that never
        answers, so this ends in any case.
        """
        self.send(attempt, Abort(attempt=attempt.id))
        while not attempt.engine_ended:
            try:
                async with asyncio.timeout(_ABORT_WARN_S):
                    event = await attempt.next_event()
            except TimeoutError:
                LOG.warning("the engine has not released %s yet", attempt.id)
            except EffuseError as error:  # its caller already has the error
                LOG.debug("an error while ending %s: %s", attempt.id, error)
            else:
                if isinstance(event, AbortDone):
                    return

    def record(self) -> WorkerRecord | None:
        """Returns this worker's announcement; None before its first engine is ready."""
        life = self.supervisor.last_life
        if life is None:
            return None
        is_over = self.supervisor.life is None
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.duty.role,
            may_change_role=self.duty.may_change,
            role_is_pinned=self.duty.is_pinned,
            role_age_s=self.duty.age_s(time.monotonic()),
            num_leaving=len(self.attempts.leaving(self.duty)),
            address=self.address,
            incarnation=life.incarnation,
            engine_port=life.ready.engine_port,
            place=self.place,
            connector=life.ready.connector,
            state=self._state(),
            fingerprint=life.ready.fingerprint,
            model=life.ready.model,
            capacity=life.capacity,
            load=Load() if is_over else life.load,
            links=() if is_over else self.links.get(life.incarnation, ()),
            min_handoff_gbps=self.min_handoff_gbps,
            warms_links=self.warms_links,
            quarantines=self.quarantines.listed(),
        )

    def _state(self) -> WorkerState:
        if self.is_draining:
            return "draining"
        return "starting" if self.supervisor.life is None else "ready"

    def _readings(self) -> WorkerReadings:
        """The current state; called from another thread than the event loop's."""
        life, last = self.supervisor.life, self.supervisor.last_life
        ready = None if last is None else last.ready
        return WorkerReadings(
            role=self.duty.role,
            model_name="" if ready is None else ready.model.name,
            page_size=1 if ready is None else ready.page_size,
            page_bytes=0 if ready is None else ready.page_bytes,
            max_model_len=0 if ready is None else ready.model.max_model_len,
            load=Load() if life is None else life.load,
            restarts=self.supervisor.restarts,
            tasks=len(asyncio.all_tasks(self._loop)),
            links=self.links.get("" if life is None else life.incarnation, ()),
            quarantines=self.quarantines.listed(),
        )
