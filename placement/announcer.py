"""Keeps a worker's lease in Redis as long as the worker lives.

Runs beside everything else; a lost Redis stops nothing here. `lease.py` makes the decisions.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from effuse.placement.lease import Lease, LeaseEvent, LeaseState, LeaseTimes, advance
from effuse.placement.records import WorkerRecord
from effuse.placement.store import Store, StoreUnavailable

LOG = logging.getLogger(__name__)


class Superseded(Exception):
    """A later process announces itself under this worker's id."""


class Announcer:
    """Announces the result of `describe`, immediately after `changed`, otherwise every
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
        self._wake = asyncio.Event()
        # A release waits for the running announcement, whose answer would undo the release.
        self._turn = asyncio.Lock()

    @property
    def state(self) -> LeaseState:
        """The state of the lease."""
        return self._lease.state

    def changed(self) -> None:
        """Announces soon, because an urgent part of the record has changed."""
        self._wake.set()

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
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
