"""The prefill engine: prompt in, KV pages out. One `step` launches one forward.

It has the loop and the messages. prompts.py chooses prompts, executor.py runs forwards, and
kvtransfer's sender pushes pages. It never computes logits. Single-threaded.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effuse.kvtransfer.connector import Pushed, PushFailed
from effuse.kvtransfer.ends import Ended, HandoffSender
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.messages import AttemptId, Reservation, mismatch
from effuse.kvtransfer.pool import PagePool, PageState, room_in
from effuse.kvtransfer.units import UnitCache
from effuse.models.config import ModelConfig
from effuse.placement.records import FEW_PAGES, Load
from effuse.prefill_worker.executor import PromptExecutor, prompt_pushed, push_failed
from effuse.prefill_worker.prompts import (
    Prompt,
    PromptRefused,
    PromptTable,
    check_prompt,
    make_prompt,
    make_rehearsal,
    unfit,
)
from effuse.worker import messages
from effuse.worker.config import PrefillConfig
from effuse.worker.engine_process import ForwardFailed, Outbox
from effuse.worker.messages import FailureCode, PromptPushed, StartPrefill, ToEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """The room that answers leave to prompts in one step of an engine; by default all of it."""

    may_launch: bool = True
    begin_before: float = math.inf  # prompts that arrived later do not begin
    pages_kept: int = 0  # free pages that beginning prompts leave free
    most_tokens: float = math.inf  # of a forward
    may_push_known: bool = True  # no launched forward of answers writes pages of the cache


ALONE = PromptTurn()


class PrefillEngine:
    """An EngineCore. Emits `PrefillDone`, then `PromptPushed` once the receiver has everything.

    A rehearsal pushes free pages once, to measure the link to a decode worker. Their content does
    not matter: they are digested and verified like a prompt's.
    """

    def __init__(
        self,
        executor: PromptExecutor,
        config: PrefillConfig,
        model: ModelConfig,
        pool: PagePool,
        cache: UnitCache,
        sender: HandoffSender,
        fingerprint: Fingerprint,
        *,
        now: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._config = config
        self._degree = config.context_degree
        self._page_size = config.page_size * self._degree  # of the pool, of all ranks
        self._model = model
        self._pool = pool
        self._sender = sender
        self._fingerprint = fingerprint
        self._now = now
        self._outbox = Outbox()
        self.outbox = self._outbox.drain
        self._cache = cache
        self.table = PromptTable(pool, cache, self._outbox, now, needs_boundary=model.shift_logits)
        self._kv_bytes = 0
        self._launched: deque[float] = deque()  # when each running forward was
        self._ended_s = -math.inf

    def step(self, turn: PromptTurn = ALONE) -> bool:
        """Handles results of pushes, admits, launches a forward, and reports the results of ended
        ones. It waits for no forward.
        """
        has_changed = self._cache.poll()
        has_changed |= self._end_late() | self._take_reports() | self._end_pooled()
        has_changed |= self._admit(turn)
        may_launch = turn.may_launch and not self._executor.is_full
        has_launched = may_launch and self._launch(turn)
        return self._apply_ended(waits=not has_launched) or has_changed or has_launched

    def is_working(self) -> bool:
        return self.is_computing or self._cache.is_copying or bool(self.table.pooling)

    @property
    def is_computing(self) -> bool:
        """Whether a launched forward was not read."""
        return self._executor.is_running

    def close(self) -> None:
        self._cache.close()
        self._sender.close()

    @property
    def num_tokens(self) -> int:
        """Tokens in launched forwards so far."""
        return self._executor.num_tokens

    def knows(self, transfer_id: str) -> bool:
        """Whether the attempt or rehearsal is here, or was."""
        return transfer_id in self.table.prompts or transfer_id in self.table.over

    def give_way(self) -> bool:
        """Fails the youngest computed prompt whose destination is unknown, and so frees its pages;
        False if there is none.
        """
        for prompt in reversed(self.table.prompts.values()):
            transfer_id = prompt.attempt.transfer_id
            is_computed = prompt.pages and not prompt.num_left and prompt.is_live
            if is_computed and self._sender.awaits_reservation(transfer_id):
                text = "answers needed the pages of the prompt, which had no reservation yet"
                self._fail(prompt, "UNAVAILABLE", text, retryable=True, field="reservation")
                return True
        return False

    def handle(self, message: ToEngine) -> None:
        match message:
            case StartPrefill():
                self._start(message)
            case messages.PushTo(reservation=reservation):
                self._push_to(reservation)
            case messages.PushRehearsal(reservation=reservation, in_groups=in_groups):
                self._rehearse(reservation, in_groups=in_groups)
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.ReceiverGone(incarnation=incarnation):
                self._sender.forget_life(incarnation)
            case _:
                pass  # of the process, or of the other kind of work, which fronts refuse

    def meanwhile(self, come: Sequence[ToEngine]) -> Sequence[ToEngine]:
        """From within a forward, which may take longer than a lease: accepts new prompts and
        destinations, and renews leases. Returns the rest, in order: messages that end an attempt
        wait.
        """
        left: list[ToEngine] = []
        aborted: set[str] = set()
        for message in come:
            match message:
                case StartPrefill(attempt=attempt) if attempt.transfer_id not in aborted:
                    self._start(message)
                case messages.PushTo(reservation=reservation) if (
                    reservation.transfer_id not in aborted and self._can_push_to(reservation)
                ):
                    self._sender.address(reservation)
                case _:
                    if isinstance(message, messages.Abort):
                        aborted.add(message.attempt.transfer_id)
                    left.append(message)
        self._sender.keep_promises()
        return left

    def load(self) -> Load:
        waiting, computing = self.table.waiting, self.table.computing
        num_prompts = sum(not one.is_rehearsal for one in self.table.prompts.values())
        return Load(
            running=num_prompts - len(waiting),
            waiting=len(waiting),
            runnable=len(computing),
            total_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(prompt.num_left for prompt in (*waiting, *computing)),
            steps=self._executor.num_forwards,
            step_requests=self._executor.num_prompts,
            step_tokens=self._executor.num_tokens,
            kv_bytes=self._kv_bytes,
            **self._cache.figures(),
            **room_in(
                ((len(one.pages), one.num_computed) for one in self.table.prompts.values()),
                self._page_size,
            ),
        )

    # Arrivals.

    def _start(self, message: StartPrefill) -> None:
        attempt, ids = message.attempt, message.prompt_token_ids
        model, config = self._model, self._config
        if attempt.transfer_id in self.table.over:
            self._outbox.failed(attempt, "ABORTED", "the attempt has ended, or was aborted earlier")
            return
        if attempt.transfer_id in self.table.prompts:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the attempt is running")
            return
        prompt = make_prompt(message, model, config.page_size, self._degree, self._now())
        try:
            check_prompt(prompt, config, model, self._pool.num_pages)
        except PromptRefused as error:
            self._outbox.failed(attempt, "INVALID_ARGUMENT", str(error), field="prompt")
            return
        prompt.to_pool = message.to_pool and self._cache.has_pool
        if prompt.can_split or prompt.to_pool:
            prompt.units = self._cache.begin(message.cache_salt, ids, prompt.num_paged)
        self.table.add(prompt)
        self._sender.begin(attempt)

    def _push_to(self, reservation: Reservation) -> None:
        attempt, prompt = reservation.attempt, self.table.prompts.get(reservation.transfer_id)
        if reservation.transfer_id in self.table.over or (prompt and not prompt.is_live):
            return  # it has ended, and its front has the event
        if prompt is None or prompt.attempt != attempt:
            self._outbox.failed(attempt, "INVALID_ARGUMENT", "this attempt has no prompt here")
            return
        found = mismatch(self._fingerprint, reservation.fingerprint)
        is_first = self._sender.awaits_reservation(reservation.transfer_id)
        if found is not None:
            self._fail(prompt, "FAILED_PRECONDITION", str(found), field=found.name)
        elif problem := unfit(prompt, reservation, is_first=is_first):
            self._fail(prompt, "INVALID_ARGUMENT", problem)
        else:
            self._sender.address(reservation)

    def _can_push_to(self, reservation: Reservation) -> bool:
        """Whether a reservation is the first and right one of a living prompt."""
        prompt = self.table.prompts.get(reservation.transfer_id)
        is_first = self._sender.awaits_reservation(reservation.transfer_id)
        return (
            prompt is not None
            and prompt.attempt == reservation.attempt
            and prompt.is_live
            and not unfit(prompt, reservation, is_first=is_first)
            and mismatch(self._fingerprint, reservation.fingerprint) is None
        )

    def _rehearse(self, reservation: Reservation, *, in_groups: bool) -> None:
        """Pushes as many free pages as are reserved, group by group of layers if `in_groups`.

        Refuses if prompts may need the pages; the few for warming up a link are always available.
        """
        attempt = reservation.attempt
        count = -(-reservation.num_source_pages // self._degree)
        if attempt.transfer_id in self.table.over:
            self._outbox.failed(attempt, "ABORTED", "the rehearsal has ended, or was aborted")
            return
        if attempt.transfer_id in self.table.prompts:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the rehearsal is running")
            return
        may_start = not self.table.waiting or count <= FEW_PAGES
        free, may_start = self._pool.num_free, may_start and count <= self._pool.num_lendable
        pages = self._pool.allocate_committed(count) if may_start else None
        if pages is None:
            text = f"prompts need the pages: a rehearsal cannot have {count} of {free} free pages"
            self._outbox.failed(attempt, "RESOURCE_EXHAUSTED", text, retryable=True)
            return
        rehearsal = make_rehearsal(attempt, pages)
        self.table.add(rehearsal)
        self._sender.begin(attempt)
        self._sender.address(reservation)
        # One more group of layers is final each time that the connector polls.
        num_final = itertools.count(1).__next__ if in_groups else None
        self._sender.pages_ready(attempt.transfer_id, rehearsal.page_ids, num_final)
        self._sender.computed(attempt.transfer_id, rehearsal.boundary)

    def _abort(self, attempt: AttemptId) -> None:
        self.table.over.add(attempt.transfer_id, self._now())
        prompt = self.table.prompts.get(attempt.transfer_id)
        if prompt is None:
            self._outbox.abort_done(attempt, was_running=False)
            return
        if prompt.abort_due is None:
            prompt.abort_due = prompt.is_live
        self.table.leave(prompt)
        self._sender.abort(attempt.transfer_id)

    def _end_late(self) -> bool:
        """Ends prompts that exceeded their time; True if there were any."""
        before = self._now() - self._config.max_request_s
        late = [
            one for one in self.table.prompts.values() if one.is_live and one.arrived_s < before
        ]
        text = f"the attempt ran longer than {self._config.max_request_s:g} s"
        for prompt in late:
            self._fail(prompt, "DEADLINE_EXCEEDED", text)
        return bool(late)

    def _take_reports(self) -> bool:
        """Handles results of pushes; True if there were any."""
        reports = self._sender.poll()
        has_applied = self._apply_ended()  # a pushed prompt was computed, which is reported first
        for report in reports:
            prompt = self.table.prompts.get(report.transfer_id)
            assert prompt is not None, "the sender reports nothing after Ended"
            match report:
                case Ended():
                    self.table.end(prompt)
                case Pushed():
                    self._kv_bytes += 0 if prompt.is_rehearsal else report.num_bytes
                    self._outbox.add(prompt_pushed(prompt.attempt, report))
                case PushFailed():
                    self.table.leave(prompt)
                    self._outbox.add(push_failed(prompt.attempt, report))
        return bool(reports) or has_applied

    def _end_pooled(self) -> bool:
        """Ends prompts that the shared pool has; True if there were any."""
        for prompt in self.table.pooling:  # its reservation is due once it is reported
            self._sender.wait_longer(prompt.attempt.transfer_id)
        found = self.table.in_pool()
        for prompt in found:
            pages, seconds = len(prompt.pages), self._now() - prompt.done_s if prompt.done else 0.0
            if pages and prompt.can_split:
                num_new = len(prompt.units.keys) - prompt.units.num_found
                pages = num_new * self._cache.unit_size // self._page_size
            self._outbox.add(
                PromptPushed(
                    attempt=prompt.attempt,
                    pages=pages,
                    bytes=pages * self._executor.page_bytes,
                    push_s=seconds,
                    transport="pool",
                )
            )
            self._sender.abort(prompt.attempt.transfer_id)
        return bool(found)

    def _admit(self, turn: PromptTurn) -> bool:
        """Gives the oldest waiting prompts their pages, as many as there is room for."""
        has_admitted = False
        while len(self.table.computing) < self._config.max_num_seqs:
            # Pages that are still written leave with the prompt's first forward.
            may_push = turn.may_push_known
            prompt = self.table.begin_next(
                turn.begin_before, turn.pages_kept, may_know_all=may_push
            )
            if prompt is None:
                break
            has_admitted = True
            known = prompt.num_cached if may_push else 0
            if cached := prompt.take_final_pages(known, self._page_size):
                self._sender.pages_ready(prompt.attempt.transfer_id, cached)
            if not prompt.num_left:
                self._sender.computed(prompt.attempt.transfer_id, prompt.boundary)
                self.table.conclude(prompt)
        return has_admitted

    def _launch(self, turn: PromptTurn) -> bool:
        """Launches a forward over as many prompts as fit; False if there is nothing to compute."""
        budget = int(min(self._config.max_num_batched_tokens, turn.most_tokens))
        chunks = self.table.next_chunks(budget=budget, block_size=self._model.block_size)
        if not chunks:
            return False
        self._launched.append(self._now())
        try:
            self._executor.launch(chunks)
        except ForwardFailed as failure:
            for chunk in chunks:
                self._fail(chunk.prompt, "INTERNAL", str(failure), retryable=True)
        return True

    def _apply_ended(self, *, waits: bool = False) -> bool:
        """Handles forwards that have ended; True if there were any. `waits`: nothing else can
        begin, so that it waits for one of a pipeline."""
        has_applied = False
        while self._executor.has_ended(waits=waits and not has_applied):
            has_applied = True
            forward, now = self._executor.read(), self._now()
            began_s, self._ended_s = max(self._launched.popleft(), self._ended_s), now
            if not forward.has_failed:
                num_tokens = sum(chunk.num_tokens for chunk in forward.chunks)
                self.table.computing_rate.note(num_tokens, now - began_s, now)
            for chunk in forward.chunks:
                self.table.computed(chunk, is_stored=not forward.has_failed)
        return has_applied

    def _fail(
        self,
        prompt: Prompt,
        code: FailureCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
    ) -> None:
        self.table.leave(prompt)
        self._sender.abort(prompt.attempt.transfer_id)
        self._outbox.failed(prompt.attempt, code, message, retryable=retryable, field=field)
