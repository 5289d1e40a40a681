"""A worker's lease as its holder sees it: a table of states and events, and the next time to ask.
`Announcer` keeps it in Redis as long as the worker lives.

The table and `advance` are pure, with the clock as an argument. Time is in monotonic seconds of
this process; no timestamp leaves it. The announcer runs beside everything else; a lost Redis stops
nothing here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from effuse.placement.records import WorkerRecord
from effuse.placement.store import Store, StoreUnavailable

LOG = logging.getLogger(__name__)


class LeaseState(Enum):
    """The state of the lease."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Durations of a lease, in seconds."""

    ttl_s: float = 3.0  # a worker that is silent for this long is gone
    renew_s: float = 0.5  # from one renewal to the next
    retry_s: float = 0.25  # until the next attempt after Redis did not answer

    def __post_init__(self) -> None:
        if not 0 < self.retry_s <= self.renew_s < self.ttl_s:
            raise ValueError(
                f"expected 0 < retry_s <= renew_s < ttl_s, got {self.retry_s:g}, "
                f"{self.renew_s:g}, {self.ttl_s:g}"
            )


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease at one moment."""

    times: LeaseTimes
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
    times = lease.times
    pause_s = times.retry_s if event is LeaseEvent.UNREACHABLE else times.renew_s
    return Lease(times, state, now + pause_s)


class Superseded(Exception):
    """A later process announces itself under this worker's id."""


class Announcer:
    """Announces the result of `describe`, immediately after `wake` is set, otherwise every
    `times.renew_s`.

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
        times: LeaseTimes | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._describe = describe
        self._holder = holder
        self._now = now
        self._lease = Lease(times or LeaseTimes())
        self._is_heard = True  # as far as the log shows
        self.wake = asyncio.Event()  # to announce soon, because an urgent part has changed
        # A release waits for the running announcement, whose answer would undo the release.
        self._turn = asyncio.Lock()

    @property
    def state(self) -> LeaseState:
        return self._lease.state

    async def run(self) -> None:
        """Announces until the lease is released; raises `Superseded` if a later process has it."""
        while not self._lease.is_over:
            record = self._describe()
            if record is None:
                await self._wait_for_change(self._lease.times.renew_s)
                continue
            async with self._turn:
                if self.state is not LeaseState.RELEASED:
                    await self._announce(record)
            await self._wait_for_change(self._lease.wait_s(self._now()))
        if self.state is LeaseState.SUPERSEDED:
            raise Superseded("another process announces itself under this worker's id")

    async def release(self) -> None:
        """Removes this worker, so that no process waits for its lease to expire."""
        async with self._turn:
            record = self._describe()
            if record is not None and self._lease.state is LeaseState.HELD:
                try:
                    await self._ask(msgspec.structs.replace(record, state="released"))
                except StoreUnavailable as error:
                    LOG.warning("the lease was not released and will expire: %s", error)
            self._lease = Lease(self._lease.times, LeaseState.RELEASED)

    async def _announce(self, record: WorkerRecord) -> None:
        before = self._lease
        try:
            event = await self._ask(record)
        except StoreUnavailable as error:
            if self._is_heard:
                LOG.warning("%s is not announced: %s", record.worker_id, error)
            self._is_heard = False
            event = LeaseEvent.UNREACHABLE
        else:
            if not self._is_heard:
                LOG.info("%s is announced", record.worker_id)
            self._is_heard = True
        self._lease = advance(before, event, self._now())
        if self._lease.state is not before.state:
            LOG.info("lease of %s is %s", record.worker_id, self._lease.state.value)

    async def _ask(self, record: WorkerRecord) -> LeaseEvent:
        takes, ttl_s = self.state is LeaseState.ABSENT, self._lease.times.ttl_s
        return LeaseEvent(await self._store.announce(record, ttl_s, self._holder, takes=takes))

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            return
        self.wake.clear()
