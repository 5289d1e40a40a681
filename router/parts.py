"""The parts of a router that serve requests. `router.py` makes each of them once."""

from __future__ import annotations

from collections.abc import Callable

from effuse.router.admission import Admission
from effuse.router.calls import Cleanup
from effuse.router.config import RouterConfig
from effuse.router.failures import RetryBudget
from effuse.router.fleet import RoutedFleet
from effuse.router.known_requests import KnownRequests
from effuse.router.metrics import RouterMetrics
from effuse.router.monitor import Monitor
from effuse.router.poison import PoisonGuard
from effuse.router.seats import Catalogue, Seats
from effuse.router.tenants import KeyRing, Quotas
from effuse.router.tokenizer import Tokenizer
from effuse.telemetry.traces import Traces


class Parts:
    """Only `Router` implements it. `now` is a monotonic clock in seconds."""

    config: RouterConfig
    now: Callable[[], float]
    tokenizer: Tokenizer
    metrics: RouterMetrics
    monitor: Monitor
    traces: Traces
    fleet: RoutedFleet
    cleanup: Cleanup
    catalogue: Catalogue
    admission: Admission
    seats: Seats
    requests: KnownRequests
    poison: PoisonGuard
    budget: RetryBudget
    keys: KeyRing | None  # None: any client may send requests
    quotas: Quotas
