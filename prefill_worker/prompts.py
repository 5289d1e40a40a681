"""A prompt in a prefill engine: its data, its schedule, and its events.

First come, first served, with one token budget. A prompt gets all its pages before it begins, so
that no prompt that has begun waits for pages. Pure: executor.py runs forwards, and kvtransfer's
sender pushes pages.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import Tensor

from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import (
    AttemptId,
    BoundaryState,
    PageRef,
    Reservation,
    Tombstones,
)
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.units import HeldUnits, Rate, UnitCache
from effuse.models.config import ModelConfig
from effuse.worker.config import PrefillConfig
from effuse.worker.engine_process import Outbox
from effuse.worker.messages import PrefillDone, PromptProgress, StartPrefill

PASSING_SHARE = 4  # of a forward's budget, one part is for prompts that pass a longer one


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """One attempt's prompt. Positions [0, num_paged) get KV in pages; the rest travels as ids.

    A rehearsal is an empty prompt whose pages are pushed as they are.
    """

    attempt: AttemptId
    token_ids: tuple[int, ...]
    block_origin: int
    num_paged: int
    num_pages: int  # of the pool
    num_moved: int  # of these, pages of `page_size` tokens, each on one rank: what a handoff moves
    can_split: bool  # into chunks that end at a block's end; a bidirectional prompt cannot
    arrived_s: float
    started_s: float = 0.0
    num_cached: int = 0  # tokens whose KV was there at its beginning
    num_launched: int = 0  # tokens in launched forwards, including the current one
    num_computed: int = 0  # tokens whose KV is there
    num_ready: int = 0  # pages that the sender knows
    pages: tuple[PageRef, ...] = ()
    units: HeldUnits = field(default_factory=HeldUnits)
    shows_progress: bool = False  # its caller wants to know of each part that is computed
    to_pool: bool = False  # its whole units go to a pool of several workers
    row: Tensor | None = None  # [hidden_size] its boundary row on its device, if the model needs it
    done: PrefillDone | None = None  # to be sent once it is known whether the pool has it
    done_s: float = 0.0
    is_rehearsal: bool = False
    is_live: bool = True  # it has not failed or been aborted
    abort_due: bool | None = None  # if AbortDone is due: whether it ran when it was aborted
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


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One prompt's share of a forward: positions [start, end)."""

    prompt: Prompt
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def make_prompt(
    message: StartPrefill, model: ModelConfig, page_size: int, degree: int, now: float
) -> Prompt:
    """A block-causal prompt is paged in whole blocks, a bidirectional one completely. A page of the
    pool is `degree` pages of `page_size` tokens, each on one rank."""
    token_ids = message.prompt_token_ids
    can_split = model.prompt_attention == "causal_blocks"
    block = model.block_size
    num_paged = len(token_ids) // block * block if can_split else len(token_ids)
    num_moved = -(-num_paged // page_size)
    return Prompt(
        attempt=message.attempt,
        token_ids=token_ids,
        block_origin=model.block_origin(len(token_ids)),
        num_paged=num_paged,
        num_pages=-(-num_moved // degree),
        num_moved=num_moved,
        can_split=can_split,
        arrived_s=now,
        shows_progress=message.progress,
    )


def make_rehearsal(attempt: AttemptId, pages: tuple[PageRef, ...]) -> Prompt:
    """An empty prompt with these pages."""
    return Prompt(
        attempt=attempt,
        token_ids=(),
        block_origin=0,
        num_paged=0,
        num_pages=len(pages),
        num_moved=0,
        can_split=False,
        arrived_s=math.inf,  # its caller has a time limit
        pages=pages,
        is_rehearsal=True,
    )


class PromptRefused(ValueError):
    """This prompt can never be computed here. The message has the found and the allowed value."""


def check_prompt(prompt: Prompt, config: PrefillConfig, model: ModelConfig, pages: int) -> None:
    """Raises PromptRefused with the numbers for a prompt that can never be computed in an engine
    with so many `pages`.
    """
    max_model_len = config.max_model_len or model.max_position_embeddings
    ids, num_tokens, most = prompt.token_ids, len(prompt.token_ids), config.max_num_batched_tokens
    if not ids:
        raise PromptRefused("prompt_token_ids must not be empty")
    if num_tokens >= max_model_len:
        raise PromptRefused(
            f"a prompt of {num_tokens} tokens leaves no room for an answer; "
            f"max_model_len is {max_model_len}"
        )
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise PromptRefused(
            f"prompt_token_ids must lie in 0..{model.vocab_size - 1}, got {min(ids)}..{max(ids)}"
        )
    if model.mask_token_id in ids:
        raise PromptRefused(f"the prompt contains the mask token {model.mask_token_id}")
    if prompt.num_pages > pages:
        raise PromptRefused(
            f"the prompt needs {prompt.num_pages} pages of "
            f"{config.page_size * config.context_degree} tokens; "
            f"the pool has {pages}"
        )
    if not prompt.can_split and prompt.num_paged > most:
        raise PromptRefused(
            f"a bidirectional prompt of {prompt.num_paged} tokens cannot be split; "
            f"max_num_batched_tokens is {most}"
        )


def schedule(left: Sequence[tuple[int, bool]], *, budget: int, block_size: int) -> list[int]:
    """Tokens of each prompt in the next forward, 0 if it waits; oldest first.

    left: (tokens to compute, can be split) of each. Chunks end at a block's end, or with the
    prompt. If the oldest one needs several forwards, younger ones that end in this one pass it,
    shortest first. They have a share of the budget, so the oldest one still ends in time.
    """
    chunks = _passing(left, budget)
    budget -= sum(chunks)
    for index, (tokens, can_split) in enumerate(left):
        chunk = tokens
        if tokens > budget:
            chunk = budget // block_size * block_size if can_split else 0
        if not chunks[index]:
            chunks[index] = chunk
            budget -= chunk
    return chunks


def _passing(left: Sequence[tuple[int, bool]], budget: int) -> list[int]:
    """Tokens of each prompt that passes a long one in this forward."""
    chunks = [0] * len(left)
    if left and left[0][0] > budget and left[0][1]:
        room = budget // PASSING_SHARE
        for tokens, index in sorted((one[0], index) for index, one in enumerate(left)):
            if tokens > room:
                break
            chunks[index] = tokens
            room -= tokens
    return chunks


class PromptTable:
    """All prompts of an engine, from their arrival until nothing uses their pages."""

    def __init__(
        self,
        pool: PagePool,
        cache: UnitCache,
        outbox: Outbox,
        now: Callable[[], float],
        *,
        needs_boundary: bool = True,
    ) -> None:
        """`needs_boundary`: a handoff needs the hidden row of the prompt's last token."""
        self.prompts: dict[str, Prompt] = {}  # by transfer, with draining ones and rehearsals
        self.waiting: list[Prompt] = []
        self.computing: list[Prompt] = []
        self.pooling: list[Prompt] = []  # computed; the pool does not have them yet
        self.over = Tombstones()  # transfers that have ended or were aborted
        self.computing_rate = Rate()  # seconds of tokens in forwards
        self._pool = pool
        self._cache = cache
        self._outbox = outbox
        self._now = now
        self._needs_boundary = needs_boundary

    def add(self, prompt: Prompt) -> None:
        """Takes a prompt, which waits for its pages, or a rehearsal, which has them."""
        self.prompts[prompt.attempt.transfer_id] = prompt
        if not prompt.is_rehearsal:
            self.waiting.append(prompt)

    @property
    def least_tokens(self) -> int:
        """Tokens of the oldest prompt in the next forward if it cannot be cut; else 0."""
        first = self.computing[:1]
        return sum(one.num_left for one in first if not one.can_split)

    @property
    def oldest(self) -> tuple[str, int] | None:
        """The oldest prompt that has its pages, by transfer, and its tokens that are left."""
        first = self.computing[:1]
        return next(((one.attempt.transfer_id, one.num_left) for one in first), None)

    def begin_next(
        self, before: float, pages_kept: int, *, may_know_all: bool = True
    ) -> Prompt | None:
        """Gives the oldest waiting prompt its pages, with any known KV; None if none waits that
        arrived before this time, or if fewer than `pages_kept` pages would stay free. A prompt
        whose KV is on its way from another tier lets younger ones pass. A forward follows, unless
        all of the prompt's KV may be known, is known, and gives the boundary.
        """
        rest = int(self._needs_boundary or not may_know_all)
        for prompt in self.waiting:
            # A bidirectional prompt is written to a pool, but never found here.
            asked = prompt.units if prompt.can_split else HeldUnits(), prompt.num_paged, rest
            num_pinned = self._cache.num_pinned(*asked)
            has_room = prompt.num_pages - num_pinned <= self._pool.num_free - pages_kept
            if prompt.arrived_s >= before or not has_room:
                return None
            is_asked = prompt.to_pool and self._cache.pooled(prompt.units) is None
            if not is_asked and not self._cache.fetch(*asked, self.computing_rate.seconds):
                break
        else:
            return None
        known = self._cache.take(*asked)
        new = self._pool.allocate_committed(prompt.num_pages - len(known))
        assert new is not None, "counted above"
        prompt.pages = known + new
        prompt.num_cached = prompt.units.num_found * self._cache.unit_size
        prompt.num_launched = prompt.num_computed = prompt.num_cached
        prompt.started_s = self._now()
        self.waiting.remove(prompt)
        self.computing.append(prompt)
        return prompt

    def next_chunks(self, *, budget: int, block_size: int) -> list[PromptChunk]:
        """As much of each prompt as fits into a forward over `budget` tokens."""
        left = [(prompt.num_left, prompt.can_split) for prompt in self.computing]
        sizes = schedule(left, budget=budget, block_size=block_size)
        return [
            PromptChunk(prompt, prompt.num_launched, prompt.num_launched + size)
            for prompt, size in zip(self.computing, sizes, strict=True)
            if size
        ]

    def computed(self, chunk: PromptChunk, *, is_stored: bool = True) -> None:
        """A forward over this chunk has ended; unless it failed, its KV is stored."""
        prompt = chunk.prompt
        prompt.num_computed = chunk.end
        if is_stored:
            self._cache.add(prompt.units, prompt.pages, chunk.end)
        if prompt.is_unread and not prompt.is_being_written:
            self._release(prompt)
        if prompt not in self.computing:
            return
        if prompt.num_computed == prompt.num_paged:
            self.conclude(prompt)
        elif prompt.shows_progress:
            self._outbox.add(
                PromptProgress(attempt=prompt.attempt, computed_tokens=prompt.num_computed)
            )

    def conclude(self, prompt: Prompt) -> None:
        """The prompt's KV is complete. One for the pool is reported once that has it."""
        self.computing.remove(prompt)
        done, prompt.done_s = prefill_done(prompt, self._now()), self._now()
        if not prompt.to_pool:
            self._outbox.add(done)
            return
        prompt.done = done
        self._cache.add_whole(prompt.units, prompt.pages, prompt.row)
        self.pooling.append(prompt)

    def in_pool(self) -> list[Prompt]:
        """Reports the prompts of which the pool has all units, and returns them; nobody will
        reserve pages for them. Reports those that it does not get, too."""
        found = []
        for prompt in [*self.waiting, *self.pooling]:
            if not prompt.to_pool:
                continue
            is_new = prompt.done is None
            has_all = self._cache.pooled(prompt.units, None if is_new else prompt.done_s)
            if has_all is None or (is_new and not has_all):
                continue
            if prompt.done is None:
                known = len(prompt.units.keys) * self._cache.unit_size
                prompt.num_cached = known if prompt.can_split else prompt.num_paged
                prompt.started_s = self._now()
            done = prompt.done or prefill_done(prompt, self._now())
            self._outbox.add(replace(done, in_pool=has_all))
            (self.waiting if is_new else self.pooling).remove(prompt)
            if has_all:
                found.append(prompt)
        return found

    def leave(self, prompt: Prompt) -> None:
        """The prompt is not computed any more; its pages wait until they are not in use."""
        prompt.is_live = False
        for queue in (self.waiting, self.computing, self.pooling):
            if prompt in queue:
                queue.remove(prompt)

    def end(self, prompt: Prompt) -> None:
        """Nothing reads the prompt's pages any more; a forward that writes them must end first."""
        self.leave(prompt)
        prompt.is_unread = True
        if not prompt.is_being_written:
            self._release(prompt)

    def _release(self, prompt: Prompt) -> None:
        del self.prompts[prompt.attempt.transfer_id]
        self._cache.end(prompt.units)
        self._pool.release(prompt.pages)
        self.over.add(prompt.attempt.transfer_id, self._now())
        if prompt.abort_due is not None:
            self._outbox.abort_done(prompt.attempt, was_running=prompt.abort_due)


def unfit(prompt: Prompt, reservation: Reservation, *, is_first: bool) -> str:
    """Why a living prompt cannot be pushed there; empty if it can."""
    if not is_first:
        return "a second reservation arrived"
    found, degree = reservation.num_source_pages, reservation.context_degree
    held = reservation.num_held * degree
    # Some ranks that cut the context may have nothing in the last page of a prompt that is held.
    if found != max(0, prompt.num_moved - held) or held >= prompt.num_moved + degree:
        beside = f" beside {held} held ones" if held else ""
        return f"the prompt needs {prompt.num_moved} pages, {found} are reserved{beside}"
    return ""


def prefill_done(prompt: Prompt, now: float) -> PrefillDone:
    """The prompt's KV is complete."""
    return PrefillDone(
        attempt=prompt.attempt,
        queue_s=prompt.started_s - prompt.arrived_s,
        compute_s=now - prompt.started_s,
        cached_tokens=prompt.num_cached,
    )
