"""The fleet as one process sees it: live workers, in memory, refreshed beside the requests.

Reading it costs nothing and never fails. When a lease expires by the reader's own clock, the worker
is dropped, but only while the reader gets answers. After a time without Redis, or in which this
process was stopped, workers have a full period to show that they live. The router chooses among
them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from effuse.placement.lease import LeaseTimes
from effuse.placement.records import MalformedRecord, WorkerRecord, decode_worker
from effuse.placement.store import Store, StoreUnavailable

LOG = logging.getLogger(__name__)

DEAF_S: Final = 2.0
"""A reader without an answer for this long has missed polls, and judges no lease."""
GRACE_S: Final = LeaseTimes().ttl_s
"""Time for a worker to appear again after the reader missed polls."""
MOST_SHARE: Final = 0.02
MOST_PAUSE_S: Final = 1.0
"""Share of a process's time that following the fleet should take, and the longest pause for it."""
MOST_PARDONS: Final = 3
"""How often in a row it gets this time: Redis may be lost again before the worker appears."""


def pause_s(usual_s: float, used_s: float) -> float:
    """Seconds until the next look at the fleet, if the last one used `used_s` seconds of CPU. A
    large fleet is looked at less often."""
    return max(usual_s, min(MOST_PAUSE_S, used_s / MOST_SHARE))


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker, and until when its lease holds by our clock."""

    record: WorkerRecord
    expires_at: float
    pardons: int = 0  # new periods since it last appeared, because the reader missed polls


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The knowledge of one reader at one moment."""

    sightings: dict[str, Sighting]  # in the order of their ids
    is_current: bool  # the last poll was answered
    malformed: int = 0  # records ignored so far because they broke their schema
    heard_at: float = float("-inf")  # when the last answered poll was sent
    faults: frozenset[str] = frozenset()  # errors of the records ignored in its answer

    def is_deaf(self, now: float) -> bool:
        """Whether it cannot know which workers are gone: no answer of Redis, or a late poll."""
        return not self.is_current or now - self.heard_at > DEAF_S

    def alive(self, now: float) -> list[WorkerRecord]:
        """Workers whose lease holds, or all while the reader is deaf; in the order of ids."""
        is_deaf = self.is_deaf(now)
        return [s.record for s in self.sightings.values() if is_deaf or s.expires_at > now]


def merge(
    before: Snapshot, answer: list[tuple[bytes, float]], asked_at: float, now: float
) -> Snapshot:
    """Returns the view after one poll; `answer` is (stored record, lease left in seconds).

    A worker that is missing from the answer stays until its last known lease expires, so that an
    emptied or restarted Redis removes no worker. If the reader was deaf, the worker stays for at
    least `GRACE_S`: it may have been stopped too, or must return to a Redis that was lost. It gets
    this period at most `MOST_PARDONS` times in a row, so that even a reader that is always late
    sees dead workers. A worker that has released its lease leaves immediately.
    """
    found: dict[str, Sighting] = {}
    malformed, faults = before.malformed, set[str]()
    for value, left_s in answer:
        try:
            record = decode_worker(value)
        except MalformedRecord as error:
            malformed += 1
            if (fault := str(error)) not in before.faults | faults:
                LOG.warning("ignored a %s", fault)
            faults.add(fault)
            continue
        found[record.worker_id] = Sighting(record, asked_at + left_s)
    missing = {k: s for k, s in before.sightings.items() if k not in found}
    if before.is_deaf(now):
        missing = {k: _pardon(s, now) for k, s in missing.items()}
    kept = {k: s for k, s in missing.items() if s.expires_at > now}
    here = {k: s for k, s in found.items() if s.record.state != "released"}
    sightings = dict(sorted({**kept, **here}.items()))
    return Snapshot(sightings, True, malformed, asked_at, frozenset(faults))


def _pardon(sighting: Sighting, now: float) -> Sighting:
    if sighting.pardons == MOST_PARDONS:
        return sighting
    expires_at = max(sighting.expires_at, now + GRACE_S)
    return replace(sighting, expires_at=expires_at, pardons=sighting.pardons + 1)


class FleetView:
    """Polls Redis in `run`, and answers from memory."""

    def __init__(
        self, store: Store, *, poll_s: float = 0.5, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._now = now
        self._snapshot = Snapshot({}, False)
        self.polled = asyncio.Event()  # set once the first poll has ended

    @property
    def is_current(self) -> bool:
        """True while Redis answers."""
        return self._snapshot.is_current

    def workers(self) -> list[WorkerRecord]:
        """Returns the live workers, draining ones included, in the order of their ids."""
        return self._snapshot.alive(self._now())

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            used_s = await self.poll()
            await asyncio.sleep(pause_s(self._poll_s, used_s))

    async def poll(self) -> float:
        """Refreshes the view once; keeps it if Redis does not answer. Returns the seconds of CPU
        that reading the records used."""
        used_s, asked_at = 0.0, self._now()
        try:
            answer = await self._store.workers()
        except StoreUnavailable as error:
            if self._snapshot.is_current:
                LOG.warning("keeping the last known view of the fleet: %s", error)
                self._snapshot = replace(self._snapshot, is_current=False)
            elif not self.polled.is_set():
                LOG.warning("no process of the fleet is known yet: %s", error)
        else:
            if not self._snapshot.is_current:
                LOG.info("the view of the fleet is current again")
            began = time.thread_time()
            self._snapshot = merge(self._snapshot, answer, asked_at, self._now())
            used_s = time.thread_time() - began
        self.polled.set()
        return used_s
