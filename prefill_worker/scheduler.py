"""Which prompts take part in the next forward, and with how many tokens. Pure policy on numbers.

First come, first served, under one token budget; pages are taken for a whole prompt at once, so
that nothing that has begun ever waits for pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from effuse.prefill_worker.config import PrefillConfig


class PromptRefused(ValueError):
    """This prompt can never be computed here. The message says found and allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What an engine can hold and do in one forward."""

    max_num_batched_tokens: int
    max_num_seqs: int  # prompts that are being computed at once
    max_model_len: int  # tokens of prompt and answer
    num_pages: int
    page_size: int  # tokens
    block_size: int  # tokens
    vocab_size: int
    mask_token_id: int
    max_request_s: float = PrefillConfig.max_request_s

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens must be at least a block of {self.block_size}, "
                f"got {self.max_num_batched_tokens}"
            )
        if min(self.max_num_seqs, self.max_model_len, self.num_pages, self.page_size) < 1:
            raise ValueError(f"limits must be at least 1, got {self}")

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the KV of this many tokens."""
        return -(-num_tokens // self.page_size)


def check_prompt(
    token_ids: Sequence[int], num_paged: int, can_split: bool, limits: PrefillLimits
) -> None:
    """Raises PromptRefused, with the numbers, for a prompt that can never be computed here."""
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


def admit(waiting_pages: Iterable[int], *, num_computing: int, num_free: int, most: int) -> int:
    """How many of the waiting prompts begin now, oldest first.

    waiting_pages: pages that each needs. num_computing: prompts that have begun, at most `most`.
    """
    num_admitted = 0
    for pages in waiting_pages:
        if num_computing >= most or pages > num_free:
            break
        num_admitted += 1
        num_computing += 1
        num_free -= pages
    return num_admitted


def schedule(left: Sequence[tuple[int, bool]], *, budget: int, block_size: int) -> list[int]:
    """Tokens of each prompt in the next forward, 0 where it waits; oldest first.

    left: (tokens to compute, can be split) of each. Chunks end with a block, or with the prompt.
    """
    chunks: list[int] = []
    for tokens, can_split in left:
        chunk = tokens
        if tokens > budget:
            chunk = budget // block_size * block_size if can_split else 0
        chunks.append(chunk)
        budget -= chunk
    return chunks
