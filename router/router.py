"""A router, put together: each part is made once, and given only the others that it uses.

Not here: its start, its loops and its end (`process.py`).
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from effuse.config.access import host_and_port
from effuse.placement.leases import FleetView
from effuse.placement.store import Store
from effuse.placement.writer import PlacementWriter
from effuse.protos.channels import FleetAccess
from effuse.router.admission import Admission
from effuse.router.calls import Cleanup, Peers
from effuse.router.config import RouterConfig
from effuse.router.failures import RetryBudget
from effuse.router.fleet import RoutedFleet
from effuse.router.metrics import MODEL, Monitor, RouterMetrics
from effuse.router.poison import PoisonGuard, Verdicts
from effuse.router.prefixes import SharedPrefixes
from effuse.router.seats import OtherRouters, Seats
from effuse.router.shared_request import KnownRequests, Sharing
from effuse.router.steering import Steering
from effuse.router.tenants import KeyRing, Quotas
from effuse.router.tokenizer import Tokenizer
from effuse.telemetry.traces import Traces

LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Ports:
    """The ports that a router listens on, known once `ready` is set; 0 for none."""

    address: str  # for clients; empty until the port is known
    grpc: int = 0
    metrics: int = 0
    http: int = 0
    facts: dict[str, str] = field(default_factory=dict)  # addresses for the ready file, by name
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """The parts of one router, which serve all requests. `now` is a monotonic clock in seconds.
    Raises OSError if it cannot use certificates or the fleet's secret."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        store: Store,
        *,
        now: Callable[[], float] = time.monotonic,
        traces: Traces | None = None,
    ) -> None:
        self.config, self.tokenizer, self.now = config, tokenizer, now
        self.id = f"router-{secrets.token_hex(6)}"
        self.ports = Ports(host_and_port(config.host, config.port) if config.port else "")
        self.keys = None if config.keys is None else KeyRing(config.keys)
        self.quotas = Quotas(now)
        self.metrics = RouterMetrics()
        self.monitor = Monitor()
        self.traces = traces or Traces()
        self.placements = PlacementWriter(store)
        access = FleetAccess.read(
            config.fleet_cert, config.fleet_key, config.fleet_ca, config.fleet_secret
        )
        peers = Peers(now, access, config.max_request_s)
        others = OtherRouters(store, self.id)
        self.fleet = RoutedFleet(
            FleetView(store),
            config.prefill,
            now,
            by_pool=config.kv_mode == "pool",
            seats=others.seats,
            peers=peers,
        )
        self.prefixes = SharedPrefixes(store, self.id, self.fleet.prompts, now)
        self.cleanup = Cleanup(peers)
        lacking = partial(self.metrics.waiting, "worker")
        self.admission = Admission(config.max_concurrent_requests, config.max_queue, now, lacking)
        self.steering = Steering(
            config.objectives, config.prefill, now, others.workloads, carries_out=config.steering
        )
        self.seats = Seats(
            self.fleet, self.admission, others, self.steering, now, config.recovery_s
        )
        sharing = Sharing(
            router_id=self.id,
            store=store,
            placements=self.placements,
            address_of=others.address_of,
            keep_answers_s=config.keep_answers_s,
        )
        self.requests = KnownRequests(sharing, now)
        self.poison = PoisonGuard(Verdicts(now), self.fleet, self.metrics, store)
        self.budget = RetryBudget(config.retry_share, float(config.max_concurrent_requests), now())
        self._read_metrics()

    async def drain(self) -> None:
        """Returns once no request runs. Requests that are not answered within `drain_s` end with an
        error that asks their clients to retry."""
        self.monitor.is_over.set()
        # Once no request runs, connections over HTTP may still bring one.
        asyncio.get_running_loop().call_later(self.config.drain_s, self.requests.cut_off)
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.requests.idle.wait()
        except TimeoutError:
            LOG.warning("ending %d requests that are still running", self.requests.num_running)
            self.requests.cut_off()
            await self.requests.idle.wait()  # its caller brings the deadline

    def _read_metrics(self) -> None:
        admission, cleanup, placements = self.admission, self.cleanup, self.placements
        fleet, gauge, counter = self.fleet, self.metrics.read_gauge, self.metrics.read_counter
        by_model = self.metrics.read_gauges
        by_model("num_requests_running", "Requests on workers", MODEL, admission.running_by_model)
        by_model("num_requests_waiting", "Requests in the queue", MODEL, admission.waiting_by_model)
        text = "Requests that have a worker to themselves"
        gauge("num_requests_alone", text, lambda: fleet.num_alone)
        text = "Retries allowed without a wait"
        gauge("retry_budget", text, lambda: self.budget.left(self.now()))
        gauge("other_routers", "Other live routers", lambda: self.seats.others.num_alive)
        text = "Prompt units expected in prefix caches"
        gauge("prefix_index_units", text, lambda: len(fleet.prompts))
        text = "1 if Redis is full and refuses placements"
        gauge("redis_full", text, lambda: placements.is_full)
        text = "Requests refused because of their deadline"
        counter("requests_shed", text, lambda: admission.num_shed)
        counter("retries", "Retries after losses", lambda: self.budget.num_taken)
        counter("aborts", "Attempts ended on workers", lambda: cleanup.num_aborts)
        text = "Calls to workers cut off because they did not end in time"
        counter("calls_ended_late", text, lambda: cleanup.num_late)
        text = "Placements that were not written"
        counter("placements_dropped", text, lambda: placements.dropped)
        text = "Prompts mostly missing from caches expected to have them"
        counter("prefix_claims_refuted", text, lambda: fleet.prompts.num_refuted)
        text = "Failed exchanges of known prefixes through Redis"
        counter("prefix_index_failures", text, lambda: self.prefixes.num_failures)
        text = "Answers that were not stored"
        counter("answers_dropped", text, lambda: placements.dropped_answers)
