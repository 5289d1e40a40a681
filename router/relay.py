"""A request from its turn to its end: attempts, one after the other, down the ladder of rungs.

Another prefill worker; the decode worker for itself; another pair that resumes; UNAVAILABLE. Never
a good end with missing text. Not here: one attempt (`attempt.py`), choosing (`policy.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Final

import msgspec

from effuse.placement.records import PlacedOn, PlacementRecord, PlacementState, WorkerRecord
from effuse.protos.errors import (
    Bug,
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    Unavailable,
    Unreserved,
)
from effuse.router.attempt import Attempt
from effuse.router.job import ClientGone, Job, Sink
from effuse.router.legs import LegFailed
from effuse.router.policy import Placement, WorkerLife
from effuse.router.request import Event
from effuse.router.router import Router
from effuse.v1.generation_pb2 import FinishReason

LOG: Final = logging.getLogger(__name__)
OUR_FIELDS: Final = frozenset(
    {"attempt", "incarnation", "prefill", "remote", "reservation", "resume"}
    | {"sampling", "settings", "start"}
)
"""Fields of calls to workers that no client fills in, or that are checked before a worker is asked.
A worker that does not take them is at odds with this router, and not with the client."""

RETRY_AFTER_S: Final = 1.0
"""What clients are told to wait when no worker is there: about as long as a lease takes to show."""


@dataclass(slots=True)
class Tries:
    """What a request has tried."""

    left: int
    excluded: set[WorkerLife] = field(default_factory=set)
    last: EffuseError | None = None
    is_patient: bool = False  # prefill waits for decode from now on
    record: PlacementRecord | None = None  # of the last attempt


class Relay:
    """Runs admitted requests. One per router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._fleet = router.fleet
        self._now = router.now

    async def run(self, job: Job, sink: Sink) -> FinishReason:
        """Relays `job` to its end; raises `EffuseError` or `ClientGone`."""
        tries = Tries(left=self._router.config.max_retries)
        state: PlacementState = "failed"
        try:
            while True:
                placement = self._place(job, tries)
                try:
                    reason = await self._attempt(job, placement, sink, tries)
                except LegFailed as failure:
                    self._learn(job, placement, failure, tries)
                else:
                    job.life.handle(Event.FINISHED, self._now())
                    state = "finished"
                    return reason
        except (asyncio.CancelledError, ClientGone, DeadlineExceeded):
            state = "cancelled"
            raise
        finally:
            self._close_record(tries.record, state, job.answer.num_tokens)

    async def _attempt(
        self, job: Job, placement: Placement, sink: Sink, tries: Tries
    ) -> FinishReason:
        prefill = placement.prefill.worker_id if placement.prefill else ""
        job.life.place(prefill, placement.decode.worker_id, self._now())
        job.costs.connector = ""
        transfer_id = secrets.token_hex(16)
        tries.record = self._record(job, placement, transfer_id)
        self._put(tries.record)
        with self._fleet.counted(placement, len(job.prompt_token_ids), job.max_tokens):
            attempt = Attempt(self._router, job, placement, transfer_id, sink, tries.is_patient)
            return await attempt.run()

    def _place(self, job: Job, tries: Tries) -> Placement:
        if asyncio.get_running_loop().time() >= job.deadline:
            raise DeadlineExceeded("the deadline passed before a worker was asked")
        placement = self._fleet.place(job.asked.model.name, tries.excluded)
        if placement is not None:
            return placement
        if isinstance(tries.last, Overloaded):
            raise tries.last
        why = f"no live worker serves {job.asked.model.name!r} now"
        if tries.last is not None:
            why = f"{tries.last.message}; no other worker can go on"
        elif self._fleet.mode == "remote":
            refused = self._fleet.why_refused(job.asked.model.name)
            why = refused or f"{why}, or no prefill worker fits a decode worker"
        raise Unavailable(why, retry_after_s=RETRY_AFTER_S)

    def _learn(self, job: Job, placement: Placement, failure: LegFailed, tries: Tries) -> None:
        """Makes room for another attempt, or raises what the client is told."""
        error = tries.last = failure.error
        blamed = _blamed(placement, failure)
        LOG.warning(
            "request %s, attempt %d on %s: %s; so far: %s",
            *(job.life.request_id, job.life.attempt, blamed.worker_id, error.message),
            job.life.tell(),
        )
        job.costs.earlier_forwards += job.costs.forwards
        job.costs.forwards = 0
        if isinstance(error, PeerLost):
            self._fleet.suspect(blamed)
        if asyncio.get_running_loop().time() >= job.deadline:
            raise DeadlineExceeded("the deadline passed before the answer was complete") from error
        if isinstance(error, InvalidRequest) and job.delivery.has_begun:
            # The caller's request was good; it is our resumption that the worker does not take.
            text = f"the answer could not be resumed: {error.message}"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S) from error
        if isinstance(error, InvalidRequest) and _is_ours(error):
            raise Bug(
                f"{blamed.worker_id} does not take what it is sent: {error.message}"
            ) from error
        if not error.retryable:
            raise error
        job.life.handle(Event.LOST, self._now(), error.message[:80])
        if isinstance(error, Unreserved) and not tries.is_patient:
            # Decode is busy, which is nobody's fault and no loss: next time its pages come first.
            tries.is_patient = True
            self._router.num_retries += 1
            return
        if tries.left == 0:
            text = f"gave up after {job.life.attempt} attempts: {error.message}"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S) from error
        tries.left -= 1
        self._router.num_retries += 1
        tries.excluded.add((blamed.worker_id, blamed.incarnation))

    def _record(self, job: Job, placement: Placement, transfer_id: str) -> PlacementRecord:
        return PlacementRecord(
            request_id=job.life.request_id,
            attempt=job.life.attempt,
            transfer_id=transfer_id,
            router_id=self._router.id,
            state="running",
            model=job.asked.model.name,
            decode=_placed_on(placement.decode),
            prefill=None if placement.prefill is None else _placed_on(placement.prefill),
            prompt_tokens=len(job.prompt_token_ids),
        )

    def _close_record(
        self, record: PlacementRecord | None, state: PlacementState, num_tokens: int
    ) -> None:
        if record is not None:
            ended = msgspec.structs.replace(record, state=state, num_tokens=num_tokens)
            self._put(ended)

    def _put(self, record: PlacementRecord) -> None:
        """In the order of calls, once the request has gone on its way."""
        asyncio.get_running_loop().call_soon(self._router.placements.put, record)


def _blamed(placement: Placement, failure: LegFailed) -> WorkerRecord:
    if failure.on_prefill and placement.prefill is not None:
        return placement.prefill
    return placement.decode


def _is_ours(error: InvalidRequest) -> bool:
    """Whether the router is at fault for what a worker refuses."""
    return any(v.field.split(".")[0] in OUR_FIELDS for v in error.violations)


def _placed_on(record: WorkerRecord) -> PlacedOn:
    return PlacedOn(worker_id=record.worker_id, incarnation=record.incarnation)
