"""Writes placements and answers to Redis beside the requests, from a bounded queue that keeps the
newest of each request.

`put` never waits and never fails. If the queue is full, the oldest records are dropped and counted.
Records of running requests are renewed before they expire, so that those of a dead router
disappear.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from effuse.placement.records import PlacementRecord
from effuse.placement.store import Placing, Store, StoreFull, StoreUnavailable

LOG = logging.getLogger(__name__)


RUNNING_S: Final = 15.0
"""Without renewal, a running request's record lives this long."""
RENEW_S: Final = 5.0
FINISHED_S: Final = 300.0
"""Time to look up an ended request."""
RETRY_S: Final = 0.25
LINGER_S: Final = 0.1
"""Delay of a write: a request that ends within it is written only once."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The kept answer of a request that ended well."""

    digest: str  # digest of the request
    response: bytes
    keep_s: float


MOST_TOGETHER: Final = 64
"""Records in one round trip: a call to Redis costs a router several times as much as a record."""

MOST_PENDING_BYTES: Final = 32 << 20
"""Bytes of answers that wait to be written."""


class PlacementWriter:
    """The only writer of this process's placements."""

    def __init__(
        self,
        store: Store,
        *,
        most_pending: int = 4096,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._most_pending = most_pending
        self._now = now
        self._pending: dict[str, PlacementRecord] = {}
        self._answers: dict[str, KeptAnswer] = {}  # of pending records
        self._answer_bytes = 0
        self._renew_at: dict[str, tuple[float, PlacementRecord]] = {}
        self._writing: set[str] = set()  # ids of records under way, without those put again
        self._held: set[str] = set()  # ids that were written; the end of others is not written
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_full = False  # Redis refused writes at the last call
        self.dropped = 0  # records that were never written
        self.dropped_answers = 0
        self.refused = 0  # records for which Redis had a newer one

    def put(self, record: PlacementRecord, *, is_claimed: bool = False) -> None:
        """Writes `record` soon, in place of one that still waits for the same request.

        If this process has written a record and it belongs to another router by now, this process
        has lost the request, for example while it was stopped. Nothing more of the request is
        written.
        """
        if is_claimed:
            self._held.add(record.request_id)
        self._writing.discard(record.request_id)
        self._renew_at.pop(record.request_id, None)
        self._pending.pop(record.request_id, None)
        self._pending[record.request_id] = record
        if len(self._pending) > self._most_pending:
            oldest = next(iter(self._pending))
            if self._pending.pop(oldest).state != "running":
                self._held.discard(oldest)
            self.dropped_answers += self._take_answer(oldest) is not None
            self.dropped += 1
        self._empty.clear()
        self._wake.set()

    def keep(self, request_id: str, digest: str, response: bytes, keep_s: float) -> None:
        """Writes an answer for `keep_s`, before the record of its end, the next `put`."""
        self._take_answer(request_id)
        if self._answer_bytes + len(response) > MOST_PENDING_BYTES:
            self.dropped_answers += 1
            return
        self._answers[request_id] = KeptAnswer(digest, response, keep_s)
        self._answer_bytes += len(response)

    def unwritten_answer(self, request_id: str, digest: str) -> bytes | None:
        """An answer to the request of `digest` that is not in Redis yet."""
        kept = self._answers.get(request_id)
        return kept.response if kept is not None and kept.digest == digest else None

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            if await self._write_all():
                due = next((at for at, _ in self._renew_at.values()), None)  # the first one
                pause_s = RENEW_S if due is None else max(0.0, due - self._now())
                await self._wait_for_work(pause_s)
            else:
                await asyncio.sleep(RETRY_S)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is pending; False if that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _queue_renewals(self) -> None:
        while self._renew_at:
            request_id, (due, record) = next(iter(self._renew_at.items()))
            if due > self._now():
                return  # kept in the order of due times
            del self._renew_at[request_id]
            self._pending.setdefault(request_id, record)

    async def _write_all(self) -> bool:
        self._queue_renewals()
        while self._pending:
            records = list(islice(self._pending.values(), MOST_TOGETHER))
            self._writing = {record.request_id for record in records}
            try:
                for record in records:
                    await self._write_answer(record)
                placings = [
                    (one, RUNNING_S if one.state == "running" else FINISHED_S) for one in records
                ]
                answers = await self._store.place(placings, self._held)
            except StoreUnavailable as error:
                LOG.debug("%d placements wait: %s", len(self._pending), error)
                if isinstance(error, StoreFull) and not self.is_full:
                    LOG.warning(
                        "placements wait and may be lost, while requests and leases continue: %s",
                        error,
                    )
                    self.is_full = True
                return False
            if self.is_full:
                LOG.warning("Redis accepts placements again")
                self.is_full = False
            for record, answer in zip(records, answers, strict=True):
                self._note_answer(record, answer)
            self._queue_renewals()
        self._empty.set()
        return True

    async def _write_answer(self, record: PlacementRecord) -> None:
        """Before its record, so that no reader finds an end without its answer."""
        request_id = record.request_id
        kept = self._answers.get(request_id)
        if kept is None:
            return
        holder = record.router_id if request_id in self._held else ""
        await self._store.keep_answer(request_id, kept.digest, kept.response, kept.keep_s, holder)
        if self._answers.get(request_id) is kept:
            self._take_answer(request_id)

    def _take_answer(self, request_id: str) -> KeptAnswer | None:
        kept = self._answers.pop(request_id, None)
        if kept is not None:
            self._answer_bytes -= len(kept.response)
        return kept

    def _note_answer(self, record: PlacementRecord, answer: Placing) -> None:
        request_id, is_running = record.request_id, record.state == "running"
        if self._pending.get(request_id) is record:
            del self._pending[request_id]
        if answer == "placed" and is_running and request_id in self._writing:
            self._renew_at[request_id] = (self._now() + RENEW_S, record)
        elif answer == "foreign":
            key = self._store.keys.request(request_id)
            LOG.warning(
                "a placement is lost, because Redis has a value of another kind under %s", key
            )
        elif answer != "placed":
            LOG.warning("placement of %s is %s", request_id, answer)
        self.refused += answer != "placed"
        if is_running and answer == "placed":
            if request_id in self._pending or request_id in self._renew_at:
                self._held.add(request_id)
        elif not is_running and request_id not in self._pending:
            self._held.discard(request_id)

    async def _wait_for_work(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(LINGER_S)
        self._wake.clear()
