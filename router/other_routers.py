"""The other routers of the fleet: which are live, their requests on workers, and this router's
seats.

Each router writes its requests in flight to Redis several times a second, under a lease. No request
waits for that: seats follow from the latest records. Not here: our requests in flight (`fleet.py`),
the owners of request ids (`shared_request.py`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from effuse.placement.records import MalformedRecord, RouterRecord, WorkerRecord, decode_router
from effuse.placement.store import StoreUnavailable

LOG: Final = logging.getLogger(__name__)

EXCHANGE_S: Final = 0.1
"""How often routers exchange their records. For so long two may both take a seat that was free."""

ALONE_S: Final = 0.5
"""How often a router that knows of no other looks for one; the other has found it by then."""

LEASE_S: Final = 3.0
"""How long a silent router counts as alive."""


class RouterStore(Protocol):
    """Where routers meet; placement.store.Store is one. All raise `StoreUnavailable`."""

    async def announce_router(self, record: RouterRecord, lease_s: float) -> list[bytes]:
        """Renews a router's lease; the others, undecoded."""

    async def release_router(self, router_id: str) -> None:
        """Ends it."""


def fair_share(seats: int, contenders: int, rank: int) -> int:
    """The seats for the contender of this rank, from 0, if all want more: together they have them
    all. At least 1, so that none starves."""
    return max(1, seats // contenders + (rank < seats % contenders))


class Contenders(NamedTuple):
    """Other routers that have requests of one model, and whether any of these wait."""

    ids: list[str]
    any_waits: bool


class OtherRouters:
    """One per router."""

    def __init__(self, store: RouterStore, router_id: str) -> None:
        self._store = store
        self._id = router_id
        self._others: dict[str, RouterRecord] = {}
        self._contenders: dict[str, Contenders] = {}  # by model
        self._taken: Counter[tuple[str, str]] = Counter()  # others' seats, by a worker's life
        self._is_current = True
        self._faults: set[str] = set()  # of records that could not be read, already logged

    @property
    def num_alive(self) -> int:
        """Other live routers, by the latest records."""
        return len(self._others)

    @property
    def pause_s(self) -> float:
        """Seconds until the next exchange."""
        return EXCHANGE_S if self._others else ALONE_S

    def address_of(self, router_id: str) -> str:
        """The address of another router for clients; empty if it is not known."""
        record = self._others.get(router_id)
        return "" if record is None else record.address

    async def exchange(self, own: RouterRecord) -> None:
        """Writes our record, and reads the others'; without Redis the latest ones stay."""
        try:
            told = await self._store.announce_router(own, LEASE_S)
        except StoreUnavailable as error:
            LOG.debug("other routers cannot be seen: %s", error)
            self._is_current = False
            return
        others, faults = {}, set[str]()
        for value in told:
            try:
                record = decode_router(value)
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
        self._add_up()

    async def release(self) -> None:
        """Ends this router's lease: other routers may take over its requests at once."""
        try:
            await self._store.release_router(self._id)
        except StoreUnavailable as error:
            LOG.warning("the router's lease was not released and will expire: %s", error)

    def seats(self, worker: WorkerRecord) -> int:
        """The number of requests that we may have on a decode worker.

        Those that others leave free, and no more than our share while one of them has requests that
        wait for the worker's model. If their records cannot be read it is our share, whatever they
        had last."""
        seats = worker.capacity.max_num_seqs
        if not self._is_current:
            return self._share(seats, self._others)
        free = max(0, seats - self._taken[worker.life])
        contenders = self._contenders_for(worker.model.name)
        return min(free, self._share(seats, contenders.ids)) if contenders.any_waits else free

    def _share(self, seats: int, others: Collection[str]) -> int:
        return fair_share(seats, len(others) + 1, sum(other < self._id for other in others))

    def _contenders_for(self, model: str) -> Contenders:
        """Found once for each exchange: every choice asks for the seats of every worker."""
        found = self._contenders.get(model)
        if found is None:
            waiting = {one.router_id: _waiting_for(model, one) for one in self._others.values()}
            ids = [router_id for router_id, number in waiting.items() if number is not None]
            found = self._contenders[model] = Contenders(ids, any(waiting.values()))
        return found

    def _add_up(self) -> None:
        self._contenders.clear()
        self._taken.clear()
        for load in (load for other in self._others.values() for load in other.loads):
            self._taken[load.worker_id, load.incarnation] += load.requests


def _waiting_for(model: str, other: RouterRecord) -> int | None:
    """Requests of another router that wait for a model's workers; None if it has none of it. A
    router that names no models may mean each."""
    if other.waiting_by_model is not None:
        return other.waiting_by_model.get(model)
    return other.waiting if other.waiting or other.loads else None
