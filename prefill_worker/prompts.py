"""A prompt in a prefill engine: its data, its schedule, and its events.

First come, first served, with one token budget. A prompt gets all its pages before it begins, so
that no prompt that has begun waits for pages. Pure: executor.py runs forwards, and kvtransfer's
sender pushes pages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import Cause, Pushed, PushFailed
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import AttemptId, BoundaryState, PageRef
from effuse.prefill_worker.prefix_cache import HeldPrefix, Key
from effuse.worker.config import PrefillConfig
from effuse.worker.messages import Failed, FailureCode, PrefillDone, PromptPushed

LOG = logging.getLogger(__name__)

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


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """One attempt's prompt. Positions [0, num_paged) get KV in pages; the rest travels as ids."""

    attempt: AttemptId
    token_ids: tuple[int, ...]
    block_origin: int
    num_paged: int
    can_split: bool  # into chunks that end at a block's end; a bidirectional prompt cannot
    arrived_s: float
    started_s: float = 0.0
    num_cached: int = 0  # tokens whose KV was there at its beginning
    num_launched: int = 0  # tokens in launched forwards, including the current one
    num_computed: int = 0  # tokens whose KV is there
    num_ready: int = 0  # pages that the sender knows
    pages: tuple[PageRef, ...] = ()
    keys: tuple[Key, ...] = ()  # keys under which the cache has, or will have, its beginning
    prefix: HeldPrefix = field(default_factory=HeldPrefix)
    is_unread: bool = False  # its handoff has ended: only a running forward may use its pages

    @property
    def num_left(self) -> int:
        """Tokens that are not in a forward yet."""
        return self.num_paged - self.num_launched

    @property
    def is_being_written(self) -> bool:
        """Whether an unfinished forward writes its pages."""
        return self.num_launched > self.num_computed

    @property
    def page_ids(self) -> list[int]:
        """Its pages, in the order of the prompt."""
        return [page.page_id for page in self.pages]

    def take_final_pages(self, end: int, page_size: int) -> list[int]:
        """Further pages that no forward will write again once tokens up to `end` are computed."""
        final = len(self.pages) if end == self.num_paged else end // page_size
        pages = self.page_ids[self.num_ready : final]
        self.num_ready = final
        return pages

    def boundary(self, hidden: bytes | None = None) -> BoundaryState:
        """The boundary that goes with the pages; `hidden` is its row, for models that need it."""
        return BoundaryState(
            prompt_len=len(self.token_ids),
            prompt_digest=prompt_digest(self.token_ids),
            tail_token_ids=self.token_ids[self.num_paged :],
            hidden=hidden,
        )


class PromptRefused(ValueError):
    """This prompt can never be computed here. The message has the found and the allowed value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """Limits of an engine in total and in one forward."""

    max_num_batched_tokens: int
    max_num_seqs: int  # prompts that are computed at a time
    max_model_len: int  # tokens of prompt and answer
    num_pages: int
    page_size: int  # tokens
    block_size: int  # tokens
    vocab_size: int
    mask_token_id: int
    max_request_s: float = PrefillConfig.max_request_s
    enable_prefix_caching: bool = PrefillConfig.enable_prefix_caching

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens must be at least a block of {self.block_size}, "
                f"got {self.max_num_batched_tokens}"
            )
        if min(self.max_num_seqs, self.max_model_len, self.num_pages, self.page_size) < 1:
            raise ValueError(f"limits must be at least 1, got {self}")

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages for the KV of this many tokens."""
        return -(-num_tokens // self.page_size)


def check_prompt(
    token_ids: Sequence[int], num_paged: int, can_split: bool, limits: PrefillLimits
) -> None:
    """Raises PromptRefused with the numbers for a prompt that can never be computed here."""
    if not token_ids:
        raise PromptRefused("prompt_token_ids must not be empty")
    if len(token_ids) >= limits.max_model_len:
        raise PromptRefused(
            f"a prompt of {len(token_ids)} tokens leaves no room for an answer; "
            f"max_model_len is {limits.max_model_len}"
        )
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise PromptRefused(
            f"prompt_token_ids must lie in 0..{limits.vocab_size - 1}, "
            f"got {min(token_ids)}..{max(token_ids)}"
        )
    if limits.mask_token_id in token_ids:
        raise PromptRefused(f"the prompt contains the mask token {limits.mask_token_id}")
    if limits.pages_for(num_paged) > limits.num_pages:
        raise PromptRefused(
            f"the prompt needs {limits.pages_for(num_paged)} pages of {limits.page_size} tokens; "
            f"the pool has {limits.num_pages}"
        )
    if not can_split and num_paged > limits.max_num_batched_tokens:
        raise PromptRefused(
            f"a bidirectional prompt of {num_paged} tokens cannot be split; "
            f"max_num_batched_tokens is {limits.max_num_batched_tokens}"
        )


def schedule(left: Sequence[tuple[int, bool]], *, budget: int, block_size: int) -> list[int]:
    """Tokens of each prompt in the next forward, 0 if it waits; oldest first.

    left: (tokens to compute, can be split) of each. Chunks end at a block's end, or with the
    prompt.
    """
    chunks: list[int] = []
    for tokens, can_split in left:
        chunk = tokens
        if tokens > budget:
            chunk = budget // block_size * block_size if can_split else 0
        chunks.append(chunk)
        budget -= chunk
    return chunks


def prefill_done(prompt: Prompt, now: float) -> PrefillDone:
    """The prompt's KV is complete."""
    return PrefillDone(
        attempt=prompt.attempt,
        queue_s=prompt.started_s - prompt.arrived_s,
        compute_s=now - prompt.started_s,
        cached_tokens=prompt.num_cached,
    )


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
