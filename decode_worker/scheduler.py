"""Which requests take part in the next step: admission, growth, preemption and the token budget.

Pure policy on numbers: requests are indices into the engine's list, oldest first. It neither holds
pages nor knows tokens. The oldest running request always advances, unless a remote writer still
holds pages that it needs, or it is a prompt that leaves room to answers. Those writers have a
lease, and a prompt leaves room for a limited time (`room.py`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from effuse.decode_worker.sequence import RequestError
from effuse.worker.config import DecodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Limits of an engine in total and in one step."""

    max_num_batched_tokens: int  # rows of one forward: prompt chunks and blocks in flight
    max_num_seqs: int  # requests that hold pages
    max_model_len: int  # tokens of prompt and answer
    num_pages: int
    page_size: int  # tokens, of all ranks that cut the context together
    block_size: int  # tokens
    context_degree: int = 1  # ranks that cut the context; each holds such a part of a page
    max_window: int = DecodeConfig.max_window  # blocks with masks that one request has in flight
    max_stop_ids: int = DecodeConfig.max_stop_ids

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 2 * self.block_size:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than "
                f"{2 * self.block_size}: a settled and an active block of {self.block_size}"
            )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the KV of the first `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def written_pages(self, num_tokens: int, num_held: int) -> int:
        """Pages of a prefill worker with the first `num_tokens` tokens, without those in the first
        `num_held` pages here."""
        degree = self.context_degree
        return max(0, -(-num_tokens * degree // self.page_size) - num_held * degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Most resources that one request can ever need, known at its start."""

    most_cached: int  # tokens before its last block
    most_rows: int  # of one denoise step
    first_chunk: int  # rows that its prefill cannot split; 0 without prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one running request for the next step."""

    rows: int  # all it could take
    least: int  # smallest share: all blocks in flight of a denoise step, or a chunk of a prefill
    growth: int  # pages that it needs beside those it holds, for the KV that the step stores
    holds_pages: bool
    is_prompt: bool = False  # of which a step computes no more than answers leave time for


UNDER_WAY: Final = Demand(rows=0, least=0, growth=0, holds_pages=True)
"""Of a request in a forward whose results are not there."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows granted to each running request, 0 if it waits; first, those that lose pages."""

    rows: tuple[int, ...]
    preempted: tuple[int, ...]


def check_fits(footprint: Footprint, limits: DecodeLimits, cause: str) -> None:
    """Raises RequestError with the numbers if a request could never finish here. `cause`: the field
    that decides how large a step is."""
    pages = limits.pages_for(footprint.most_cached)
    if pages > limits.num_pages:
        raise RequestError(
            f"the request may need {pages} pages of {limits.page_size} tokens; "
            f"the pool has {limits.num_pages}",
            "prompt",
        )
    if footprint.most_rows > limits.max_num_batched_tokens:
        raise RequestError(
            f"one denoise step may need {footprint.most_rows} tokens (blocks of "
            f"{limits.block_size}); max_num_batched_tokens is {limits.max_num_batched_tokens}",
            cause,
        )
    if footprint.first_chunk > limits.max_num_batched_tokens:
        raise RequestError(
            f"a bidirectional prompt of {footprint.first_chunk} tokens cannot be split; "
            f"max_num_batched_tokens is {limits.max_num_batched_tokens}",
            "prompt",
        )


def admit(
    waiting_pages: Iterable[int],
    *,
    num_holding: int,
    num_free: int,
    growth: int,
    limits: DecodeLimits,
) -> int:
    """How many of the waiting requests get their pages now, in the order of arrival.

    waiting_pages: pages each needs to begin, oldest first. num_holding: requests that hold pages.
    growth: pages that the running ones take in the coming step. While others hold pages, a block's
    growth is kept free for each of them, so that a newcomer is not preempted immediately.
    """
    num_admitted = 0
    per_block = limits.pages_for(limits.block_size)
    num_free -= growth
    for pages in waiting_pages:
        headroom = num_holding * per_block
        if num_holding >= limits.max_num_seqs or pages + headroom > num_free:
            break
        num_admitted += 1
        num_holding += 1
        num_free -= pages
    return num_admitted


def schedule(
    running: Sequence[Demand],
    *,
    num_free: int,
    limits: DecodeLimits,
    count_freed: Callable[[Sequence[int]], int],
    prompt_rows: float = math.inf,
    most_requests: float = math.inf,
) -> Schedule:
    """Grants rows, oldest first, within one budget; if pages run out, preempts the youngest request
    that holds any.

    count_freed: how many pages are free once the requests of these indices release theirs, which
    they may share with others. prompt_rows: most rows of prompts. most_requests: that get
    rows.
    """
    rows = [0] * len(running)
    preempted: list[int] = []
    freed = 0  # by them
    budget = limits.max_num_batched_tokens
    holders = [index for index, demand in enumerate(running) if demand.holds_pages]
    for index, demand in enumerate(running):
        if index in preempted or not most_requests:
            continue
        most = min(budget, prompt_rows) if demand.is_prompt else budget
        granted = _grant(demand, int(most), limits.block_size)
        if not granted:
            continue
        growth = demand.growth
        while growth > num_free and holders and holders[-1] > index:
            preempted.append(holders.pop())
            before, freed = freed, count_freed(preempted)
            num_free += freed - before
        if growth > num_free:
            continue  # it keeps its pages and waits for an older one to finish
        num_free -= growth
        budget -= granted
        prompt_rows -= granted * demand.is_prompt
        rows[index], most_requests = granted, most_requests - 1
    return Schedule(tuple(rows), tuple(preempted))


def _grant(demand: Demand, budget: int, block_size: int) -> int:
    """Rows of this demand that fit: all of a denoise step, or a chunk cut at a block's end."""
    if demand.rows <= budget:
        return demand.rows
    if demand.least > budget:
        return 0
    return demand.least + (budget - demand.least) // block_size * block_size
