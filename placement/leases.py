"""Leases of workers, from both ends: the worker that holds one, and each reader of all of them.

The holder's end is a table of states and events, and the next time to ask. `Announcer` keeps the
lease in Redis as long as the worker lives. A lost Redis stops nothing there.

The reader's end is the fleet in memory (`FleetView`), refreshed beside the requests. Reading it
costs nothing and never fails. When a lease expires by the reader's own clock, the worker is
dropped, but only while the reader gets answers. After a time without Redis, or in which this
process was stopped, workers have a full period to show that they live.

The tables, `advance` and `merge` are pure, with the clock as an argument. Time is in monotonic
seconds of this process; no timestamp leaves it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from msgspec import Struct, structs

from effuse.placement.records import (
    KnownLinks,
    MalformedRecord,
    StoredWorker,
    WorkerRecord,
    decode_worker,
)
from effuse.placement.store import Store, StoreUnavailable

LOG = logging.getLogger(__name__)


class LeaseState(Enum):
    ABSENT = "absent"  # not taken yet
    HELD = "held"
    SUPERSEDED = "superseded"  # a later process with this worker's id has taken it; final
    RELEASED = "released"  # released; final


class LeaseEvent(Enum):
    """The answer of Redis, or that there was none."""

    HELD = "held"  # taken or renewed
    SUPERSEDED = "superseded"
    UNREACHABLE = "unreachable"
    RELEASED = "released"


class IllegalLeaseEvent(Exception):
    """An event that cannot happen in this state."""

    def __init__(self, state: LeaseState, event: LeaseEvent) -> None:
        super().__init__(f"a lease in state {state.value} does not accept the event {event.value}")


_S, _E = LeaseState, LeaseEvent
TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.ABSENT, _E.HELD): _S.HELD,
    (_S.ABSENT, _E.UNREACHABLE): _S.ABSENT,
    (_S.ABSENT, _E.RELEASED): _S.RELEASED,
    (_S.HELD, _E.HELD): _S.HELD,
    (_S.HELD, _E.SUPERSEDED): _S.SUPERSEDED,
    (_S.HELD, _E.UNREACHABLE): _S.HELD,  # renewing late is safe: the renewal compares holders
    (_S.HELD, _E.RELEASED): _S.RELEASED,
}


TTL_S: Final = 3.0
"""A worker that is silent for this long is gone."""
RENEW_S: Final = 0.5
"""From one renewal to the next."""
RETRY_S: Final = 0.25
"""Until the next attempt after Redis did not answer."""


@dataclass(frozen=True, slots=True)
class Lease:
    state: LeaseState = LeaseState.ABSENT
    due_at: float = 0.0  # when to ask Redis again

    @property
    def is_over(self) -> bool:
        """Whether another process has the lease, or this one has released it."""
        return self.state in (LeaseState.SUPERSEDED, LeaseState.RELEASED)

    def wait_s(self, now: float) -> float:
        """Seconds until Redis is asked again; never negative."""
        return max(0.0, self.due_at - now)


def advance(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """Returns the lease after `event`; raises `IllegalLeaseEvent` that names both."""
    state = TRANSITIONS.get((lease.state, event))
    if state is None:
        raise IllegalLeaseEvent(lease.state, event)
    return Lease(state, now + (RETRY_S if event is LeaseEvent.UNREACHABLE else RENEW_S))


class Superseded(Exception):
    """A later process announces itself under this worker's id."""


class Announcer:
    """Announces the result of `describe`, immediately after `wake` is set, otherwise every
    `RENEW_S`.

    The lease belongs to the process, whichever engine's life its record describes. `holder` is the
    process's id, and ids of later processes sort after those of earlier ones. `describe` returns
    None while there is nothing to announce, because no engine was ready yet.
    """

    def __init__(
        self,
        store: Store,
        describe: Callable[[], WorkerRecord | None],
        holder: str,
        *,
        on_superseded: Callable[[], Awaitable[None]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_superseded: is awaited before `run` raises `Superseded`."""
        self._store = store
        self._describe = describe
        self._holder = holder
        self._on_superseded = on_superseded
        self._now = now
        self._lease = Lease()
        self._faults: set[str] = set()  # for which it is not announced, as far as the log shows
        self.wake = asyncio.Event()  # to announce soon, because an urgent part has changed
        # A release waits for the running announcement, whose answer would undo the release.
        self._turn = asyncio.Lock()

    @property
    def state(self) -> LeaseState:
        return self._lease.state

    async def run(self) -> None:
        """Announces until the lease is released; raises `Superseded` if a later process has it."""
        name = "this worker"
        while not self._lease.is_over:
            record = self._describe()
            if record is None:
                await self._wait_for_change(RENEW_S)
                continue
            name = record.worker_id
            async with self._turn:
                if self.state is not LeaseState.RELEASED:
                    await self._announce(record)
            await self._wait_for_change(self._lease.wait_s(self._now()))
        if self.state is LeaseState.SUPERSEDED:
            if self._on_superseded is not None:
                await self._on_superseded()
            raise Superseded(
                f"another process announces itself as {name}: give one of two workers another "
                "--worker-id, or one of two 'effuse up' another --fleet"
            )

    async def release(self) -> None:
        """Removes this worker, so that no process waits for its lease to expire."""
        async with self._turn:
            record = self._describe()
            if record is not None and self._lease.state is LeaseState.HELD:
                try:
                    await self._ask(structs.replace(record, state="released"))
                except StoreUnavailable as error:
                    LOG.warning("the lease was not released and will expire: %s", error)
            self._lease = Lease(LeaseState.RELEASED)

    async def _announce(self, record: WorkerRecord) -> None:
        before = self._lease
        try:
            event = await self._ask(record)
        except StoreUnavailable as error:
            if (fault := str(error)) not in self._faults:
                LOG.warning("%s is not announced: %s", record.worker_id, fault)
            self._faults.add(fault)
            event = LeaseEvent.UNREACHABLE
        else:
            if self._faults:
                LOG.info("%s is announced", record.worker_id)
            self._faults.clear()
        self._lease = advance(before, event, self._now())
        if self._lease.state is not before.state:
            LOG.info("lease of %s is %s", record.worker_id, self._lease.state.value)

    async def _ask(self, record: WorkerRecord) -> LeaseEvent:
        takes = self.state is LeaseState.ABSENT
        return LeaseEvent(await self._store.announce(record, TTL_S, self._holder, takes=takes))

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            return
        self.wake.clear()


STALE_S: Final = 2.0
"""A reader without an answer for this long has missed polls, and judges no lease."""
GRACE_S: Final = TTL_S
"""Time for a worker to appear again after the reader missed polls."""
ALL_S: Final = 30.0
"""How often a reader of news reads all workers anyway."""
MOST_SHARE: Final = 0.01
MOST_PAUSE_S: Final = 1.0
"""Share of a process's time that following the fleet should take, and the longest pause for it."""
MOST_PARDONS: Final = 3
"""How often in a row it gets this time: Redis may be lost again before the worker appears."""


def pause_s(usual_s: float, used_s: float) -> float:
    """Seconds until the next look at the fleet, if the last one used `used_s` seconds of CPU. A
    large fleet is looked at less often."""
    return max(usual_s, min(MOST_PAUSE_S, used_s / MOST_SHARE))


class Sighting(Struct, frozen=True):
    """A worker, and until when its lease holds by our clock."""

    record: WorkerRecord
    expires_at: float
    pardons: int = 0  # new periods since it last appeared, because the reader missed polls


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The knowledge of one reader at one moment."""

    sightings: dict[str, Sighting]  # in the order of their ids
    is_current: bool  # the last poll was answered
    polled_at: float = float("-inf")  # when the last answered poll was sent
    faults: frozenset[str] = frozenset()  # errors of the records ignored in its answer
    links: KnownLinks | None = None  # of its answer

    def is_stale(self, now: float) -> bool:
        """Whether it cannot know which workers are gone: no answer of Redis, or a late poll."""
        return not self.is_current or now - self.polled_at > STALE_S

    def alive(self, now: float) -> list[WorkerRecord]:
        """Workers whose lease holds, or all while the view is stale; in the order of ids."""
        is_stale = self.is_stale(now)
        return [s.record for s in self.sightings.values() if is_stale or s.expires_at > now]


def merge(
    before: Snapshot,
    answer: Sequence[tuple[bytes | StoredWorker, float]],
    asked_at: float,
    now: float,
) -> Snapshot:
    """Returns the view after one poll; `answer` is (stored record, lease left in seconds).

    A worker that is missing from the answer stays until its last known lease expires, so that an
    emptied or restarted Redis removes no worker. If the view was stale, the worker stays for at
    least `GRACE_S`: it may have been stopped too, or must return to a Redis that was lost. It gets
    this period at most `MOST_PARDONS` times in a row, so that even a reader that is always late
    sees dead workers. A worker that has released its lease leaves immediately.
    """
    found: dict[str, Sighting] = {}
    faults = set[str]()
    links = {}  # of this answer only, because each rehearsal changes them
    for value, left_s in answer:
        try:
            record = decode_worker(value, before.links)
        except MalformedRecord as error:
            if (fault := str(error)) not in before.faults | faults:
                LOG.warning("ignored a %s", fault)
            faults.add(fault)
            continue
        found[record.worker_id] = Sighting(record, asked_at + left_s)
        links[getattr(value, "links", b"")] = record.links
    missing = {k: s for k, s in before.sightings.items() if k not in found}
    if before.is_stale(now):
        missing = {k: _pardon(s, now) for k, s in missing.items()}
    kept = {k: s for k, s in missing.items() if s.expires_at > now}
    here = {k: s for k, s in found.items() if s.record.state != "released"}
    sightings = dict(sorted((kept | here).items()))
    return Snapshot(sightings, True, asked_at, frozenset(faults), links)


def _pardon(sighting: Sighting, now: float) -> Sighting:
    if sighting.pardons == MOST_PARDONS:
        return sighting
    expires_at = max(sighting.expires_at, now + GRACE_S)
    return structs.replace(sighting, expires_at=expires_at, pardons=sighting.pardons + 1)


class FleetView:
    """Polls Redis in `run`, and answers from memory."""

    def __init__(
        self,
        store: Store,
        *,
        poll_s: float = 0.5,
        only_news: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """only_news: it reads workers again only if one has come, gone, or changed more than its
        load, and leaves out loads and links. So a poll of an unchanged fleet costs the same for any
        number of workers. Routers see expired leases and add these to the news."""
        self._only_news = only_news
        self._news = b""
        self._read_at = float("-inf")  # when it last read all workers anyway
        # The workers alive, of which sightings, whether the view was stale, until when it is so.
        self._alive: tuple[list[WorkerRecord], object, bool, float] = ([], None, False, 0.0)
        self._store = store
        self._poll_s = poll_s
        self._now = now
        self._snapshot = Snapshot({}, False)
        self._faults: set[str] = set()  # of polls since the last one that was answered
        self.polled = asyncio.Event()  # set once the first poll has ended

    @property
    def is_current(self) -> bool:
        return self._snapshot.is_current

    def workers(self) -> list[WorkerRecord]:
        """Returns the live workers, draining ones included, in the order of their ids."""
        now, seen = self._now(), self._snapshot.sightings
        is_stale = self._snapshot.is_stale(now)
        _, of, was_stale, until = self._alive
        if of is not seen or was_stale is not is_stale or now >= until:
            until = min(
                (s.expires_at for s in seen.values() if s.expires_at > now), default=math.inf
            )
            self._alive = self._snapshot.alive(now), seen, is_stale, until
        return self._alive[0]

    async def look(self, worker_id: str) -> WorkerRecord | None:
        """A worker's record with its load now; None if there is none, or no answer."""
        try:
            value = await self._store.worker(worker_id)
            return None if value is None else decode_worker(value)
        except (StoreUnavailable, MalformedRecord) as error:
            LOG.debug("%s cannot be looked up: %s", worker_id, error)
            return None

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            used_s = await self.poll()
            await asyncio.sleep(pause_s(self._poll_s, used_s))

    async def _read_news(self, asked_at: float) -> list[tuple[StoredWorker, float]] | None:
        """All workers until the next news, or None. Missing ones are gone, or have a lease to
        appear again if Redis has lost its workers."""
        reads_all = asked_at - self._read_at > ALL_S
        before = self._news
        self._news, answer = await self._store.changes(b"" if reads_all else before)
        if answer is None:
            return None
        self._read_at = asked_at
        has_lost = self._news.split(b" ")[0] != before.split(b" ")[0]
        until = self._now() + GRACE_S if has_lost else asked_at
        ends = {
            k: structs.replace(s, expires_at=until) if s.expires_at == math.inf else s
            for k, s in self._snapshot.sightings.items()
        }  # one that has a lease to appear again keeps it
        self._snapshot = replace(self._snapshot, sightings=ends)
        return [(value, math.inf) for value, _ in answer]

    async def poll(self) -> float:
        """Refreshes the view once; keeps it if Redis does not answer. Returns the seconds of CPU
        that reading the records used."""
        used_s, asked_at = 0.0, self._now()
        try:
            answer = await (self._read_news(asked_at) if self._only_news else self._store.workers())
        except StoreUnavailable as error:
            if (fault := str(error)) in self._faults:
                pass
            elif self._snapshot.polled_at > -math.inf:
                LOG.warning("keeping the last known view of the fleet: %s", fault)
            else:
                LOG.warning("no process of the fleet is known yet: %s", fault)
            self._faults.add(fault)
            if self._snapshot.is_current:
                self._snapshot = replace(self._snapshot, is_current=False)
        else:
            self._faults.clear()
            if not self._snapshot.is_current:
                LOG.info("the view of the fleet is current again")
            began = time.thread_time()
            if answer is None:
                self._snapshot = replace(self._snapshot, is_current=True, polled_at=asked_at)
            else:
                self._snapshot = merge(self._snapshot, answer, asked_at, self._now())
                if self._only_news:
                    seen = self._snapshot.sightings.items()
                    facts = {k: structs.replace(s, record=s.record.facts) for k, s in seen}
                    self._snapshot = replace(self._snapshot, sightings=facts)
            used_s = time.thread_time() - began
        self.polled.set()
        return used_s
