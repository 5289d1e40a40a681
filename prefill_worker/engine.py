"""The prefill engine: prompt in, KV pages out. One `step` is one forward over chunks of prompts.

Owns the loop and the messages; what takes part is scheduler.py, how pages leave is kvtransfer's
sender, and the forward is the model runner's. On a device one forward is launched while another
runs, and neither is waited for: layers of pages leave as the forward itself says that they are
stored. Never computes logits. Single-threaded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from effuse.kvtransfer.connector import Pending, Pushed, PushFailed
from effuse.kvtransfer.layout import Fingerprint, mismatch
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.sender import Ended, HandoffSender
from effuse.kvtransfer.tombstones import Tombstones
from effuse.models.config import ModelConfig
from effuse.models.part import Part, PartResult
from effuse.placement.records import Load
from effuse.prefill_worker import scheduler
from effuse.prefill_worker.flight import Flight, Mark, PromptChunk, launched
from effuse.prefill_worker.outbox import Outbox
from effuse.prefill_worker.prompt import Prompt
from effuse.prefill_worker.scheduler import PrefillLimits, PromptRefused
from effuse.prefill_worker.scratch import Scratch
from effuse.worker import messages
from effuse.worker.messages import CoreEvent, StartPrefill, ToEngine

LOG = logging.getLogger(__name__)

KEEP_ABORTED_S = 600.0
MOST_FAILED_FORWARDS = 8  # in a row; then the device is taken for lost and the process ends
MOST_FLIGHTS = 2  # forwards that were launched and have not ended


class Forward(Protocol):
    """The part of the model runner that the engine uses."""

    def progress(self) -> Pending[int]:
        """Says, from any thread, how many groups of layers the next forward has stored."""
        ...

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results in the order of the parts."""
        ...


class PrefillEngine:
    """An EngineCore. Emits `PrefillDone`, then `PromptPushed` once the receiver has everything."""

    def __init__(
        self,
        forward: Forward,
        model: ModelConfig,
        pool: PagePool,
        memory: PageMemory,
        sender: HandoffSender,
        limits: PrefillLimits,
        fingerprint: Fingerprint,
        *,
        now: Callable[[], float],
        max_request_s: float,
        close: Callable[[], None],
        mark: Mark | None = None,
    ) -> None:
        """`mark` says when queued forwards have ended; None where they have when they return."""
        self._forward = forward
        self._model = model
        self._pool = pool
        self._memory = memory
        self._sender = sender
        self._limits = limits
        self._fingerprint = fingerprint
        self._now = now
        self._max_request_s = max_request_s
        self._close = close
        self._mark = mark
        self._flights: deque[Flight] = deque()
        self._outbox = Outbox()
        self._scratch = Scratch(pool, sender, self._outbox)
        self._tombstones = Tombstones(KEEP_ABORTED_S)
        self._prompts: dict[str, Prompt] = {}  # everything not ended, draining ones included
        self._waiting: list[Prompt] = []
        self._computing: list[Prompt] = []
        self._live: set[str] = set()  # transfers that have not failed or been aborted
        self._aborting: dict[str, bool] = {}  # transfers whose AbortDone is due: did they run
        self._failed_forwards = 0
        self._steps = 0
        self._kv_bytes = 0

    def step(self) -> bool:
        """Hears of pushes, admits, launches a forward, and takes note of those that have ended."""
        has_moved = self._hear() | self._admit()
        chunks = self._take_chunks() if len(self._flights) < MOST_FLIGHTS else []
        if chunks:
            self._launch(chunks)
        has_landed = self._land()
        return has_moved or bool(chunks) or has_landed

    def is_working(self) -> bool:
        """Whether a forward that was launched has not ended."""
        return bool(self._flights)

    def handle(self, message: ToEngine) -> None:
        """Takes one message of the front."""
        match message:
            case StartPrefill():
                self._start(message)
            case messages.PushTo(reservation=reservation):
                self._push_to(reservation)
            case messages.PushRehearsal(reservation=reservation):
                self._scratch.push(reservation, is_busy=bool(self._waiting))
            case messages.Abort(attempt=attempt):
                self._abort(attempt)
            case messages.StartDecode(attempt=attempt) | messages.StartRehearsal(attempt=attempt):
                self._outbox.failed(attempt, "INVALID_ARGUMENT", "this is a prefill worker")
            case messages.WriterGone() | messages.Shutdown():
                pass  # nobody writes here; the process ends itself

    def outbox(self) -> Sequence[CoreEvent]:
        """What is to be said since the last call, in order."""
        return self._outbox.drain()

    def load(self) -> Load:
        """What the engine has and does now."""
        unfinished = [*self._waiting, *self._computing]
        return Load(
            running=len(self._prompts) - len(self._waiting),
            waiting=len(self._waiting),
            runnable=len(self._computing),
            total_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            quarantined_pages=self._pool.count(PageState.QUARANTINED),
            queued_tokens=sum(prompt.num_left for prompt in unfinished),
            steps=self._steps,
            kv_bytes=self._kv_bytes,
        )

    def audit(self) -> None:
        """Checks that every page is free or some prompt's. Raises AuditError."""
        held = [page for prompt in self._prompts.values() for page in prompt.pages]
        self._pool.audit([*held, *self._scratch.pages()])

    def close(self) -> None:
        """Stops the connector."""
        self._close()

    # What comes in.

    def _start(self, message: StartPrefill) -> None:
        attempt = message.attempt
        if attempt.transfer_id in self._tombstones:
            self._outbox.failed(attempt, "ABORTED", "the attempt was aborted before it began")
        elif attempt.transfer_id in self._prompts:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the attempt is running")
        else:
            self._join(message)

    def _join(self, message: StartPrefill) -> None:
        prompt = self._prompt(message)
        try:
            scheduler.check_prompt(
                prompt.token_ids, prompt.num_paged, prompt.can_split, self._limits
            )
        except PromptRefused as error:
            self._outbox.failed(message.attempt, "INVALID_ARGUMENT", str(error))
            return
        transfer_id = message.attempt.transfer_id
        self._prompts[transfer_id] = prompt
        self._live.add(transfer_id)
        self._waiting.append(prompt)
        self._sender.begin(message.attempt)

    def _prompt(self, message: StartPrefill) -> Prompt:
        """A block-causal prompt is paged up to its last whole block, a bidirectional one wholly."""
        length = len(message.prompt_token_ids)
        can_split = self._model.prompt_attention == "causal_blocks"
        block = self._limits.block_size
        return Prompt(
            attempt=message.attempt,
            token_ids=message.prompt_token_ids,
            block_origin=self._model.block_origin(length),
            num_paged=length // block * block if can_split else length,
            can_split=can_split,
            arrived_s=self._now(),
        )

    def _push_to(self, reservation: Reservation) -> None:
        transfer_id, attempt = reservation.transfer_id, reservation.attempt
        prompt = self._prompts.get(transfer_id)
        if transfer_id in self._tombstones or (prompt and transfer_id not in self._live):
            return  # it has ended, and its front was told
        if prompt is None or prompt.attempt != attempt:
            self._outbox.failed(attempt, "INVALID_ARGUMENT", "no prompt of this attempt is here")
            return
        found = mismatch(self._fingerprint, reservation.fingerprint)
        needed = self._limits.pages_for(prompt.num_paged)
        if found is not None:
            self._give_up(prompt)
            self._outbox.failed(attempt, "FAILED_PRECONDITION", str(found), field=found.name)
        elif self._sender.reservation(transfer_id) is not None:
            self._give_up(prompt)
            self._outbox.failed(attempt, "INVALID_ARGUMENT", "a second reservation came")
        elif len(reservation.pages) != needed:
            self._give_up(prompt)
            text = f"the prompt fills {needed} pages, {len(reservation.pages)} are reserved"
            self._outbox.failed(attempt, "INVALID_ARGUMENT", text)
        else:
            self._sender.address(reservation)

    def _abort(self, attempt: AttemptId) -> None:
        transfer_id = attempt.transfer_id
        self._tombstones.add(transfer_id, self._now())
        if self._scratch.abort(transfer_id):
            return
        prompt = self._prompts.get(transfer_id)
        if prompt is None:
            self._outbox.abort_done(attempt, was_running=False)
            return
        self._aborting.setdefault(transfer_id, transfer_id in self._live)
        self._give_up(prompt)

    def _hear(self) -> bool:
        """Takes in what the sender and the clock have brought. True if there was anything."""
        late = self._late()
        for prompt in late:
            self._give_up(prompt)
            text = f"the attempt ran longer than {self._max_request_s:g} s"
            self._outbox.failed(prompt.attempt, "DEADLINE_EXCEEDED", text)
        reports = self._sender.poll()
        has_landed = self._land()  # what was pushed was computed: that is said first
        for report in reports:
            if self._scratch.take(report):
                continue
            prompt = self._prompts[report.transfer_id]
            match report:
                case Ended():
                    self._end(prompt)
                case Pushed():
                    self._kv_bytes += report.num_bytes
                    self._outbox.pushed(prompt.attempt, report)
                case PushFailed():
                    self._leave(prompt)
                    self._outbox.missed(prompt.attempt, report)
        return bool(reports or late) or has_landed

    def _late(self) -> list[Prompt]:
        before = self._now() - self._max_request_s
        return [self._prompts[i] for i in self._live if self._prompts[i].arrived_s < before]

    # One step.

    def _admit(self) -> bool:
        """Gives the oldest waiting prompts their pages, as many as there is room for."""
        count = scheduler.admit(
            (self._limits.pages_for(prompt.num_paged) for prompt in self._waiting),
            num_computing=len(self._computing),
            num_free=self._pool.num_free,
            most=self._limits.max_num_seqs,
        )
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        for prompt in admitted:
            pages = self._pool.allocate_committed(self._limits.pages_for(prompt.num_paged))
            assert pages is not None, "admission counts free pages"
            prompt.pages = pages
            prompt.started_s = self._now()
            self._computing.append(prompt)
            if not prompt.num_left:
                self._sender.computed(prompt.attempt.transfer_id, prompt.boundary)
                self._conclude(prompt)
        return count > 0

    def _take_chunks(self) -> list[PromptChunk]:
        chunks = scheduler.schedule(
            [(prompt.num_left, prompt.can_split) for prompt in self._computing],
            budget=self._limits.max_num_batched_tokens,
            block_size=self._limits.block_size,
        )
        return [
            PromptChunk(prompt, self._part(prompt, size))
            for prompt, size in zip(self._computing, chunks, strict=True)
            if size
        ]

    def _part(self, prompt: Prompt, size: int) -> Part:
        start = prompt.num_launched
        return Part(
            token_ids=prompt.token_ids[start : start + size],
            start=start,
            pages=prompt.page_ids,
            num_stored=size,
            block_origin=prompt.block_origin,
            keep_boundary=self._model.shift_logits and size == prompt.num_left,
        )

    def _launch(self, chunks: Sequence[PromptChunk]) -> None:
        """Queues a forward, its pages handed on before: their layers leave while it runs."""
        progress = self._forward.progress()
        for chunk in chunks:
            self._hand_on(chunk, progress)
        results = self._run(chunks)
        if not results:
            return
        flight = launched(chunks, [result.boundary for result in results], self._mark)
        self._flights.append(flight)
        for index, chunk in enumerate(chunks):
            chunk.prompt.num_launched += chunk.part.num_stored
            if not chunk.prompt.num_left:
                transfer_id = chunk.prompt.attempt.transfer_id
                self._sender.computed(transfer_id, flight.boundary(index))

    def _hand_on(self, chunk: PromptChunk, progress: Pending[int]) -> None:
        """Gives the sender the pages that this chunk makes final, the unused end of the last one
        determined."""
        prompt = chunk.prompt
        end = chunk.part.start + chunk.part.num_stored
        used = prompt.num_paged % self._limits.page_size
        if used and end == prompt.num_paged:
            self._memory.zero_tail(prompt.pages[-1].page_id, used)
        pages = prompt.take_final_pages(end, self._limits.page_size)
        if pages:
            self._sender.pages_ready(prompt.attempt.transfer_id, pages, progress)

    def _run(self, chunks: Sequence[PromptChunk]) -> list[PartResult]:
        """One forward; where it fails, only what was in it fails, and the engine goes on."""
        self._steps += 1
        try:
            results = self._forward.run([chunk.part for chunk in chunks])
        except Exception:
            LOG.exception("a forward over %d prompts failed", len(chunks))
            self._failed_forwards += 1
            if self._failed_forwards >= MOST_FAILED_FORWARDS:
                raise
            for chunk in chunks:
                self._give_up(chunk.prompt)
                text = "the model failed in this step"
                self._outbox.failed(chunk.prompt.attempt, "INTERNAL", text, retryable=True)
            return []
        self._failed_forwards = 0
        return results

    def _land(self) -> bool:
        """Takes note of forwards that have ended; True if there were any."""
        has_landed = False
        while self._flights and self._flights[0].is_over():
            has_landed = True
            for chunk in self._flights.popleft().chunks:
                self._apply(chunk)
        return has_landed

    def _apply(self, chunk: PromptChunk) -> None:
        prompt = chunk.prompt
        prompt.num_computed += chunk.part.num_stored
        if prompt.is_unread and not prompt.is_in_flight:
            self._release(prompt)
        if prompt in self._computing and prompt.num_computed == prompt.num_paged:
            self._conclude(prompt)

    def _conclude(self, prompt: Prompt) -> None:
        """The prompt's KV is there."""
        self._computing.remove(prompt)
        self._outbox.computed(prompt, self._now())

    # How it ends.

    def _give_up(self, prompt: Prompt) -> None:
        """Nothing more of the prompt is computed or pushed; its pages wait until that has ended."""
        self._leave(prompt)
        self._sender.abort(prompt.attempt.transfer_id)

    def _leave(self, prompt: Prompt) -> None:
        """Takes a prompt out of the queues."""
        self._live.discard(prompt.attempt.transfer_id)
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        if prompt in self._computing:
            self._computing.remove(prompt)

    def _end(self, prompt: Prompt) -> None:
        """Nothing reads the prompt's pages any more; a forward that writes them ends first."""
        self._leave(prompt)
        prompt.is_unread = True
        if not prompt.is_in_flight:
            self._release(prompt)

    def _release(self, prompt: Prompt) -> None:
        """Nothing reads or writes the prompt's pages any more."""
        attempt = prompt.attempt
        transfer_id = attempt.transfer_id
        self._pool.release(self._prompts.pop(transfer_id).pages)
        if transfer_id in self._aborting:
            was_running = self._aborting.pop(transfer_id)
            self._outbox.abort_done(attempt, was_running=was_running)
