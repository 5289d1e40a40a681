"""The prefill engine: prompt in, KV pages out. One `step` launches one forward.

It has the loop and the messages. prompts.py chooses prompts, executor.py runs forwards, and
kvtransfer's sender pushes pages. It never computes logits. Single-threaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from effuse.kvtransfer.connector import Pushed, PushFailed
from effuse.kvtransfer.handoff import Tombstones
from effuse.kvtransfer.layout import Fingerprint, mismatch
from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.sender import Ended, HandoffSender
from effuse.models.config import ModelConfig
from effuse.placement.records import Load
from effuse.prefill_worker import prompts
from effuse.prefill_worker.executor import PromptChunk, PromptExecutor
from effuse.prefill_worker.prefix_cache import PrefixCache
from effuse.prefill_worker.prompts import (
    PrefillLimits,
    Prompt,
    PromptRefused,
    prefill_done,
    prompt_pushed,
    push_failed,
)
from effuse.prefill_worker.rehearsal_sender import RehearsalSender
from effuse.worker import messages
from effuse.worker.engine_process import KEEP_ABORTED_S, ForwardFailed, Outbox
from effuse.worker.messages import CoreEvent, FailureCode, StartPrefill, ToEngine


class PrefillEngine:
    """An EngineCore. Emits `PrefillDone`, then `PromptPushed` once the receiver has everything."""

    def __init__(
        self,
        executor: PromptExecutor,
        model: ModelConfig,
        pool: PagePool,
        sender: HandoffSender,
        limits: PrefillLimits,
        fingerprint: Fingerprint,
        *,
        now: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._model = model
        self._pool = pool
        self._sender = sender
        self._limits = limits
        self._fingerprint = fingerprint
        self._now = now
        self._outbox = Outbox()
        self._cache = PrefixCache(pool, page_size=limits.page_size, block_size=limits.block_size)
        self._rehearsals = RehearsalSender(pool, self._cache, sender, self._outbox)
        self._over = Tombstones(KEEP_ABORTED_S)  # transfers that have ended or were aborted
        self._prompts: dict[str, Prompt] = {}  # all unfinished ones, including draining ones
        self._waiting: list[Prompt] = []
        self._computing: list[Prompt] = []
        self._live: set[str] = set()  # transfers that have not failed or been aborted
        self._aborting: dict[str, bool] = {}  # transfers whose AbortDone is due: whether they ran
        self._kv_bytes = 0

    def step(self) -> bool:
        """Handles results of pushes, admits, launches a forward, and reports the results of ended
        ones. It waits for no forward.
        """
        has_changed = self._end_late() | self._take_reports() | self._admit()
        if self._executor.is_full:
            return has_changed
        has_launched = self._launch(self._schedule())
        return self._apply_ended() or has_changed or has_launched

    def is_working(self) -> bool:
        """Whether a forward that was launched has not ended."""
        return self._executor.is_running

    def handle(self, message: ToEngine) -> None:
        """Handles one message of the front."""
        match message:
            case StartPrefill():
                self._start(message)
            case messages.PushTo(reservation=reservation):
                self._push_to(reservation)
            case messages.PushRehearsal(reservation=reservation, in_groups=in_groups):
                is_busy = bool(self._waiting)
                self._rehearsals.push(reservation, is_busy=is_busy, in_groups=in_groups)
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.StartDecode(attempt=attempt) | messages.StartRehearsal(attempt=attempt):
                self._outbox.failed(attempt, "INVALID_ARGUMENT", "this is a prefill worker")
            case messages.ReceiverGone(incarnation=incarnation):
                self._sender.forget_life(incarnation)
            case messages.WriterGone() | messages.Shutdown():
                pass  # nothing writes here; the process ends itself

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

    def outbox(self) -> Sequence[CoreEvent]:
        """Events since the last call, in order."""
        return self._outbox.drain()

    def load(self) -> Load:
        """State and counters of the engine now."""
        unfinished = [*self._waiting, *self._computing]
        return Load(
            running=len(self._prompts) - len(self._waiting),
            waiting=len(self._waiting),
            runnable=len(self._computing),
            total_pages=self._pool.num_pages,
            free_pages=self._cache.num_free,
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(prompt.num_left for prompt in unfinished),
            steps=self._executor.num_forwards,
            step_requests=self._executor.num_prompts,
            step_tokens=self._executor.num_tokens,
            kv_bytes=self._kv_bytes,
            prefix_queries=self._cache.num_queried,
            prefix_hits=self._cache.num_found,
        )

    def audit(self) -> None:
        """Checks that every page is free, cached or held by a prompt. Raises AuditError."""
        held = [page for prompt in self._prompts.values() for page in prompt.pages]
        self._pool.audit([*held, *self._cache.pages(), *self._rehearsals.pages()])

    def close(self) -> None:
        """Stops the connector."""
        self._sender.close()

    # Arrivals.

    def _start(self, message: StartPrefill) -> None:
        attempt = message.attempt
        if attempt.transfer_id in self._over:
            self._outbox.failed(attempt, "ABORTED", "the attempt has ended, or was aborted earlier")
        elif attempt.transfer_id in self._prompts:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the attempt is running")
        else:
            self._enqueue(message)

    def _enqueue(self, message: StartPrefill) -> None:
        prompt = self._make_prompt(message)
        try:
            prompts.check_prompt(prompt.token_ids, prompt.num_paged, prompt.can_split, self._limits)
        except PromptRefused as error:
            self._outbox.failed(message.attempt, "INVALID_ARGUMENT", str(error))
            return
        if prompt.can_split and self._limits.enable_prefix_caching:
            prompt.keys = self._cache.keys_of(
                prompt.token_ids, prompt.num_paged, message.cache_salt
            )
        transfer_id = message.attempt.transfer_id
        self._prompts[transfer_id] = prompt
        self._live.add(transfer_id)
        self._waiting.append(prompt)
        self._sender.begin(message.attempt)

    def _make_prompt(self, message: StartPrefill) -> Prompt:
        """A block-causal prompt is paged in whole blocks, a bidirectional one completely."""
        token_ids = message.prompt_token_ids
        can_split = self._model.prompt_attention == "causal_blocks"
        block = self._limits.block_size
        num_paged = len(token_ids) // block * block if can_split else len(token_ids)
        return Prompt(
            attempt=message.attempt,
            token_ids=token_ids,
            block_origin=self._model.block_origin(len(token_ids)),
            num_paged=num_paged,
            can_split=can_split,
            arrived_s=self._now(),
        )

    def _push_to(self, reservation: Reservation) -> None:
        transfer_id, attempt = reservation.transfer_id, reservation.attempt
        prompt = self._prompts.get(transfer_id)
        if transfer_id in self._over or (prompt and transfer_id not in self._live):
            return  # it has ended, and its front has the event
        if prompt is None or prompt.attempt != attempt:
            self._outbox.failed(attempt, "INVALID_ARGUMENT", "this attempt has no prompt here")
            return
        found = mismatch(self._fingerprint, reservation.fingerprint)
        needed = self._limits.pages_for(prompt.num_paged)
        if found is not None:
            self._fail(prompt, "FAILED_PRECONDITION", str(found), field=found.name)
        elif self._sender.reservation(transfer_id) is not None:
            self._fail(prompt, "INVALID_ARGUMENT", "a second reservation arrived")
        elif len(reservation.pages) != needed:
            text = f"the prompt needs {needed} pages, {len(reservation.pages)} are reserved"
            self._fail(prompt, "INVALID_ARGUMENT", text)
        else:
            self._sender.address(reservation)

    def _can_push_to(self, reservation: Reservation) -> bool:
        """Whether a reservation is the first and right one of a living prompt."""
        transfer_id = reservation.transfer_id
        prompt = self._prompts.get(transfer_id)
        return (
            prompt is not None
            and prompt.attempt == reservation.attempt
            and transfer_id in self._live
            and self._sender.awaits_reservation(transfer_id)
            and len(reservation.pages) == self._limits.pages_for(prompt.num_paged)
            and mismatch(self._fingerprint, reservation.fingerprint) is None
        )

    def _abort(self, attempt: AttemptId) -> None:
        transfer_id = attempt.transfer_id
        self._over.add(transfer_id, self._now())
        if self._rehearsals.abort(transfer_id):
            return
        prompt = self._prompts.get(transfer_id)
        if prompt is None:
            self._outbox.abort_done(attempt, was_running=False)
            return
        self._aborting.setdefault(transfer_id, transfer_id in self._live)
        self._give_up(prompt)

    def _end_late(self) -> bool:
        """Ends prompts that exceeded their time; True if there were any."""
        before = self._now() - self._limits.max_request_s
        late = [self._prompts[i] for i in self._live if self._prompts[i].arrived_s < before]
        for prompt in late:
            text = f"the attempt ran longer than {self._limits.max_request_s:g} s"
            self._fail(prompt, "DEADLINE_EXCEEDED", text)
        return bool(late)

    def _take_reports(self) -> bool:
        """Handles results of pushes; True if there were any."""
        reports = self._sender.poll()
        has_applied = self._apply_ended()  # a pushed prompt was computed, which is reported first
        for report in reports:
            prompt = self._prompts.get(report.transfer_id)
            if prompt is None:
                self._rehearsals.take_report(report)
                continue
            match report:
                case Ended():
                    self._end(prompt)
                case Pushed():
                    self._kv_bytes += report.num_bytes
                    self._outbox.say(prompt_pushed(prompt.attempt, report))
                case PushFailed():
                    self._leave_queues(prompt)
                    self._outbox.say(push_failed(prompt.attempt, report))
        return bool(reports) or has_applied

    # Before a forward: which prompts take part, and with which pages.

    def _admit(self) -> bool:
        """Gives the oldest waiting prompts their pages, as many as there is room for."""
        has_admitted = False
        while self._waiting and len(self._computing) < self._limits.max_num_seqs:
            if not self._begin(self._waiting[0]):
                break
            has_admitted = True
            del self._waiting[0]
        return has_admitted

    def _begin(self, prompt: Prompt) -> bool:
        """Gives a prompt its pages, with any known KV; False if too few are free."""
        num_pages = self._limits.pages_for(prompt.num_paged)
        given = self._cache.begin(prompt.keys, prompt.num_paged, num_pages)
        if given is None:
            return False
        prompt.prefix, prompt.pages = given
        prompt.num_cached = prompt.prefix.num_found * self._cache.unit_size
        prompt.num_launched = prompt.num_computed = prompt.num_cached
        prompt.started_s = self._now()
        self._computing.append(prompt)
        if cached := prompt.take_final_pages(prompt.num_cached, self._limits.page_size):
            self._sender.pages_ready(prompt.attempt.transfer_id, cached)
        if not prompt.num_left:
            self._sender.computed(prompt.attempt.transfer_id, prompt.boundary)
            self._conclude(prompt)
        return True

    def _schedule(self) -> list[PromptChunk]:
        """Chooses prompts for the forward, and their number of tokens."""
        sizes = prompts.schedule(
            [(prompt.num_left, prompt.can_split) for prompt in self._computing],
            budget=self._limits.max_num_batched_tokens,
            block_size=self._limits.block_size,
        )
        return [
            PromptChunk(prompt, prompt.num_launched, prompt.num_launched + size)
            for prompt, size in zip(self._computing, sizes, strict=True)
            if size
        ]

    def _launch(self, chunks: Sequence[PromptChunk]) -> bool:
        """Launches a forward; False if there is nothing to compute."""
        if not chunks:
            return False
        try:
            self._executor.launch(chunks)
        except ForwardFailed as failure:
            for chunk in chunks:
                self._fail(chunk.prompt, "INTERNAL", str(failure), retryable=True)
        return True

    # After a forward.

    def _apply_ended(self) -> bool:
        """Handles forwards that have ended; True if there were any."""
        has_applied = False
        while self._executor.has_ended():
            has_applied = True
            for chunk in self._executor.read():
                self._apply(chunk)
        return has_applied

    def _apply(self, chunk: PromptChunk) -> None:
        prompt = chunk.prompt
        prompt.num_computed = chunk.end
        self._cache.add(prompt.prefix, prompt.pages, chunk.end)
        if prompt.is_unread and not prompt.is_being_written:
            self._release(prompt)
        if prompt in self._computing and prompt.num_computed == prompt.num_paged:
            self._conclude(prompt)

    def _conclude(self, prompt: Prompt) -> None:
        """The prompt's KV is complete."""
        self._computing.remove(prompt)
        self._outbox.say(prefill_done(prompt, self._now()))

    # Ends.

    def _fail(
        self,
        prompt: Prompt,
        code: FailureCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
    ) -> None:
        self._give_up(prompt)
        self._outbox.failed(prompt.attempt, code, message, retryable=retryable, field=field)

    def _give_up(self, prompt: Prompt) -> None:
        """The prompt is not computed or pushed any more; its pages wait until that has ended."""
        self._leave_queues(prompt)
        self._sender.abort(prompt.attempt.transfer_id)

    def _leave_queues(self, prompt: Prompt) -> None:
        self._live.discard(prompt.attempt.transfer_id)
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        if prompt in self._computing:
            self._computing.remove(prompt)

    def _end(self, prompt: Prompt) -> None:
        """Nothing reads the prompt's pages any more; a forward that writes them must end first."""
        self._leave_queues(prompt)
        prompt.is_unread = True
        if not prompt.is_being_written:
            self._release(prompt)

    def _release(self, prompt: Prompt) -> None:
        """Nothing reads or writes the prompt's pages any more."""
        attempt = prompt.attempt
        transfer_id = attempt.transfer_id
        del self._prompts[transfer_id]
        self._cache.end(prompt.prefix)
        self._pool.release(prompt.pages)
        self._over.add(transfer_id, self._now())
        if transfer_id in self._aborting:
            was_running = self._aborting.pop(transfer_id)
            self._outbox.abort_done(attempt, was_running=was_running)
