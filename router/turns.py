"""Whose turn it is on workers with fewer seats than routers that want them.

Such a seat cannot be shared, so routers take turns. Each derives the same order from the records
that all of them exchange. Records are late, so two may differ about it for a moment: then one is
refused by the worker, or a seat waits for the next one in the order. Not here: the shares of larger
workers (`seats.py`)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from effuse.placement.records import RouterRecord, WorkerRecord

PATIENCE: Final = 3
"""Exchanges for which a seat has to stay free before the next router in the order may take it: the
one before it learns of the seat, takes it, and tells so."""


class Turns:
    """One per router. Whoever has fewest requests of a model goes first, then whoever has had one
    last the longest ago."""

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
