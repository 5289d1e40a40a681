"""The decode engine: KV pages in, committed tokens out. One `step` is one iteration.

It has the loop and the messages. `denoise.py` has the rules of blocks, `scheduler.py` chooses
requests, kvtransfer's receiver gets pages, and an executor runs forwards. Single-threaded.
"""

from collections.abc import Callable, Sequence

from effuse.decode_worker import scheduler
from effuse.decode_worker.events import begun_drafts, handoff_failed, step_events
from effuse.decode_worker.executor import Broken, Denoised, Executor, Prefilled, Share, StepResult
from effuse.decode_worker.intake import Boundary, BoundaryError, Intake, RehearsalReceiver
from effuse.decode_worker.request import DecodeRequest, RequestQueues
from effuse.decode_worker.sequence import RequestError
from effuse.decode_worker.shared_prompts import SharedPrompts
from effuse.kvtransfer.connector import Arrived
from effuse.kvtransfer.handoff import Tombstones
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver
from effuse.placement.records import Load
from effuse.worker import messages
from effuse.worker.engine_process import KEEP_ABORTED_S, Outbox
from effuse.worker.messages import CoreEvent, FailureCode, Reserved, StartDecode, ToEngine, Verified


class DecodeEngine:
    """An EngineCore. Emits `Reserved` at admission, `Verified` once the prompt's KV is complete,
    then `Committed` (and `Draft`) until `Finished` or `Failed`."""

    def __init__(
        self,
        executor: Executor,
        pool: PagePool,
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
        self._intake = intake
        self._limits = intake.limits
        self._handoffs = handoffs
        self._boundary = boundary
        self._now = now
        self._max_request_s = max_request_s
        self._queues = RequestQueues()
        self._prompts = SharedPrompts()
        self._aborted = Tombstones(KEEP_ABORTED_S)
        self._outbox = Outbox()
        self._rehearsal = RehearsalReceiver(pool, handoffs, self._outbox)
        self._num_arrived = 0
        self._is_stalled = False  # the last step could advance no request

    def step(self) -> bool:
        """Handles arrivals, admits, launches a step, and reports the changes of ended ones.

        It waits for no step: while the executor is full, it only handles arrivals and ends.
        """
        has_changed = self._take_handoffs() | self._end_late() | self._admit() | self._apply_ended()
        if self._executor.is_full:
            return has_changed
        has_launched = self._executor.launch(self._schedule())
        self._is_stalled = not has_launched
        return self._apply_ended() or has_changed or has_launched

    def is_working(self) -> bool:
        """Whether a step that was launched has not been read."""
        return self._executor.is_running

    def handle(self, message: ToEngine) -> None:
        """Handles one message of the front."""
        match message:
            case StartDecode():
                self._start(message)
            case messages.StartRehearsal():
                is_busy = bool(self._queues.waiting)
                self._rehearsal.reserve(message, is_busy=is_busy, now=self._now())
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.WriterGone(transfer_id=transfer_id, has_drained=has_drained):
                failed = self._handoffs.writer_gone(transfer_id, has_drained=has_drained)
                if failed is not None and not self._rehearsal.take_report(failed):
                    self._fail_handoff(failed)
            case messages.StartPrefill(attempt=attempt):
                self._outbox.failed(attempt, "INVALID_ARGUMENT", "this is a decode worker")
            case (
                messages.PushTo(reservation=reservation)
                | messages.PushRehearsal(reservation=reservation)
            ):
                text = "this is a decode worker"
                self._outbox.failed(reservation.attempt, "INVALID_ARGUMENT", text)
            case messages.ReceiverGone() | messages.Shutdown():
                pass  # for the process

    def check(self, message: StartDecode) -> None:
        """Raises RequestError for a request that could never be served here; stores nothing."""
        self._intake.make_request(message, arrival=0, now=self._now())

    def outbox(self) -> Sequence[CoreEvent]:
        """Events since the last call, in order."""
        return self._outbox.drain()

    def load(self) -> Load:
        """State and counters of the engine now."""
        queues = self._queues
        requests = queues.by_transfer.values()
        return Load(
            running=queues.num_holding,
            waiting=len(queues.waiting),
            runnable=0 if self._is_stalled else len(queues.running),
            total_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            reserved_pages=self._pool.count(PageState.RESERVED),
            receiving_pages=self._pool.count(PageState.RECEIVING),
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(r.num_to_prefill for r in requests if not r.needs_remote),
            blocks_left=sum(request.sequence.num_blocks_left for request in requests),
            steps=self.counters.steps,
            step_requests=self.counters.requests,
            step_tokens=self.counters.rows,
            preemptions=self.counters.preemptions,
            prompts_shared=self.counters.prompts_shared,
            kv_bytes=self.counters.kv_bytes,
        )

    def audit(self) -> None:
        """Checks that every page is free, or held for some request. Raises AuditError."""
        held = [page for request in self._queues.by_transfer.values() for page in request.pages]
        self._pool.audit([*held, *self._rehearsal.pages(), *self._handoffs.quarantined()])

    def close(self) -> None:
        """Stops the connector."""
        self._handoffs.close()

    # Arrivals.

    def _start(self, message: StartDecode) -> None:
        attempt = message.attempt
        if attempt.transfer_id in self._aborted:
            text = "the attempt was aborted before it began"
            self._outbox.failed(attempt, "ABORTED", text)
        elif attempt.transfer_id in self._queues.by_transfer:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the attempt is running")
        elif message.writer is not None and not self._handoffs.can_receive:
            text = "this worker has no connector, so it only accepts local prefill"
            self._outbox.failed(attempt, "FAILED_PRECONDITION", text)
        else:
            self._enqueue(message)

    def _enqueue(self, message: StartDecode) -> None:
        try:
            request = self._intake.make_request(message, arrival=self._num_arrived, now=self._now())
        except RequestError as error:
            told, field = str(error), error.field or None
            self._outbox.failed(message.attempt, "INVALID_ARGUMENT", told, field=field)
            return
        self._num_arrived += 1
        self._queues.add(request)
        self._prompts.add(request)
        self._is_stalled = False

    def _abort(self, attempt: AttemptId) -> None:
        self._aborted.add(attempt.transfer_id, self._now())
        request = self._queues.by_transfer.get(attempt.transfer_id)
        if request is not None:
            self._end(request)
        was_running = self._rehearsal.abort(attempt.transfer_id) or request is not None
        self._outbox.abort_done(attempt, was_running=was_running)

    def _take_handoffs(self) -> bool:
        """Handles results of handoffs; True if there were any."""
        reports = self._handoffs.poll(self._now())
        for report in reports:
            if self._rehearsal.take_report(report):
                continue
            if isinstance(report, Arrived):
                self._begin_remote(report)
            else:
                self._fail_handoff(report)
        return bool(reports)

    def _begin_remote(self, arrived: Arrived) -> None:
        request, manifest = self._queues.by_transfer[arrived.transfer_id], arrived.manifest
        self._queues.start_running(request)
        self.counters.kv_bytes += arrived.num_bytes
        try:
            request.boundary = self._boundary.accept(manifest.boundary, request.sequence)
        except BoundaryError as error:
            self._fail(request, "DATA_LOSS", str(error), retryable=True)
            return
        request.sequence.store(request.sequence.first_block_start)
        self._verify(request, arrived.num_bytes, len(request.pages), arrived.seconds)

    def _end_late(self) -> bool:
        """Ends requests that exceeded their time; True if there were any."""
        before = self._now() - self._max_request_s
        late = [r for r in self._queues.by_transfer.values() if r.arrived_s < before]
        for request in late:
            if request.attempt.transfer_id not in self._queues.by_transfer:
                continue  # abandoning another one has shown that this one had ended
            message = f"the attempt ran longer than {self._max_request_s:g} s"
            self._fail(request, "DEADLINE_EXCEEDED", message)
        return bool(late)

    # Before a step: which requests take part, and with which pages.

    def _admit(self) -> bool:
        """Gives the oldest waiting requests their pages, as many as there is room for. Requests
        that wait for another one's prompt let younger ones pass.
        """
        waiting = self._prompts.not_coming(self._queues.waiting)
        if not waiting:
            return False
        growth = 0
        for request in self._queues.running:
            demand = request.demand(self._limits)
            growth += max(0, demand.pages_wanted - demand.pages_held)
        count = scheduler.admit(
            (self._pages_to_begin(request) for request in waiting),
            num_holding=self._queues.num_holding,
            num_free=self._pool.num_free,
            growth=growth,
            limits=self._limits,
        )
        for request in waiting[:count]:
            self._begin(request)
        return count > 0

    def _pages_to_begin(self, request: DecodeRequest) -> int:
        """Free pages with which it can begin, without whole ones of another's prompt."""
        count = request.pages_to_begin(self._limits)
        if self._prompts.source_of(request) is None:
            return count
        return count - request.sequence.first_block_start // self._limits.page_size

    def _begin(self, request: DecodeRequest) -> None:
        """Gives a waiting request its pages, which its writer or the engine fills."""
        count = self._pages_to_begin(request)
        is_new = request.preemptions == 0
        if request.needs_remote:
            pages = self._pool.allocate(count)
            assert pages is not None, "admission counts free pages"
            request.pages = list(pages)
            self._queues.start_receiving(request)
            reservation = self._handoffs.reserve(
                request.attempt, pages, request.writer, self._now()
            )
            self._outbox.say(Reserved(reservation=reservation))
            return
        source = self._prompts.source_of(request)
        if source is None:
            self._give_pages(request, count)
        else:
            self._share_prompt(request, source, count)
        self._queues.start_running(request)
        if is_new:
            self._outbox.say(Reserved(reservation=self._handoffs.local(request.attempt)))
        self._note_prefilled(request)

    def _share_prompt(self, request: DecodeRequest, source: DecodeRequest, count: int) -> None:
        """Lets a request read the prompt of `source`, and gives it `count` pages of its own. If
        prompt and answer share a page, the first of them begins as a copy of it.
        """
        num_whole, tail = divmod(request.sequence.first_block_start, self._limits.page_size)
        self._pool.share(request.take_prompt(source, self._limits.page_size))
        self._give_pages(request, count)
        if tail:
            self._executor.copy_page(source.page_ids[num_whole], request.page_ids[num_whole])
        self.counters.prompts_shared += 1

    def _give_pages(self, request: DecodeRequest, count: int) -> None:
        pages = self._pool.allocate_committed(count)
        assert pages is not None, "the scheduler counts free pages"
        request.pages.extend(pages)

    def _schedule(self) -> list[Share]:
        """Asks the scheduler which requests take part, preempts, and hands out pages."""
        running = list(self._queues.running)
        ahead = self._executor.runs_ahead
        demands = [request.demand(self._limits, runs_ahead=ahead) for request in running]
        schedule = scheduler.schedule(
            demands,
            num_free=self._pool.num_free,
            limits=self._limits,
            count_freed=lambda gone: self._pool.count_freed(running[at].pages for at in gone),
        )
        if schedule.preempted and self._executor.is_running:
            # Launched steps must end before pages change hands; that may also free some.
            self._apply_all()
            return self._schedule()
        for index in schedule.preempted:
            self._preempt(running[index])
        shares = []
        for request, demand, rows in zip(running, demands, schedule.rows, strict=True):
            if rows:
                self._give_pages(request, max(0, demand.pages_wanted - demand.pages_held))
                shares.append(Share(request, rows))
                self._outbox.say(*begun_drafts(request))
        return shares

    def _preempt(self, request: DecodeRequest) -> None:
        assert not self._executor.is_running, "its last step has been read"
        self._executor.remove(request)
        self._pool.release(request.pages)
        request.preempt()
        self._queues.put_back(request)
        self.counters.preemptions += 1

    # After a step.

    def _apply_ended(self) -> bool:
        """Applies the results of steps that have ended; True if there were any."""
        has_applied = False
        while self._executor.has_results():
            has_applied = True
            self._apply(self._executor.read())
        return has_applied

    def _apply_all(self) -> None:
        """Waits for all launched steps and applies their results."""
        while self._executor.is_running:
            self._apply(self._executor.read())

    def _apply(self, results: Sequence[StepResult]) -> None:
        for result in results:
            match result:
                case Prefilled(request):
                    self._note_prefilled(request)
                case Denoised(request, outcome):
                    if outcome.finish is not None:
                        self._end(request)
                    self._outbox.say(*step_events(request, outcome))
                case Broken(request, message, is_retryable):
                    self._fail(request, "INTERNAL", message, retryable=is_retryable)

    def _note_prefilled(self, request: DecodeRequest) -> None:
        """Reports once that a locally prefilled prompt is complete."""
        if not request.is_verified and request.has_prompt:
            self._verify(request, 0, 0, 0.0)

    def _verify(self, request: DecodeRequest, num_bytes: int, pages: int, handoff_s: float) -> None:
        request.is_verified = True
        if request.sequence.committed_len == request.sequence.first_block_start:
            request.prompt_boundary = request.boundary
        self._outbox.say(
            Verified(attempt=request.attempt, bytes=num_bytes, pages=pages, handoff_s=handoff_s)
        )

    # Ends.

    def _fail_handoff(self, failed: HandoffFailed) -> None:
        request = self._queues.by_transfer[failed.transfer_id]
        self._end(request)
        self._outbox.say(handoff_failed(request.attempt, failed))

    def _fail(
        self, request: DecodeRequest, code: FailureCode, message: str, *, retryable: bool = False
    ) -> None:
        self._end(request)
        self._outbox.failed(request.attempt, code, message, retryable=retryable)

    def _end(self, request: DecodeRequest) -> None:
        """Removes the request completely; pages that a writer may reach are quarantined."""
        if self._executor.remove(request):
            self._apply_all()
        transfer_id = request.attempt.transfer_id
        if transfer_id in self._queues.receiving:
            # The pages belong to the handoff, which frees them or already has.
            self._handoffs.abort(transfer_id)
            request.pages.clear()
        self._pool.release(request.pages)
        request.pages.clear()
        self._queues.remove(request)
        self._prompts.remove(request)
