"""Launches forwards over chunks of prompts, lets their pages leave meanwhile, and reports what
became of them.

In a pipeline the next chunks begin in the first stage before earlier ones have ended in the last.

On a device the host is one forward ahead, so that scheduling and packing cost the device no time:
layers leave as soon as the forward itself marks them as stored. On the CPU a forward has ended when
its call returns.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effuse.kernels.pages import place_on_cuda
from effuse.kvtransfer.connector import Cause, Pending, Pushed, PushFailed
from effuse.kvtransfer.ends import HandoffSender
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import AttemptId, BoundaryState
from effuse.models.part import Part, PartResult, Pipeline, PromptForward
from effuse.prefill_worker.prompts import Prompt, PromptChunk
from effuse.worker.engine_process import ForwardFailed, ForwardGuard
from effuse.worker.messages import Failed, FailureCode, PromptPushed

LOG = logging.getLogger(__name__)

IsOver = Callable[[], bool]
Mark = Callable[[], IsOver]  # marks all work queued so far; the result tests whether that has ended

_MOST_RUNNING = 2  # forwards that were launched and have not ended


@dataclass(slots=True, eq=False)
class LaunchedForward:
    """A forward that may not have ended."""

    chunks: Sequence[PromptChunk]
    progress: Pending[int]  # groups of layers that it has stored
    begun: object = None  # of a pipeline
    mark: IsOver | None = None  # once its results are known, which may be on their way
    rows: Sequence[Tensor | None] = ()  # then: each chunk's boundary row on the host
    has_failed: bool = False  # part of it may still run

    def is_over(self) -> bool:
        return self.mark is not None and self.mark()


class PromptExecutor:
    """Forwards in the order of their launches, of which two may be running."""

    def __init__(
        self,
        forward: PromptForward,
        memory: PageMemory,
        sender: HandoffSender,
        *,
        needs_boundary: bool,
        mark: Mark | None,
        on_progress: Callable[[], None] = lambda: None,
        pipeline: Pipeline[Any] | None = None,
    ) -> None:
        """`needs_boundary`: the model shifts its logits, so that a vector goes with the pages.
        `mark` shows when queued forwards have ended; None if they have when they return.
        `on_progress` is called when a launched forward has stored more layers. With a `pipeline`
        forwards are begun there, and results are read when no more can begin.
        """
        self.num_forwards = 0
        self.num_prompts = 0  # sum over the forwards
        self.num_tokens = 0
        self._forward = forward
        self._memory = memory
        self._sender = sender
        self._needs_boundary = needs_boundary
        self._mark = mark
        self._on_progress = on_progress
        self._pipeline = pipeline
        self._most_running = _MOST_RUNNING if pipeline is None else pipeline.most_begun
        self._num_stored: int | None = 0  # groups of layers of the oldest running forward
        self._guard = ForwardGuard()
        self._running: deque[LaunchedForward] = deque()

    @property
    def page_bytes(self) -> int:
        """Of all ranks."""
        return self._memory.layout.span_bytes

    @property
    def is_running(self) -> bool:
        """Whether a forward was launched whose end was not read."""
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        """Whether a forward must end before the next launch."""
        return len(self._running) >= self._most_running

    def launch(self, chunks: Sequence[PromptChunk]) -> None:
        """Queues a forward, and hands its pages to the sender before: their layers leave while it
        runs.

        Raises ForwardFailed; the caller abandons the prompts in it, and reads the forward's end
        like any other's, because layers that were queued before the failure write their pages.
        """
        parts = [self._part(chunk) for chunk in chunks]
        progress = self._forward.progress()
        for chunk in chunks:
            self._hand_on(chunk, progress)
        self.num_forwards += 1
        self.num_prompts += len(parts)
        launched = LaunchedForward(chunks, progress)
        for chunk in chunks:
            chunk.prompt.num_launched = chunk.end
        self._running.append(launched)
        if self._pipeline is not None:
            launched.begun = self._pipeline.begin(parts)
        else:
            try:
                results = self._guard.run(lambda: self._forward.run(parts), len(parts))
            except ForwardFailed:
                launched.has_failed, launched.mark = True, self._marked()
                raise
            self._take(launched, results)
        self.num_tokens += sum(chunk.num_tokens for chunk in chunks)
        for at, chunk in enumerate(chunks):
            if not chunk.prompt.num_left:
                boundary = partial(_boundary, chunk.prompt, launched, at)
                self._sender.computed(chunk.prompt.attempt.transfer_id, boundary)

    def _take(self, launched: LaunchedForward, results: Sequence[PartResult]) -> None:
        """Takes a forward's results, which may be on their way from a device."""
        rows = [None if one.boundary is None else _to_host(one.boundary) for one in results]
        launched.rows = rows
        for chunk, row in zip(launched.chunks, rows, strict=True):
            if chunk.prompt.to_pool and row is not None and not chunk.prompt.can_split:
                chunk.prompt.row = row.to(self._memory.device, non_blocking=True)
        launched.mark = self._marked()

    def _marked(self) -> IsOver:
        return (lambda: True) if self._mark is None else self._mark()

    def has_ended(self, *, waits: bool = False) -> bool:
        """Whether the oldest running forward has ended. Its progress is a sign of life, because a
        long forward ends long after its launch. Of a pipeline it is waited for if the pipeline is
        full, or if the caller `waits` because nothing else can begin.
        """
        if not self._running:
            return False
        oldest = self._running[0]
        if self._pipeline is not None and oldest.mark is None and (waits or self.is_full):
            self._take(oldest, self._pipeline.end(oldest.begun))
        before, self._num_stored = self._num_stored, oldest.progress()
        if self._num_stored != before:
            self._on_progress()
        return oldest.is_over()

    def read(self) -> LaunchedForward:
        """The oldest forward, which has ended."""
        return self._running.popleft()

    def _part(self, chunk: PromptChunk) -> Part:
        prompt = chunk.prompt
        return Part(
            token_ids=prompt.token_ids[chunk.start : chunk.end],
            start=chunk.start,
            pages=prompt.page_ids,
            num_stored=chunk.num_tokens,
            block_origin=prompt.block_origin,
            keep_boundary=self._needs_boundary and chunk.end == prompt.num_paged,
        )

    def _hand_on(self, chunk: PromptChunk, progress: Pending[int]) -> None:
        """Gives the sender the pages that this chunk makes final, with the unused end of the last
        one cleared.
        """
        prompt, page_size = chunk.prompt, self._memory.layout.span
        used = prompt.num_paged % page_size
        if used and chunk.end == prompt.num_paged:
            self._memory.zero_tail(prompt.pages[-1].page_id, used)
        pages = prompt.take_final_pages(chunk.end, page_size)
        if pages:
            self._sender.pages_ready(prompt.attempt.transfer_id, pages, progress)


def _boundary(prompt: Prompt, launched: LaunchedForward, at: int) -> BoundaryState | None:
    """The boundary of a prompt whose last chunk is number `at` of a forward, once that has ended.

    May be called from any thread.
    """
    if not launched.is_over():
        return None
    row = launched.rows[at]
    raw = None if row is None else row.contiguous().view(torch.uint8).numpy().tobytes()
    return prompt.boundary(raw)


def mark_of(device: torch.device) -> Mark | None:
    """A function that marks queued work on a device; None if nothing is ever queued."""
    return (lambda: place_on_cuda().query) if device.type == "cuda" else None


def _to_host(row: Tensor) -> Tensor:
    """A copy [hidden_size] in progress; into memory that is not pinned it would be synchronous."""
    copy = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda)
    return copy.copy_(row, non_blocking=True)


CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.UNKNOWN_TRANSFER: "ABORTED",
    Cause.ATTEMPT: "ABORTED",
    Cause.MALFORMED: "INTERNAL",
    Cause.LEASE: "UNAVAILABLE",
    Cause.UNRESERVED: "UNAVAILABLE",
    Cause.PEER: "UNAVAILABLE",
}
FOR_EVERYONE = (Cause.FINGERPRINT, Cause.MALFORMED)  # another attempt with this pair would fail too


def prompt_pushed(attempt: AttemptId, report: Pushed) -> PromptPushed:
    """The handoff has ended."""
    return PromptPushed(
        attempt=attempt,
        pages=report.pages,
        bytes=report.num_bytes,
        push_s=report.seconds,
        transport=report.route.name,
        is_fallback=report.route.is_fallback,
        moved_s=report.moved_s,
    )


def push_failed(attempt: AttemptId, report: PushFailed) -> Failed:
    """The handoff failed. The peer's address and the library's text only go to the log."""
    message = report.message
    if report.cause is Cause.PEER:
        LOG.warning(
            "request %s, attempt %d: its pages could not be pushed: %s",
            *(attempt.request_id, attempt.attempt, message),
        )
        message = (
            "the pages could not be pushed, because the decode worker's pool cannot be reached"
        )
    return Failed(
        attempt=attempt,
        code=CODES.get(report.cause, "DATA_LOSS"),
        message=message,
        retryable=report.cause not in FOR_EVERYONE,
        field="reservation" if report.cause is Cause.UNRESERVED else None,
    )
