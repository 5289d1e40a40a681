"""Pages with tags instead of KV, and a model that finds their owner from them.

Tokens are tags: request r has the token r * TOKENS + p at position p, in its prompt and in the
answer that is right. KV of a token is its tag. So a forward over pages of another request, over
pages that were not written or were written again, is seen at once or in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from effuse.kvtransfer.digest import DigestJob, PieceDigests
from effuse.kvtransfer.layout import Fingerprint, KVLayout, ModelFacts, fingerprint
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.models.config import ModelConfig
from effuse.models.part import Part, PartResult

from .clock import Action, Clock, Violation

TOKENS = 64  # positions that a request may have
MASK = 0  # requests count from 1
BLOCK = 2
PAGE = 4  # tokens
LAYOUT = KVLayout("unified", 2, 1, 2, PAGE, "float16")  # a tag in int64 for each token and layer
GROUPS = LAYOUT.num_groups
EMPTY = -1


def tag(request: int, position: int) -> int:
    """The token of a request at a position."""
    return request * TOKENS + position


def model_of(architecture: str) -> ModelConfig:
    """A model of that kind; its sizes do not matter here."""
    return ModelConfig(
        architecture=architecture,
        num_layers=2,
        hidden_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=4,
        vocab_size=1 << 16,
        max_position_embeddings=TOKENS,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        qkv_bias=False,
        qk_norm=False,
        tie_embeddings=True,
        mask_token_id=MASK,
        eos_token_ids=(),
        block_size=BLOCK,
    )


def fingerprint_of(model: ModelConfig) -> Fingerprint:
    """Shared parts of two workers of one model."""
    facts = ModelFacts(
        weights="simulated",
        architecture=model.architecture,
        block_size=BLOCK,
        mask_token_id=MASK,
        prompt_attention=model.prompt_attention,
        commit_rule="settled",
    )
    return fingerprint(LAYOUT, facts)


class KnownPool(PagePool):
    """A pool that can be asked for the state of a page by its id."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._newest: dict[int, PageRef] = {}

    def allocate(self, count: int) -> tuple[PageRef, ...] | None:
        return self._know(super().allocate(count))

    def allocate_committed(self, count: int) -> tuple[PageRef, ...] | None:
        return self._know(super().allocate_committed(count))

    def newest(self, page_id: int) -> tuple[PageRef, PageState]:
        """A page's newest allocation, and its state."""
        page = self._newest.get(page_id, PageRef(page_id, 0))
        return page, self._states[page_id]

    def _know(self, pages: tuple[PageRef, ...] | None) -> tuple[PageRef, ...] | None:
        for page in pages or ():
            self._newest[page.page_id] = page
        return pages


class TaggedMemory:
    """The part of PageMemory that engines use, and its content."""

    def __init__(self, pool: KnownPool) -> None:
        self.layout = LAYOUT
        self.pool = pool
        self._cells = [[EMPTY] * PAGE for _ in range(pool.num_pages * GROUPS)]

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Empties the slots of a page from `num_used` on."""
        for cell in self._cells[page_id * GROUPS : (page_id + 1) * GROUPS]:
            cell[num_used:] = [EMPTY] * (PAGE - num_used)

    def copy_page(self, source: int, target: int) -> None:
        """Copies all of a page to another one."""
        for group in range(GROUPS):
            self._cells[target * GROUPS + group][:] = self._cells[source * GROUPS + group]

    def read(self, page_id: int, groups: range) -> list[int]:
        """Tags of these groups of layers of a page, slot by slot."""
        return [tag for group in groups for tag in self._cells[page_id * GROUPS + group]]

    def write(self, page_id: int, groups: range, tags: Sequence[int]) -> None:
        """Overwrites these groups of layers of a page."""
        for index, group in enumerate(groups):
            self._cells[page_id * GROUPS + group][:] = tags[index * PAGE : (index + 1) * PAGE]

    def store(self, page_ids: Sequence[int], start: int, tags: Sequence[int], group: int) -> None:
        """A forward stores KV of positions from `start` on, in one group of layers."""
        for position, token in enumerate(tags, start):
            page_id = page_ids[position // PAGE]
            page, state = self.pool.newest(page_id)
            if state is not PageState.COMMITTED:
                raise Violation(f"a forward stores KV of {token} in {page}, which is {state.name}")
            self._cells[page_id * GROUPS + group][position % PAGE] = token

    def load(self, page_ids: Sequence[int], count: int) -> list[int]:
        """Tags of the positions before `count`; all groups of layers must agree."""
        found: list[int] = []
        for position in range(count):
            at, slot = page_ids[position // PAGE] * GROUPS, position % PAGE
            tags = {self._cells[at + group][slot] for group in range(GROUPS)}
            if len(tags) > 1:
                raise Violation(f"page {page_ids[position // PAGE]} holds layers of {sorted(tags)}")
            found += tags
        return found


class TaggedDigester:
    """Digests of tags; they take a while, as on a device."""

    def __init__(self, memory: TaggedMemory, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        """Of these groups of layers of these pages, whose only head is meant."""
        ready_at = self._clock.now + self._clock.draw.choice((0.0, 0.002))
        return _Job(self._memory, self._clock, page_ids, groups, seed, ready_at)


@dataclass(frozen=True, slots=True)
class _Job:
    memory: TaggedMemory
    clock: Clock
    page_ids: Sequence[int]
    groups: range
    seed: int
    ready_at: float

    def __call__(self) -> PieceDigests | None:
        if self.clock.now < self.ready_at:
            return None
        singles = [range(group, group + 1) for group in self.groups]
        found = [
            [hash((self.seed, *self.memory.read(page_id, group))) for group in singles]
            for page_id in self.page_ids
        ]
        return np.array(found, dtype=np.int64)


@dataclass(slots=True)
class _Running:
    num_final: int = 0  # groups of layers that are stored
    num_launched: int = 0


@dataclass(slots=True)
class PromptModel:
    """A model on a device of its own: forwards run one after the other, layer by layer."""

    memory: TaggedMemory
    clock: Clock
    is_alive: Callable[[], bool]
    wake: Action
    fails: Callable[[], bool]
    _free_at: float = 0.0
    _next: _Running = field(default_factory=_Running)
    _last: _Running = field(default_factory=_Running)

    def progress(self) -> Callable[[], int]:
        """How many groups of layers the next forward has stored."""
        coming = self._next
        return lambda: coming.num_final

    def mark(self) -> Callable[[], bool]:
        """Whether the last launch has ended."""
        last = self._last
        return lambda: last.num_final == last.num_launched

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """Launches a forward. One that fails has launched some of its layers."""
        self._last, self._next = self._next, _Running()
        running, clock = self._last, self.clock
        fails = self.fails()
        running.num_launched = clock.draw.randrange(GROUPS) if fails else GROUPS
        at = max(clock.now, self._free_at)
        for group in range(running.num_launched):
            at += clock.draw.uniform(0.001, 0.02)
            clock.after(at - clock.now, partial(self._store, running, parts, group))
        self._free_at = at
        if fails:
            raise RuntimeError("planted")
        return [PartResult([], [], [], None) for _ in parts]

    def _store(self, running: _Running, parts: Sequence[Part], group: int) -> None:
        if not self.is_alive():
            return
        for part in parts:
            self.memory.store(part.pages, part.start, part.token_ids, group)
        running.num_final = group + 1
        self.wake()


@dataclass(slots=True)
class AnswerModel:
    """A model whose answer follows from the KV that it reads."""

    memory: TaggedMemory
    fails: Callable[[], bool]

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward, over when it returns."""
        if self.fails():
            raise RuntimeError("planted")
        return [self._run(part) for part in parts]

    def _run(self, part: Part) -> PartResult:
        seen = [*self.memory.load(part.pages, part.start), *part.token_ids[: part.num_stored]]
        request = (seen or part.token_ids)[0] // TOKENS
        if seen != [tag(request, position) for position in range(len(seen))]:
            raise Violation(f"a forward of request {request} reads KV of {seen}")
        stored = part.token_ids[: part.num_stored]
        for group in range(GROUPS):
            self.memory.store(part.pages, part.start, stored, group)
        confidences = [
            (position * 37 + count * 61 + request) % 101 / 101
            for position, count in zip(part.candidates, part.denoise_counts, strict=True)
        ]
        tokens = [tag(request, position) for position in part.candidates]
        return PartResult(tokens, confidences, confidences, None)
