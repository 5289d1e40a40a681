"""The decode engine: KV pages in, committed tokens out. One `step` is one iteration.

It has the loop and the messages. `roster.py` has the requests and gives them pages, `scheduler.py`
chooses among them, `denoise.py` has the rules of blocks, kvtransfer's receiver gets pages, and an
executor runs forwards. Single-threaded.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from effuse.decode_worker.executor import Broken, Denoised, Executor, Prefilled, Share
from effuse.decode_worker.intake import (
    Boundary,
    BoundaryError,
    Intake,
    RehearsalReceiver,
    begun_drafts,
    handoff_failed,
    step_events,
)
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.room import Room
from effuse.decode_worker.roster import Roster
from effuse.decode_worker.sequence import RequestError
from effuse.kvtransfer.connector import ArrivalRefused, Arrived
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.messages import AttemptId, Tombstones
from effuse.kvtransfer.pool import PagePool, PageState, room_in
from effuse.kvtransfer.units import UnitCache
from effuse.placement.records import Load
from effuse.worker import messages
from effuse.worker.engine_process import Outbox
from effuse.worker.messages import Reserved, StartDecode, ToEngine, Verified

LOG = logging.getLogger(__name__)


class DecodeEngine:
    """An EngineCore. Emits `Reserved` at admission, `Verified` once the prompt's KV is complete,
    then `Committed` (and `Draft`) until `Finished` or `Failed`."""

    def __init__(
        self,
        executor: Executor,
        pool: PagePool,
        cache: UnitCache,
        intake: Intake,
        handoffs: HandoffReceiver,
        boundary: Boundary,
        *,
        now: Callable[[], float],
        max_request_s: float,
    ) -> None:
        self.counters = executor.counters
        self._executor = executor
        self._pool = pool
        self._cache = cache
        self._intake = intake
        self._handoffs = handoffs
        self._boundary = boundary
        self._now = now
        self._max_request_s = max_request_s
        self.roster = Roster(executor, pool, cache, intake.limits)
        overlaps = executor.num_parts(1) > 1
        self.room = Room(intake.limits.max_num_batched_tokens, overlaps=overlaps)
        self._aborted = Tombstones()
        self._outbox = Outbox()
        self.outbox = self._outbox.drain
        self._rehearsal = RehearsalReceiver(pool, handoffs, self._outbox)
        self._num_arrived = 0
        self._is_stalled = False  # the last step could advance no request

    def step(self) -> bool:
        """Handles arrivals, admits, launches a step, and reports the changes of ended ones.

        It waits for no step: while the executor is full, it only handles arrivals and ends.
        """
        reports = self._handoffs.poll(self._now())
        for report in reports:
            self._take_report(report)
        has_changed = bool(reports) | self._cache.poll()
        has_changed |= self._end_late() | self._admit() | self.apply()
        if self._executor.is_full:
            return has_changed
        shares = self.roster.schedule(lambda: self.apply(waits=True), self.room, self._now)
        for share in shares:
            self._outbox.add(*begun_drafts(share.request))
        has_launched = self._launch(shares)
        self._is_stalled = not (has_launched or self._executor.is_running)
        return self.apply() or has_changed or has_launched

    def _launch(self, shares: Sequence[Share]) -> bool:
        room, counters, fits = self.room, self.counters, self.room.fits
        tokens = room.launch(shares, self._now())
        if tokens:
            counters.prompt_tokens += tokens
            counters.prompts_overdue += room.is_overdue
            LOG.debug("a step has %d prompt tokens, at most %g", tokens, fits)
        has_launched = self._executor.launch(shares)
        if not has_launched:
            room.rest(self._executor.num_ended, is_idle=not self._executor.is_running)
        return has_launched

    def is_working(self) -> bool:
        return self._executor.is_running or self._cache.is_copying

    def close(self) -> None:
        self._cache.close()
        self._handoffs.close()

    @property
    def is_writing(self) -> bool:
        """Whether pages that are known to be stored are still written by launched work."""
        return not all(place.query() for place in self._executor.writing.values())

    @property
    def can_step(self) -> bool:
        """Whether some request could take part in the last step, and may in the next one."""
        return bool(self.roster.running) and not self._is_stalled

    @property
    def is_short_of_pages(self) -> bool:
        """Whether no request can go on, and those that are here have or wait for pages. Those of
        units that come or are saved are free soon."""
        roster = self.roster
        goes_on = self.can_step or roster.receiving or self._cache.is_copying
        return not goes_on and bool(roster.running or roster.waiting)

    def handle(self, message: ToEngine) -> None:
        match message:
            case StartDecode():
                self._start(message)
            case messages.StartRehearsal(attempt=attempt) if attempt.transfer_id in self._aborted:
                self._outbox.failed(attempt, "ABORTED", "the rehearsal was aborted before it began")
            case messages.StartRehearsal():
                is_busy = bool(self.roster.waiting)
                self._rehearsal.reserve(message, is_busy=is_busy, now=self._now())
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.WriterGone(transfer_id=transfer_id, has_drained=has_drained):
                failed = self._handoffs.writer_gone(transfer_id, has_drained=has_drained)
                if failed is not None:
                    self._take_report(failed)
            case _:
                pass  # of the process, or of the other kind of work, which fronts refuse

    def check(self, message: StartDecode) -> None:
        """Raises RequestError for a request that could never be served here; stores nothing."""
        self._intake.make_request(message, arrival=0, now=self._now())

    def knows(self, transfer_id: str, group: str = "") -> bool:
        """Whether the attempt or rehearsal has anything here, or was aborted here, or another
        request of its group is here."""
        return (
            transfer_id in self.roster.by_transfer
            or self.roster.has_group(group)
            or transfer_id in self._aborted
            or self._rehearsal.is_of(transfer_id)
            or self._handoffs.is_open(transfer_id)
        )

    def load(self) -> Load:
        roster = self.roster
        requests, page_size = roster.by_transfer.values(), self._intake.limits.page_size
        return Load(
            running=roster.num_holding,
            waiting=len(roster.waiting),
            runnable=0 if self._is_stalled else len(roster.running),
            total_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            reserved_pages=self._pool.count(PageState.RESERVED),
            receiving_pages=self._pool.count(PageState.RECEIVING),
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(r.num_to_prefill for r in requests if not r.needs_remote),
            blocks_left=sum(request.sequence.num_blocks_left for request in requests),
            prompt_piece=self.room.offer[0],
            prompt_rate=self.room.offer[1],
            **msgspec.structs.asdict(self.counters),
            **self._cache.figures(),
            **room_in(
                ((len(r.pages), r.num_stored(page_size)) for r in requests if r.pages), page_size
            ),
        )

    # Arrivals.

    def _start(self, message: StartDecode) -> None:
        attempt = message.attempt
        if attempt.transfer_id in self._aborted:
            text = "the attempt was aborted before it began"
            self._outbox.failed(attempt, "ABORTED", text)
        elif attempt.transfer_id in self.roster.by_transfer:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the attempt is running")
        elif message.writer is not None and not self._handoffs.can_receive:
            text = "this worker has no connector, so it only accepts local prefill"
            self._outbox.failed(attempt, "FAILED_PRECONDITION", text)
        else:
            try:
                request = self._intake.make_request(
                    message, arrival=self._num_arrived, now=self._now()
                )
            except RequestError as error:
                text, field = str(error), error.field or None
                self._outbox.failed(attempt, "INVALID_ARGUMENT", text, field=field)
                return
            self._num_arrived += 1
            self.roster.add(request)
            self._is_stalled = False

    def _abort(self, attempt: AttemptId) -> None:
        self._aborted.add(attempt.transfer_id, self._now())
        request = self.roster.by_transfer.get(attempt.transfer_id)
        if request is not None:
            self._end(request)
        was_running = self._rehearsal.abort(attempt.transfer_id) or request is not None
        self._outbox.abort_done(attempt, was_running=was_running)

    def _take_report(self, report: Arrived | ArrivalRefused) -> None:
        """Handles the result of a handoff or of a rehearsal."""
        if self._rehearsal.take_report(report):
            return
        if isinstance(report, Arrived):
            self._begin_remote(report)
            return
        request = self.roster.by_transfer[report.transfer_id]
        self._end(request)
        self._outbox.add(handoff_failed(request.asked.attempt, report))

    def _begin_remote(self, arrived: Arrived) -> None:
        request, manifest = self.roster.by_transfer[arrived.transfer_id], arrived.manifest
        self.roster.start_running(request)
        self.counters.kv_bytes += arrived.num_bytes
        self.counters.kv_bytes_held += request.units.num_pages * self._handoffs.page_bytes
        try:
            request.boundary = self._boundary.accept(manifest.boundary, request.sequence)
        except BoundaryError as error:
            self._end(request)
            self._outbox.failed(request.asked.attempt, "DATA_LOSS", str(error), retryable=True)
            return
        request.sequence.store(request.sequence.first_block_start)
        self.roster.keep(request)
        self._verify(request, arrived)

    def _end_late(self) -> bool:
        """Ends requests that exceeded their time; True if there were any."""
        before = self._now() - self._max_request_s
        late = [r for r in self.roster.by_transfer.values() if r.arrived_s < before]
        for request in late:
            if request.transfer_id not in self.roster.by_transfer:
                continue  # abandoning another one has shown that this one had ended
            message = f"the attempt ran longer than {self._max_request_s:g} s"
            self._end(request)
            self._outbox.failed(request.asked.attempt, "DEADLINE_EXCEEDED", message)
        return bool(late)

    def _admit(self) -> bool:
        """Gives waiting requests their pages, which their writers or the engine fill; True if it
        did.
        """
        admitted = self.roster.admissible(self.room)
        for request in admitted:
            attempt = request.asked.attempt
            if request.needs_remote:
                pages, held = self.roster.begin_remote(request), request.units.num_pages
                reservation = self._handoffs.reserve(
                    attempt,
                    pages,
                    request.asked.writer,
                    self._now(),
                    held,
                    self._intake.limits.written_pages(request.sequence.first_block_start, held),
                )
                self._outbox.add(Reserved(reservation=reservation))
                continue
            self.roster.begin(request)
            if request.preemptions == 0:
                self._outbox.add(Reserved(reservation=self._handoffs.local(attempt)))
            self._verify(request)
        return bool(admitted)

    # After a step.

    def apply(self, *, waits: bool = False) -> bool:
        """Applies the results of steps that have ended, or waits for all launched ones; True if
        there were any.
        """
        has_applied = False
        while self._executor.has_results() or (waits and self._executor.is_running):
            has_applied = True
            results, now = self._executor.read(), self._now()
            self.room.end(self._executor.num_ended, now)
            for result in results:
                match result:
                    case Prefilled(request):
                        self.roster.keep(request)
                        self._verify(request)
                        if request.asked.progress and not request.is_verified:
                            self._report_part(request)
                    case Denoised(request, outcome):
                        self.roster.keep(request)
                        cost = self.room.note_step(request, now, outcome.num_settled)
                        if outcome.finish is not None:
                            self._end(request)
                        self._outbox.add(*step_events(request, outcome, cost))
                    case Broken(request, message, is_retryable):
                        self._end(request, is_sound=False)
                        self._outbox.failed(
                            request.asked.attempt, "INTERNAL", message, retryable=is_retryable
                        )
        return has_applied

    def _report_part(self, request: DecodeRequest) -> None:
        """Reports that a part of a request's own prompt is computed."""
        count = request.sequence.committed_len
        event = messages.PromptProgress(attempt=request.asked.attempt, computed_tokens=count)
        self._outbox.add(event)

    def _verify(self, request: DecodeRequest, arrived: Arrived | None = None) -> None:
        """Reports once that a prompt is complete, which may have arrived from a writer."""
        if request.is_verified or (request.lacks_prompt and not request.settings.is_canvas):
            return
        request.is_verified = True
        if request.sequence.committed_len == request.sequence.first_block_start:
            request.prompt_boundary = request.boundary
        num_computed = max(0, request.sequence.first_block_start - request.units.num_tokens)
        self._outbox.add(
            Verified(
                attempt=request.asked.attempt,
                bytes=0 if arrived is None else arrived.num_bytes,
                pages=0 if arrived is None else len(request.pages) - request.units.num_pages,
                handoff_s=0.0 if arrived is None else arrived.seconds,
                compute_s=0.0 if arrived else self.room.prompt_s(num_computed),
                cached_tokens=request.units.num_tokens if arrived is None else 0,
            )
        )

    # Ends.

    def _end(self, request: DecodeRequest, *, is_sound: bool = True) -> None:
        """Removes the request completely; pages that a writer may reach are quarantined."""
        while self._executor.remove(request):  # again, because a device may write what was read now
            self.apply(waits=True)
        if request.transfer_id in self.roster.receiving:
            # The others belong to the handoff, which frees them or already has.
            self._handoffs.abort(request.transfer_id)
            del request.pages[request.units.num_pages :]
        self.roster.remove(request, is_sound=is_sound)
