"""The fleet as one process sees it: live workers, in memory, refreshed beside the requests.

Reading it costs nothing and never fails. When Redis is gone it keeps what it last knew; when a
lease runs out it drops the worker by its own clock. Choosing among workers is the router's.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from effuse.placement.records import MalformedRecord, Role, WorkerRecord, decode_worker
from effuse.placement.store import Store, StoreUnavailable

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker and how long its lease holds by our clock."""

    record: WorkerRecord
    expires_at: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one reader knows at one moment."""

    sightings: dict[str, Sighting]
    is_current: bool  # the last poll was answered; else nothing expires
    malformed: int = 0  # records ignored so far because they broke their schema
    lost_at: float = 0.0  # since when it is not current


def merge(
    before: Snapshot, answer: list[tuple[bytes, float]], asked_at: float, now: float
) -> Snapshot:
    """Returns the view after one poll; `answer` is (stored record, lease left in seconds).

    A worker that is missing from the answer stays until the lease we knew of runs out: a Redis that
    was emptied or restarted takes nobody with it. Leases stand still while Redis is gone, so that
    workers have time to come back to it. One that has released its lease goes at once.
    """
    stood_still_s = 0.0 if before.is_current else now - before.lost_at
    found: dict[str, Sighting] = {}
    malformed = before.malformed
    for value, left_s in answer:
        try:
            record = decode_worker(value)
        except MalformedRecord as error:
            malformed += 1
            LOG.warning("ignored a %s", error)
            continue
        found[record.worker_id] = Sighting(record, asked_at + left_s)
    known = {
        k: Sighting(s.record, s.expires_at + stood_still_s) for k, s in before.sightings.items()
    }
    kept = {k: s for k, s in known.items() if k not in found and s.expires_at > now}
    merged = {**kept, **found}
    alive = {k: s for k, s in merged.items() if s.record.state != "released"}
    return Snapshot(alive, True, malformed)


class FleetView:
    """Polls Redis in `run` and answers from memory."""

    def __init__(
        self, store: Store, *, poll_s: float = 0.5, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._now = now
        self._snapshot = Snapshot({}, False)
        self._polled = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """True while Redis answers."""
        return self._snapshot.is_current

    @property
    def malformed(self) -> int:
        """Records ignored so far because they broke their schema."""
        return self._snapshot.malformed

    def workers(self, role: Role | None = None) -> tuple[WorkerRecord, ...]:
        """Returns the live workers, draining ones included, in the order of their ids."""
        view, now = self._snapshot, self._now()
        return tuple(
            sighting.record
            for _, sighting in sorted(view.sightings.items())
            if (not view.is_current or sighting.expires_at > now)
            and role in (None, sighting.record.role)
        )

    def worker(self, worker_id: str) -> WorkerRecord | None:
        """Returns one live worker."""
        return next((w for w in self.workers() if w.worker_id == worker_id), None)

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_s)

    async def poll(self) -> None:
        """Refreshes the view once; keeps it where Redis does not answer."""
        asked_at = self._now()
        try:
            answer = await self._store.workers()
        except StoreUnavailable as error:
            self._keep_last_view(error, asked_at)
        else:
            if not self._snapshot.is_current:
                LOG.info("the view of the fleet is current")
            self._snapshot = merge(self._snapshot, answer, asked_at, self._now())
        self._polled.set()

    async def first_poll(self) -> None:
        """Returns once Redis was asked for the first time."""
        await self._polled.wait()

    def _keep_last_view(self, error: StoreUnavailable, asked_at: float) -> None:
        view = self._snapshot
        if view.is_current:
            LOG.warning("keeping the last known view of the fleet: %s", error)
            self._snapshot = Snapshot(view.sightings, False, view.malformed, lost_at=asked_at)
