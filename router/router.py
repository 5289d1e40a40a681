"""What a router holds: its view of the fleet, its queue, its requests, and all that they need.

Held here once, and given whole to whoever serves a request. Not here: its start, its loops and its
end (`process.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Final

from effuse.placement.fleet import FleetView
from effuse.placement.store import Store
from effuse.placement.writer import PlacementWriter
from effuse.router.admission import Admission
from effuse.router.catalogue import Catalogue
from effuse.router.cleanup import Cleanup
from effuse.router.config import RouterConfig
from effuse.router.fleet import RoutedFleet
from effuse.router.known_requests import KnownRequests
from effuse.router.ladder import RetryBudget
from effuse.router.metrics import Metrics
from effuse.router.policy import live_workers
from effuse.router.tokenizer import Tokenizer

FLUSH_S: Final = 1.0


class Router:
    """One router. `now` is a monotonic clock in seconds. `port` and `metrics_port` are known once
    `ready` is set."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        store: Store,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = f"router-{secrets.token_hex(6)}"
        self.config = config
        self.tokenizer = tokenizer
        self.now = now
        self.view = FleetView(store)
        self.placements = PlacementWriter(store)
        self.fleet = RoutedFleet(self.view, config.prefill, now)
        self.catalogue = Catalogue(self.fleet)
        self.admission = Admission(config.max_concurrent_requests, config.max_queue)
        self.requests = KnownRequests(store, now)
        self.cleanup = Cleanup(self.fleet)
        self.retry_budget = RetryBudget(
            config.retry_share, float(config.max_concurrent_requests), now()
        )
        self.num_retries = 0
        self.metrics = Metrics()
        self._add_gauges()
        self.port = 0
        self.metrics_port = 0
        self.ready = asyncio.Event()

    def count_seats(self) -> None:
        """Brings the queue in step with the decode workers that are live now."""
        _, decode = live_workers(self.fleet.candidates())
        self.admission.fit_seats(decode)

    async def flush_placements(self) -> bool:
        """Waits until Redis holds every placement; False if that took longer than `FLUSH_S`."""
        return await self.placements.flush(FLUSH_S)

    def _add_gauges(self) -> None:
        gauge, admission, cleanup = self.metrics.gauge, self.admission, self.cleanup
        gauge("num_requests_running", "Requests on workers", lambda: admission.num_running)
        gauge("num_requests_waiting", "Requests in the queue", lambda: admission.num_waiting)
        gauge("retries", "Attempts after losses, so far", lambda: self.num_retries)
        gauge(
            "retry_budget", "Attempts after losses that need not wait",
            lambda: self.retry_budget.left(self.now()),
        )  # fmt: skip
        gauge("aborts", "Attempts ended on workers, so far", lambda: cleanup.num_aborts)
        gauge("calls_ended_late", "Calls cut off at their end, so far", lambda: cleanup.num_late)
        gauge("placements_dropped", "Placements never written", lambda: self.placements.dropped)
        gauge("redis_full", "Redis refuses placements for memory", lambda: self.placements.is_full)
