"""What a router holds: its view of the fleet, its queue, its requests, and all that they need.

Held here once, and given whole to whoever serves a request. Not here: its start, its loops and its
end (`process.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final

from effuse.client.answer import Stats
from effuse.config.access import host_and_port
from effuse.config.decoding import ANSWERS
from effuse.placement.fleet import FleetView
from effuse.placement.records import Role, RouterRecord
from effuse.placement.store import Store, StoreUnavailable
from effuse.placement.writer import PlacementWriter
from effuse.protos.channels import FleetAccess
from effuse.protos.errors import EngineLost, Poisonous, Unavailable
from effuse.protos.gate import CALLER
from effuse.router.admission import Admission
from effuse.router.calls import Cleanup
from effuse.router.catalogue import Catalogue
from effuse.router.config import RouterConfig
from effuse.router.failures import Failure, RetryBudget
from effuse.router.fleet import RoutedFleet
from effuse.router.known_requests import KnownRequests
from effuse.router.metrics import MODEL, RouterMetrics
from effuse.router.monitor import Monitor
from effuse.router.other_routers import OtherRouters
from effuse.router.poison import MOST_KEPT, EngineDeath, Treatment, Verdicts
from effuse.router.policy import Condition, Prospect
from effuse.router.prefixes import SentPrefixes
from effuse.router.request import Request
from effuse.router.tenants import NOBODY, KeyRing, Quotas, Tenant
from effuse.router.tokenizer import Tokenizer
from effuse.router.validation import Asked, validate
from effuse.telemetry import logs
from effuse.telemetry.traces import Traces
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
FLUSH_S: Final = 1.0

RETRY_AFTER_S: Final = 1.0
"""When clients should ask again after no worker could answer: about as long as a lease takes to
show."""


class Router:
    """One router. `now` is a monotonic clock in seconds. `port`, `metrics_port` and `http_port`
    are known once `ready` is set. Raises OSError if it cannot use certificates or the fleet's
    secret."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        store: Store,
        *,
        now: Callable[[], float] = time.monotonic,
        traces: Traces | None = None,
    ) -> None:
        self.id = f"router-{secrets.token_hex(6)}"
        self.config = config
        self.store = store
        self.tokenizer = tokenizer
        self.now = now
        self.view = FleetView(store)
        self.placements = PlacementWriter(store)
        self.others = OtherRouters(store, self.id)
        self.fleet = RoutedFleet(
            self.view,
            config.prefill,
            now,
            seats=self.others.seats,
            access=_access(config),
            longest_call_s=config.max_request_s,
        )
        self.catalogue = Catalogue(self.fleet)
        self.metrics = RouterMetrics()
        lacking = partial(self.metrics.waiting, "worker")
        self.admission = Admission(config.max_concurrent_requests, config.max_queue, now, lacking)
        self.keys = None if config.keys is None else KeyRing(config.keys)
        self.quotas = Quotas(now)
        self.requests = KnownRequests(store, now, self.placements.unwritten_answer, self.id)
        self.cleanup = Cleanup(self.fleet)
        self.verdicts = Verdicts(now)
        self.prefixes = SentPrefixes()
        self.retry_budget = RetryBudget(
            config.retry_share, float(config.max_concurrent_requests), now()
        )
        self.num_retries = 0
        self._lacking_since: dict[str, float] = {}  # by model that requests in the queue ask for
        self.monitor = Monitor()
        self.traces = traces or Traces()
        self._add_readings()
        self.port = 0
        self.metrics_port = 0
        self.http_port = 0
        self.ready = asyncio.Event()
        most = config.max_answers
        self._answers = replace(ANSWERS, high=most, note=", this router's --max-answers")

    def count_seats(self) -> bool:
        """Brings the queue in step with the decode workers that are live now. Whether there are
        other seats than before."""
        seats: dict[str, list[int]] = {}
        for one in self.fleet.candidates():
            if one.condition is Condition.READY and one.record.role == "decode":
                seats.setdefault(one.record.model.name, []).append(one.num_seats)
        return self.admission.fit_seats(seats)

    def can_serve(self, model: str | None = None) -> bool:
        """Whether a decode worker is live that some request could be placed on, or one for `model`,
        with a prefill worker where those are required."""
        need, prospect = self.fleet.need, self.fleet.prospect
        models = [name for name in self.catalogue.live() if model in (None, name)]
        return any(prospect(need(name)) in (Prospect.NOW, Prospect.SEAT) for name in models)

    def give_up_waiting(self) -> None:
        """Refuses requests in the queue that no worker could take for `recovery_s`."""
        now, longest_s = self.now(), self.config.recovery_s
        waiting = [name for name, num in self.admission.waiting_by_model().items() if num]
        lacking = [name for name in waiting if not self.can_serve(name)]
        self._lacking_since = {name: self._lacking_since.get(name, now) for name in lacking}
        for name, since in self._lacking_since.items():
            if now - since > longest_s:
                missing = self.fleet.what_is_missing(self.fleet.need(name))
                text = f"no worker could begin within {longest_s:.3g} s: {missing}"
                error = partial(Unavailable, text, retry_after_s=RETRY_AFTER_S)
                self.admission.give_up(name, now - longest_s, error)

    def stalled_since(self, request: Request) -> float:
        """Returns since when a request that no worker can take now has waited for one."""
        now = self.now()
        if request.num_attempts:
            return now
        return max(request.arrived, self._lacking_since.get(request.asked.model.name, now))

    async def tell_others(self) -> None:
        """Tells the other routers what runs and waits here, and hears the same of them, of which
        follows what may run here."""
        port = self.port or self.config.port
        address = host_and_port(self.config.host, port) if port else ""  # not known yet
        running, waiting = self.admission.running_by_model(), self.admission.lacking_by_model()
        own = RouterRecord(
            router_id=self.id, address=address, waiting=sum(waiting.values()),
            waiting_by_model={name: n for name, n in waiting.items() if n or running[name]},
            loads=self.fleet.loads(),
        )  # fmt: skip
        await self.others.exchange(own)
        if self.count_seats():
            self.fleet.announce_change()

    async def drain(self) -> None:
        """Returns once no request runs: what is not answered within `drain_s` is told to come
        again."""
        self.monitor.is_over.set()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.requests.idle.wait()
        except TimeoutError:
            LOG.warning("ending %d requests that are still running", self.requests.num_running)
            self.requests.cut_off()
            await self.requests.idle.wait()  # its caller brings the deadline

    def resolve(self, message: pb.GenerateRequest, *, is_stream: bool, seed: int = 0) -> Asked:
        """What a client's message asks for, every setting resolved, with `seed` where it sets none;
        raises `EffuseError` with all that can be said against it."""
        tokenizer = self.tokenizer
        return validate(
            message,
            self.catalogue.find(message.model if message.HasField("model") else None),
            tokenizer.reserved_ids,
            is_stream=is_stream,
            decode_prefills=self.fleet.mode != "remote",
            takes_chats=tokenizer.has_chat_template,
            chat_end_ids=tokenizer.chat_end_ids,
            answers=self._answers,
            seed=seed,
        )

    def tenant(self) -> Tenant:
        """Whose call is being answered, and what it may have."""
        name = CALLER.get()
        if self.keys is not None:
            return self.keys.tenant(name)
        return Tenant(name) if name else NOBODY

    # What engines die of.

    def check_poison(self, request: Request) -> None:
        """Raises `Poisonous` where engines died of the very request, under whichever id."""
        if self.verdicts.is_empty:
            return
        left_s = math.ceil(self.verdicts.refused_s(request.digest))
        if not left_s:
            return
        self.metrics.poison.inc()
        why = (
            "engines died every time this request ran in them, the last one while it ran only this "
            f"request; such requests are refused for another {left_s} s"
        )
        texts = filter(None, (why, request.tell_progress()))
        labels = {**request.labels(), "refused_for_s": str(left_s)}
        raise Poisonous("; ".join(texts), labels=labels)

    def roles_alone(self, request: Request) -> Collection[Role]:
        """In which workers it is to run alone; none for most."""
        return () if self.verdicts.is_empty else self.verdicts.roles_alone(request.digest)

    def clear_poison(self, request: Request) -> None:
        """It has been answered: whatever engines died of, it was something else."""
        if not self.verdicts.is_empty:
            self.verdicts.clear(request.digest)

    def note_death(self, request: Request, failure: Failure) -> None:
        """Holds it against a request if an engine died that it ran in, and not from outside."""
        if not isinstance(failure.error, EngineLost):
            return
        worker = failure.worker
        if failure.error.is_outside:
            self.verdicts.note_outside(worker.life)
            return
        death = EngineDeath(
            worker.life,
            worker.role,
            num_tokens=len(request.token_ids),
            was_alone=worker.role in request.alone,
            may_be_outside=failure.error.may_be_outside,
        )
        treatment = self.verdicts.add_death(request.digest, death)
        if treatment is not Treatment.SHARED:
            name, digest = request.name, request.digest
            LOG.warning("engines die under request %s: %s is %s", name, digest, treatment.value)

    def note_survival(self, request: Request) -> None:
        """The request has written something: others may join one that ran alone."""
        if request.alone and self.verdicts.add_survival(request.digest, len(request.token_ids)):
            LOG.info("request %s (%s) is cleared", request.name, request.digest)
            request.alone = ()
            self.fleet.release_workers(request.holder)

    def note_end(self, request: Request, status: str, stats: pb.GenerationStats) -> None:
        """Counts a request that ended, and says so in one line."""
        cost = Stats.of(stats)
        self.metrics.count_end(request, status, cost)
        told = {"request_id": request.id, "status": status, **_figures(request, cost)}
        if status != "OK":
            told["story"] = request.tell_story()
        LOG.info("a request ended", extra=logs.figures(told))

    async def share_refusals(self) -> None:
        """Tells other routers what is refused, and hears it of them, while Redis answers."""
        try:
            told = await self.store.share_refusals(self.verdicts.refused(), MOST_KEPT)
        except StoreUnavailable as error:
            LOG.debug("the list of refused requests is not shared: %s", error)
        else:
            self.verdicts.learn(told)

    async def flush_placements(self) -> bool:
        """Waits until Redis holds every placement; False if that took longer than `FLUSH_S`."""
        return await self.placements.flush(FLUSH_S)

    def _add_readings(self) -> None:
        admission, cleanup, placements = self.admission, self.cleanup, self.placements
        for name, about, by_model in (
            ("num_requests_running", "Requests on workers", admission.running_by_model),
            ("num_requests_waiting", "Requests in the queue", admission.waiting_by_model),
        ):
            self.metrics.read_gauges(name, about, MODEL, by_model)
        for gauge, text, read in (
            ("num_requests_alone", "Requests that have workers reserved for them",
             lambda: self.fleet.num_alone),
            ("retry_budget", "Retries that need not wait",
             lambda: self.retry_budget.left(self.now())),
            ("other_routers", "Other live routers", lambda: self.others.num_alive),
            ("redis_full", "1 if Redis is full and refuses placements", lambda: placements.is_full),
        ):  # fmt: skip
            self.metrics.read_gauge(gauge, text, read)
        for counter, text, read in (
            (
                "requests_shed",
                "Requests refused because of their deadline",
                lambda: admission.num_shed,
            ),
            ("retries", "Retries after losses", lambda: self.num_retries),
            ("aborts", "Attempts ended on workers", lambda: cleanup.num_aborts),
            ("calls_ended_late", "Calls that were ended at shutdown", lambda: cleanup.num_late),
            ("placements_dropped", "Placements that were not written", lambda: placements.dropped),
            ("answers_dropped", "Answers that were not kept", lambda: placements.dropped_answers),
        ):
            self.metrics.read_counter(counter, text, read)


def _access(config: RouterConfig) -> FleetAccess:
    return FleetAccess.read(
        config.fleet_cert, config.fleet_key, config.fleet_ca, config.fleet_secret
    )


def _figures(request: Request, stats: Stats) -> dict[str, str | int | float]:
    """What one line of the log says of it at its end."""
    return {
        "model": request.asked.model.name,
        "prompt_tokens": len(request.prompt_token_ids),
        "answers": request.asked.num_answers,
        "tokens": request.num_tokens,
        "queue_s": stats.queue_s,
        "prefill_s": stats.prefill_s,
        "handoff_s": stats.handoff_s,
        "first_block_s": stats.first_block_s,
        "total_s": stats.total_s,
        "forward_passes": stats.forward_passes,
        "preemptions": stats.preemptions,
        "prefill_worker": request.prefill_worker,
        "decode_worker": request.decode_worker,
        "attempts": request.num_attempts,
    }
