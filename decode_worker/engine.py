"""The decode engine: KV pages in, committed tokens out. One `step` is one iteration.

Owns the loop and the messages; what a block does is `denoise.py`, who takes part is `scheduler.py`,
how pages arrive is kvtransfer's receiver, and the forward is the model runner's. Single-threaded.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from effuse.decode_worker import denoise, scheduler
from effuse.decode_worker.boundary import Boundary, BoundaryError
from effuse.decode_worker.counters import Counters
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.outbox import Outbox
from effuse.decode_worker.parts import candidates_of, denoise_part, prefill_part
from effuse.decode_worker.request import Request
from effuse.decode_worker.scratch import Scratch
from effuse.decode_worker.seats import Seats
from effuse.decode_worker.sequence import RequestError
from effuse.kvtransfer.connector import Arrived
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver
from effuse.kvtransfer.tombstones import Tombstones
from effuse.models.part import Part, PartResult
from effuse.placement.records import Load
from effuse.worker import messages
from effuse.worker.messages import CoreEvent, FailureCode, StartDecode, ToEngine

LOG = logging.getLogger(__name__)

_KEEP_ABORTED_S = 600.0
_MOST_FAILED_FORWARDS = 8  # in a row; then the device is taken for lost and the process ends


class Forward(Protocol):
    """The part of the model runner that the engine uses."""

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results in the order of the parts."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step: a denoise step, or without a plan a chunk of prefill."""

    request: Request
    part: Part
    plan: StepPlan | None


class DecodeEngine:
    """An EngineCore. Emits `Reserved` at admission, `Verified` once the prompt's KV is complete,
    then `Committed` (and `Draft`) until `Finished` or `Failed`."""

    def __init__(
        self,
        forward: Forward,
        pool: PagePool,
        intake: Intake,
        handoffs: HandoffReceiver,
        boundary: Boundary,
        *,
        now: Callable[[], float],
        max_request_s: float,
    ) -> None:
        self.counters = Counters()
        self._forward = forward
        self._pool = pool
        self._intake = intake
        self._limits = intake.limits
        self._handoffs = handoffs
        self._boundary = boundary
        self._now = now
        self._max_request_s = max_request_s
        self._seats = Seats()
        self._aborted = Tombstones(_KEEP_ABORTED_S)
        self._outbox = Outbox()
        self._scratch = Scratch(pool, handoffs, self._outbox)
        self._arrivals = 0
        self._failed_forwards = 0
        self._is_stalled = False  # the last step could move nobody

    def step(self) -> bool:
        """Hears of arrivals, admits, runs one forward, and says what it changed."""
        has_moved = self._hear() | self._admit()
        work = self._take_work()
        if not work:
            return has_moved
        for item, result in zip(work, self._run(work), strict=False):
            self._apply(item, result)
        return True

    def is_working(self) -> bool:
        """False: a step has ended when it returns."""
        return False

    def handle(self, message: ToEngine) -> None:
        """Takes one message of the front."""
        match message:
            case StartDecode():
                self._start(message)
            case messages.StartRehearsal():
                is_busy = bool(self._seats.waiting)
                self._scratch.reserve(message, is_busy=is_busy, now=self._now())
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.WriterGone(transfer_id=transfer_id, has_drained=has_drained):
                failed = self._handoffs.writer_gone(transfer_id, has_drained=has_drained)
                if failed is not None and not self._scratch.take(failed):
                    self._fail_missed(failed)
            case messages.StartPrefill(attempt=attempt):
                self._refuse(attempt, "INVALID_ARGUMENT", "this is a decode worker")
            case (
                messages.PushTo(reservation=reservation)
                | messages.PushRehearsal(reservation=reservation)
            ):
                self._refuse(reservation.attempt, "INVALID_ARGUMENT", "this is a decode worker")
            case messages.Shutdown():
                pass  # the process's matter

    def outbox(self) -> Sequence[CoreEvent]:
        """What is to be said since the last call, in order."""
        return self._outbox.drain()

    def load(self) -> Load:
        """What the engine has and does now."""
        seats = self._seats
        requests = seats.by_transfer.values()
        return Load(
            running=seats.num_holding,
            waiting=len(seats.waiting),
            runnable=0 if self._is_stalled else len(seats.running),
            total_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(r.num_to_prefill for r in requests if not r.needs_remote),
            blocks_left=sum(request.sequence.num_blocks_left for request in requests),
            steps=self.counters.steps,
            preemptions=self.counters.preemptions,
            kv_bytes=self.counters.kv_bytes,
        )

    def audit(self) -> None:
        """Checks that every page is free, some request's, or a gone one's. Raises AuditError."""
        held = [page for request in self._seats.by_transfer.values() for page in request.pages]
        self._pool.audit([*held, *self._scratch.pages(), *self._handoffs.quarantined()])

    def close(self) -> None:
        """Stops the connector."""
        self._handoffs.close()

    # What comes in.

    def _start(self, message: StartDecode) -> None:
        attempt = message.attempt
        if attempt.transfer_id in self._aborted:
            self._refuse(attempt, "ABORTED", "the attempt was aborted before it began")
        elif attempt.transfer_id in self._seats.by_transfer:
            self._refuse(attempt, "ALREADY_EXISTS", "the attempt is running")
        elif message.writer is not None and not self._handoffs.can_receive:
            self._refuse(attempt, "FAILED_PRECONDITION", "no connector: only local prefill")
        else:
            self._join(message)

    def _join(self, message: StartDecode) -> None:
        try:
            request = self._intake.make_request(message, arrival=self._arrivals, now=self._now())
        except RequestError as error:
            self._refuse(message.attempt, "INVALID_ARGUMENT", str(error))
            return
        self._arrivals += 1
        self._seats.join(request)
        self._is_stalled = False

    def _abort(self, attempt: AttemptId) -> None:
        self._aborted.add(attempt.transfer_id, self._now())
        request = self._seats.by_transfer.get(attempt.transfer_id)
        if request is not None:
            self._end(request)
        was_running = self._scratch.abort(attempt.transfer_id) or request is not None
        self._outbox.abort_done(attempt, was_running=was_running)

    def _hear(self) -> bool:
        """Takes in what the connector and the clock have brought. True if there was anything."""
        now = self._now()
        news = self._handoffs.poll(now)
        for item in news:
            if self._scratch.take(item):
                continue
            if isinstance(item, Arrived):
                self._begin_remote(item)
            else:
                self._fail_missed(item)
        late = [r for r in self._seats.by_transfer.values() if self._is_late(r, now)]
        for request in late:
            if request.attempt.transfer_id not in self._seats.by_transfer:
                continue  # giving up another one has shown that this one had ended
            message = f"the attempt ran longer than {self._max_request_s:g} s"
            self._fail(request, "DEADLINE_EXCEEDED", message)
        return bool(news or late)

    def _is_late(self, request: Request, now: float) -> bool:
        return now - request.arrived_s > self._max_request_s

    def _begin_remote(self, arrived: Arrived) -> None:
        request, manifest = self._seats.by_transfer[arrived.transfer_id], arrived.manifest
        self._seats.run(request)
        self.counters.kv_bytes += manifest.num_bytes
        try:
            request.boundary = self._boundary.accept(manifest.boundary, request.sequence)
        except BoundaryError as error:
            self._fail(request, "DATA_LOSS", str(error), retryable=True)
            return
        request.sequence.store(request.sequence.first_block_start)
        request.is_verified = True
        self._outbox.verified(
            request.attempt, manifest.num_bytes, len(request.pages), arrived.seconds
        )

    # One step.

    def _admit(self) -> bool:
        """Gives the oldest waiting requests their pages, as many as there is room for."""
        waiting = self._seats.waiting
        if not waiting:
            return False
        growth = 0
        for request in self._seats.running:
            demand = request.demand(self._limits)
            growth += max(0, demand.pages_wanted - demand.pages_held)
        count = scheduler.admit(
            (request.pages_to_begin(self._limits) for request in waiting),
            num_holding=self._seats.num_holding,
            num_free=self._pool.num_free,
            growth=growth,
            limits=self._limits,
        )
        for request in waiting[:count]:
            self._seat(request)
        return count > 0

    def _seat(self, request: Request) -> None:
        count = request.pages_to_begin(self._limits)
        is_new = request.preemptions == 0
        if is_new:
            self.counters.begin(request.sequence)
        if request.needs_remote:
            pages = self._pool.allocate(count)
            assert pages is not None, "admission counts free pages"
            request.pages = list(pages)
            self._seats.receive(request)
            self._outbox.reserved(
                self._handoffs.reserve(request.attempt, pages, request.writer, self._now())
            )
            return
        self._take_pages(request, count)
        self._seats.run(request)
        if is_new:
            self._outbox.reserved(self._handoffs.local(request.attempt))
        self._note_prefilled(request)

    def _take_pages(self, request: Request, count: int) -> None:
        pages = self._pool.allocate_committed(count)
        assert pages is not None, "the scheduler counts free pages"
        request.pages.extend(pages)

    def _take_work(self) -> list[Work]:
        """Asks the scheduler who takes part, preempts, and lays out the parts of the forward."""
        running = list(self._seats.running)
        demands = [request.demand(self._limits) for request in running]
        schedule = scheduler.schedule(demands, num_free=self._pool.num_free, limits=self._limits)
        for index in schedule.preempted:
            self._preempt(running[index])
        work = []
        for request, demand, rows in zip(running, demands, schedule.rows, strict=True):
            if rows:
                self._take_pages(request, max(0, demand.pages_wanted - demand.pages_held))
                work.append(work_of(request, rows))
        self._is_stalled = not work
        return work

    def _preempt(self, request: Request) -> None:
        self._pool.release(request.pages)
        request.preempt()
        self._seats.preempt(request)
        self.counters.preemptions += 1

    def _run(self, work: Sequence[Work]) -> list[PartResult]:
        """One forward; where it fails, only what was in it fails, and the engine goes on."""
        self.counters.steps += 1
        self.counters.rows += sum(len(item.part.token_ids) for item in work)
        try:
            results = self._forward.run([item.part for item in work])
        except Exception:
            LOG.exception("a forward over %d requests failed", len(work))
            self._failed_forwards += 1
            if self._failed_forwards >= _MOST_FAILED_FORWARDS:
                raise
            for item in work:
                self._fail(
                    item.request, "INTERNAL", "the model failed in this step", retryable=True
                )
            return []
        self._failed_forwards = 0
        return results

    def _apply(self, item: Work, result: PartResult) -> None:
        request = item.request
        if result.boundary is not None:
            request.boundary = result.boundary
        if item.plan is None:
            request.sequence.store(item.part.num_stored)
            self._note_prefilled(request)
            return
        candidates = candidates_of(result)
        if not candidates.is_finite():
            self._fail(request, "INTERNAL", "the model gave no finite probabilities")
            return
        outcome = denoise.apply_step(request.sequence, request.settings, item.plan, candidates)
        request.plan = None
        request.forward_passes += 1
        self.counters.observe(outcome)
        if outcome.finish is not None:
            self._end(request)
        self._outbox.progress(request, outcome)

    def _note_prefilled(self, request: Request) -> None:
        """Says once that a locally prefilled prompt is complete."""
        sequence = request.sequence
        if not request.is_verified and sequence.committed_len >= sequence.first_block_start:
            request.is_verified = True
            self._outbox.verified(request.attempt, 0, 0, 0.0)

    # How it ends.

    def _fail_missed(self, missed: HandoffFailed) -> None:
        request = self._seats.by_transfer[missed.transfer_id]
        self._end(request)
        self._outbox.missed(request.attempt, missed)

    def _fail(
        self, request: Request, code: FailureCode, message: str, *, retryable: bool = False
    ) -> None:
        self._end(request)
        self._outbox.failed(request.attempt, code, message, retryable=retryable)

    def _refuse(self, attempt: AttemptId, code: FailureCode, message: str) -> None:
        self._outbox.failed(attempt, code, message, retryable=False)

    def _end(self, request: Request) -> None:
        """Nothing of the request is left; pages that a writer may reach are quarantined."""
        if self._handoffs.is_open(request.attempt.transfer_id):
            self._handoffs.abort(request.attempt.transfer_id)
            request.pages.clear()
        self._pool.release(request.pages)
        request.pages.clear()
        self._seats.leave(request)


def work_of(request: Request, rows: int) -> Work:
    """A chunk of `rows` of what precedes its blocks, or else its denoise step."""
    if request.num_to_prefill:
        return Work(request, prefill_part(request, rows), None)
    plan = request.open_step()
    return Work(request, denoise_part(request, plan), plan)
