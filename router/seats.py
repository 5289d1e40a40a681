"""The fleet's models, and the seats on its workers that this router may use.

Workers announce models. A model whose workers are gone stays known: requests for it wait for a
worker and are not refused with NOT_FOUND. Each router writes its requests in flight to Redis
several times a second, under a lease. No request waits for that: seats follow from the latest
records, and the queue keeps step with them. Not here: our requests in flight (`fleet.py`), the
owners of request ids (`shared_request.py`), the queue (`admission.py`)."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final
from zlib import crc32

from msgspec.structs import astuple, replace

from effuse.placement.records import (
    MalformedRecord,
    ModelInfo,
    RouterRecord,
    WorkerRecord,
    decode,
)
from effuse.placement.store import Store, StoreUnavailable
from effuse.protos.errors import InvalidRequest, NotFound, Unavailable
from effuse.router.admission import Admission
from effuse.router.client import RETRY_AFTER_S
from effuse.router.findings import check_model_name, shown
from effuse.router.fleet import FleetIndex, RoutedFleet
from effuse.router.planner import Workload
from effuse.router.policy import Candidate, Condition, Prospect, what_is_missing
from effuse.router.request import Request
from effuse.router.steering import Steering

LOG: Final = logging.getLogger(__name__)

EXCHANGE_S: Final = 0.1
"""How often routers exchange their records. For so long two may both take a seat that was free."""

ALONE_S: Final = 0.5
"""How often a router that knows of no other looks for one; the other has found it by then."""

LEASE_S: Final = 3.0
"""How long a silent router counts as alive."""

PATIENCE: Final = 3
"""Exchanges for which a seat has to stay free before the next router in the order may take it: the
one before it learns of the seat, takes it, and writes that it has."""


class Catalogue:
    """The models known so far."""

    def __init__(self, fleet: RoutedFleet) -> None:
        self._fleet = fleet
        self._known: dict[str, ModelInfo] = {}
        self._live: dict[str, ModelInfo] = {}
        self._of: Sequence[WorkerRecord] | None = None  # the workers that `_live` is of
        self._index: FleetIndex | None = None  # of a large fleet, that `_live` is of

    @property
    def is_empty(self) -> bool:
        return not (self._known or self.live())

    def live(self) -> dict[str, ModelInfo]:
        """Models that a worker serves or will again, by name. Decode workers describe them first,
        and of several always the same one, so that equal requests take equal defaults. The
        context is the longest one, because a request goes to a worker that can hold it."""
        if self._index is not None and self._index is self._fleet.index:
            return self._live
        known = self._fleet.records()
        if known is self._of:  # no worker is out, and the view is the same
            return self._live
        condition = self._fleet.standing.condition
        best: dict[str, WorkerRecord] = {}
        longest: dict[str, int] = {}
        for one in sorted(known, key=attrgetter("worker_id"), reverse=True):
            name, length = one.model.name, one.model.max_model_len
            longest[name] = max(length, longest.get(name, 0))
            held = best.get(name)
            if held is not None and (held.does("decode") or not one.does("decode")):
                continue
            if condition(one) is not Condition.DRAINING:
                best[name] = one
        models = {
            name: replace(one.model, max_model_len=longest[name]) for name, one in best.items()
        }
        self._known |= models
        self._live, self._of, self._index = models, known, self._fleet.index
        return models

    @property
    def longest(self) -> int:
        """Tokens of the longest context of a known model; 0 if none is known."""
        known = (*self.live().values(), *self._known.values())
        return max((one.max_model_len for one in known), default=0)

    def find(self, name: str | None, field: str = "model") -> ModelInfo:
        """The model that a request names in `field`, or the only one; raises `InvalidRequest`,
        `NotFound`, `Unavailable`."""
        models = self.live()
        if name is None:
            candidates = models or self._known
            if not candidates:
                raise Unavailable("no worker has announced a model yet", retry_after_s=1.0)
            if len(candidates) > 1:
                there = ", ".join(sorted(candidates))
                raise InvalidRequest.of("model", f"expected one of {there}, got none")
            return next(iter(candidates.values()))
        check_model_name(name, field)
        if (found := models.get(name) or self._known.get(name)) is not None:
            return found
        if not models:
            raise Unavailable(f"no worker serves {name!r} now", retry_after_s=1.0)
        there = ", ".join(sorted(models))
        message = f"model {shown(name)} does not exist; this fleet serves {there}"
        raise NotFound(message, labels={"field": field})


def fair_share(seats: int, contenders: int, rank: int) -> int:
    """The seats for the contender of this rank, from 0, if all want more: together they have them
    all. At least 1: of fewer seats each may have one, in turn (`Turns`)."""
    return max(1, seats // contenders + (rank < seats % contenders))


class Turns:
    """Whose turn it is on workers with fewer seats than routers that want them. One per router.

    Such a seat cannot be shared, so routers take turns. Each derives the same order from the
    records that all of them exchange: the one with the fewest requests of a model first, then the
    one that had none for longest. Records are late, so two may differ for a moment. Then the worker
    refuses one, or a seat waits for the next router in the order."""

    def __init__(self, router_id: str) -> None:
        self._id = router_id
        self._number = 0  # of exchanges so far
        self._running: Counter[tuple[str, str]] = Counter()  # by router and model, on such workers
        self._last_had: dict[tuple[str, str], int] = {}  # the exchange at which it had any
        self._free_for: dict[tuple[str, str], int] = {}  # exchanges in a row, by a worker's life

    def note(
        self,
        own: RouterRecord,
        others: Mapping[str, RouterRecord],
        workers: Sequence[WorkerRecord],
    ) -> None:
        """Learns what all routers had on workers at an exchange."""
        self._number += 1
        small = {one.life: one for one in workers if one.capacity.max_num_seqs <= len(others)}
        taken = Counter[tuple[str, str]]()
        self._running.clear()
        for router in (own, *others.values()) if small else ():
            for load in router.loads:
                life = load.worker_id, load.incarnation
                if (worker := small.get(life)) is not None:
                    taken[life] += load.requests
                    self._running[router.router_id, worker.model.name] += load.requests
        self._last_had |= dict.fromkeys(self._running, self._number)
        alive = {self._id, *others}
        self._last_had = {key: at for key, at in self._last_had.items() if key[0] in alive}
        self._free_for = {
            life: self._free_for.get(life, 0) + 1
            for life, one in small.items()
            if taken[life] < one.capacity.max_num_seqs
        }

    def is_ours(self, worker: WorkerRecord, waiting: Collection[str]) -> bool:
        """Whether we may take a free seat of this worker. `waiting`: other routers with requests
        that wait for its model."""
        model = worker.model.name
        own = self._place(self._id, model)
        ahead = sum(self._place(other, model) < own for other in waiting)
        return ahead == 0 or self._free_for.get(worker.life, 0) > PATIENCE * ahead

    def _place(self, router_id: str, model: str) -> tuple[int, int, str]:
        key = router_id, model
        return self._running[key], self._last_had.get(key, 0), router_id


class OtherRouters:
    """One per router."""

    def __init__(self, store: Store, router_id: str) -> None:
        self._store = store
        self._id = router_id
        self._others: dict[str, RouterRecord] = {}
        # Those that have requests of a model, and those of them with some that wait; by model.
        self._contenders: dict[str, tuple[list[str], list[str]]] = {}
        self._taken: Counter[tuple[str, str]] = Counter()  # others' seats, by a worker's life
        self._turns = Turns(router_id)
        self._is_current = True
        self._faults: set[str] = set()  # of records that could not be read, already logged

    @property
    def num_alive(self) -> int:
        return len(self._others)

    @property
    def pause_s(self) -> float:
        return EXCHANGE_S if self._others else ALONE_S

    def workloads(self, model: str) -> list[Workload]:
        found = (one.workloads.get(model) for one in self._others.values())
        return [Workload(*one) for one in found if one is not None]

    def driver_of(self, model: str) -> str:
        """The one router that changes the roles of a model's workers, of this one and of all others
        that have a plan of them: the first by id. Empty while their records cannot be read."""
        if self._others and not self._is_current:
            return ""
        return min([self._id, *(name for name, one in self._others.items() if model in one.steers)])

    def address_of(self, router_id: str) -> str:
        """The address of another router for clients; empty if it is not known."""
        record = self._others.get(router_id)
        return "" if record is None else record.address

    async def exchange(self, own: RouterRecord, workers: Sequence[WorkerRecord] = ()) -> None:
        """Writes our record, and reads the others'; without Redis the latest ones stay. `workers`:
        those whose seats they share."""
        try:
            values = await self._store.announce_router(own, LEASE_S)
        except StoreUnavailable as error:
            LOG.debug("other routers cannot be seen: %s", error)
            self._is_current = False
            return
        others, faults = {}, set[str]()
        for value in values:
            try:
                record = decode(value, RouterRecord, "router record")
            except MalformedRecord as error:
                if (fault := str(error)) not in self._faults | faults:
                    LOG.warning("ignored a %s", fault)
                faults.add(fault)
            else:
                others[record.router_id] = record
        self._faults = faults
        for router_id in sorted(others.keys() ^ self._others.keys()):
            gone = "has ended" if router_id in self._others else "also routes for this fleet"
            LOG.info("%s %s", router_id, gone)
        self._others, self._is_current = others, True
        self._contenders.clear()
        self._taken.clear()
        for load in (load for other in others.values() for load in other.loads):
            self._taken[load.worker_id, load.incarnation] += load.requests
        self._turns.note(own, others, workers)

    async def release(self) -> None:
        """Ends this router's lease: other routers may take over its requests at once."""
        try:
            await self._store.release_router(self._id)
        except StoreUnavailable as error:
            LOG.warning("the router's lease was not released and will expire: %s", error)

    def seats(self, worker: WorkerRecord) -> int:
        """The number of requests that we may have on a decode worker.

        Those that others leave free, and no more than our share while one of them has requests that
        wait for the worker's model. If there are fewer seats than routers with requests of it, it
        is none until our turn comes. If their records cannot be read it is our share, whatever they
        had last."""
        seats = worker.capacity.max_num_seqs
        if not self._is_current:
            return self._share(worker, self._others)
        if not self._others:
            return seats
        free = max(0, seats - self._taken.get(worker.life, 0))
        contenders, waiting = self._contenders_for(worker.model.name)
        if not waiting:
            return free
        if seats <= len(contenders) and not self._turns.is_ours(worker, waiting):
            return 0
        return min(free, self._share(worker, contenders))

    def _share(self, worker: WorkerRecord, others: Collection[str]) -> int:
        """Ranks turn with the worker, so that what is left over goes to a router here and to
        another one there."""
        contenders, turn = len(others) + 1, crc32(worker.worker_id.encode())
        rank = (sum(other < self._id for other in others) + turn) % contenders
        return fair_share(worker.capacity.max_num_seqs, contenders, rank)

    def _contenders_for(self, model: str) -> tuple[list[str], list[str]]:
        """Found once for each exchange: every choice asks for the seats of every worker."""
        found = self._contenders.get(model)
        if found is None:
            counts = {
                router_id: other.waiting_by_model[model]
                for router_id, other in self._others.items()
                if model in other.waiting_by_model
            }
            waiting = [router_id for router_id, count in counts.items() if count]
            found = self._contenders[model] = list(counts), waiting
        return found


class Seats:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        fleet: RoutedFleet,
        admission: Admission,
        others: OtherRouters,
        steering: Steering,
        now: Callable[[], float],
        recovery_s: float,
    ) -> None:
        """recovery_s: longest that a request waits for a worker."""
        self.others = others
        self.catalogue = Catalogue(fleet)
        self._fleet = fleet
        self._admission = admission
        self._steering = steering
        self._now = now
        self._recovery_s = recovery_s
        self._lacking_since: dict[str, float] = {}  # by model that requests in the queue ask for

    def count(self, candidates: Sequence[Candidate]) -> bool:
        """Brings the queue in step with the decode workers among these. Returns whether there are
        other seats than before."""
        seats: dict[str, list[int]] = {}
        for one in candidates:
            if one.condition is Condition.READY and one.record.does("decode"):
                seats.setdefault(one.record.model.name, []).append(one.num_seats)
        return self._admission.fit_seats(seats)

    async def exchange(self, router_id: str, address: str) -> None:
        """Announces to the other routers how many requests run and wait here, and reads the same
        of them. Both decide how many may run here. `address`: empty if it is not known yet."""
        admission = self._admission
        running, waiting = admission.running_by_model(), admission.lacking_by_model()
        own = RouterRecord(
            router_id=router_id, address=address,
            waiting_by_model={name: n for name, n in waiting.items() if n or running[name]},
            loads=self._fleet.loads(),
            workloads={name: astuple(one) for name, one in self._steering.workloads().items()},
            steers=self._steering.steered(),
        )  # fmt: skip
        had_others = self.others.num_alive
        await self.others.exchange(own, self._fleet.records())
        if (had_others or self.others.num_alive) and self.count(self._fleet.candidates()):
            self._fleet.announce_change()

    def can_serve(self, model: str | None = None) -> bool:
        """Whether a decode worker is live that can take some request, or one for `model`, with a
        prefill worker if those are required."""
        need, prospect = self._fleet.need, self._fleet.prospect
        models = [name for name in self.catalogue.live() if model in (None, name)]
        return any(prospect(need(name)) in (Prospect.NOW, Prospect.SEAT) for name in models)

    def give_up_waiting(self) -> None:
        """Refuses requests in the queue that no worker could take for `recovery_s`."""
        now = self._now()
        by_model = self._admission.waiting_by_model().items()
        waiting = [name for name, num in by_model if name and num]  # early ones end by themselves
        lacking = [name for name in waiting if not self.can_serve(name)]
        self._lacking_since = {name: self._lacking_since.get(name, now) for name in lacking}
        for name, since in self._lacking_since.items():
            if now - since > self._recovery_s:
                need = self._fleet.need(name)
                missing = what_is_missing(self._fleet.candidates(), need)
                text = f"no worker could begin within {self._recovery_s:.3g} s: {missing}"
                error = partial(Unavailable, text, retry_after_s=RETRY_AFTER_S)
                self._admission.give_up(name, now - self._recovery_s, error)

    def stalled_since(self, request: Request) -> float:
        """Returns since when a request that no worker can take now has waited for one."""
        now = self._now()
        if request.attempts.count:
            return now
        return max(request.arrived, self._lacking_since.get(request.asked.model.name, now))
