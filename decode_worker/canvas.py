"""One step of a canvas: prompt and answer, including masks, in one forward in which each token sees
all others.

Models like LLaDA and Dream were trained this way, so nothing can be cached exactly: the value at
each position depends on every remaining mask. Two pure functions around the forward, as in
`denoise.py`; each algorithm chooses the proposed and written masks. Blocks here are the units of
sending: all are in flight from the first step on, each counts every step, and those without masks
settle from the left.

Fast-dLLM caches nevertheless: the tokens around a generation block keep the K and V of the forward
that began the block. They are all tokens before it (prefix) or on both sides (dual); pages then
hold the tokens after the block right after those before it. A lost cache is recomputed from the
canvas at that moment, which determines it completely.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from effuse.config.decoding import Algorithm
from effuse.decode_worker import dream, fast_dllm, llada
from effuse.decode_worker.denoise import StepOutcome, StepPlan, settle_step
from effuse.decode_worker.scheduler import Footprint
from effuse.decode_worker.sequence import (
    Block,
    CanvasStep,
    HostCandidates,
    IndexArray,
    IntArray,
    Sequence,
)


class CanvasRules(Protocol):
    """The decisions of an algorithm; masks are absolute positions, ascending."""

    def proposals(self, step: CanvasStep) -> IntArray:
        """Masks that need a token; there may be none."""

    def choose(self, step: CanvasStep, masks: IntArray, candidates: HostCandidates) -> IndexArray:
        """Indices of the proposals for `masks` that are written."""


RULES: Final[Mapping[Algorithm, CanvasRules]] = {
    "llada": llada,
    "dream": dream,
    "fast_dllm": fast_dllm,
}
"""Of the algorithms that denoise a canvas."""


def open_step(step: CanvasStep, *, has_cache: bool) -> StepPlan:
    """Plans the forward of a step; a step that could not run may be opened again.

    has_cache: whether pages hold the surroundings of the current generation block.
    """
    masks = RULES[step.settings.algorithm].proposals(step)
    plan = StepPlan(
        start=0,
        end=step.sequence.mask_end,
        num_stored=0,
        candidates=masks,
        denoise_counts=np.full(len(masks), step.number, dtype=np.int64),
    )
    if step.settings.cache == "none":
        return plan
    return _cached(plan, step) if has_cache else _filling(plan, step)


def append_blocks(sequence: Sequence) -> None:
    """Puts all blocks in flight, unless they already are."""
    while sequence.may_grow:
        sequence.append_block().full = True


def is_begun(step: CanvasStep) -> bool:
    """Whether the current generation block has tokens: its cache was filled before these."""
    return not bool(step.sequence.masked[step.block_start : step.block_end].all())


def open_refill(step: CanvasStep) -> StepPlan:
    """Plans the forward that fills a lost cache, and proposes nothing."""
    nothing = np.empty(0, dtype=np.int64)
    plan = StepPlan(0, step.sequence.mask_end, 0, candidates=nothing, denoise_counts=nothing)
    return _filling(plan, step)


def num_cached(step: CanvasStep) -> int:
    """Tokens whose K and V the current generation block's steps read from pages."""
    match step.settings.cache:
        case "none":
            return 0
        case "prefix":
            return step.block_start
        case "dual":
            return step.sequence.mask_end - (step.block_end - step.block_start)


def apply_step(step: CanvasStep, plan: StepPlan, candidates: HostCandidates) -> StepOutcome:
    """Writes the algorithm's choices, and settles blocks in ascending order."""
    assert len(candidates) == len(plan.candidates)
    chosen = RULES[step.settings.algorithm].choose(step, plan.candidates, candidates)
    written = _write(step.sequence, plan.candidates[chosen], candidates.tokens[chosen])
    for block in step.sequence.blocks:
        block.denoise_count += 1
    return settle_step(step.sequence, written)


def footprint(step: CanvasStep, passes: int) -> Footprint:
    """Most resources that a canvas ever needs: `passes` times all of its rows together, and with a
    cache pages for everything but its last generation block."""
    sequence, length = step.sequence, step.settings.block_length
    last = (sequence.stopping.max_tokens - 1) % length + 1
    return Footprint(
        most_cached=0 if step.settings.cache == "none" else sequence.mask_end - last,
        most_rows=sequence.mask_end * passes,
        first_chunk=0,
    )


def _filling(plan: StepPlan, step: CanvasStep) -> StepPlan:
    """The forward over everything, which keeps K and V around the current generation block."""
    if step.settings.cache == "prefix":
        return replace(plan, num_stored=step.block_start)
    block = range(step.block_start, step.block_end)
    return replace(plan, num_stored=plan.end - len(block), unstored=block)


def _cached(plan: StepPlan, step: CanvasStep) -> StepPlan:
    """The forward over the positions outside of the cache."""
    if step.settings.cache == "prefix":
        return replace(plan, start=step.block_start)
    behind = plan.end - step.block_end
    return replace(plan, start=step.block_start, end=step.block_end, num_behind=behind)


def _write(sequence: Sequence, positions: IntArray, tokens: IntArray) -> list[Block]:
    """Writes tokens at ascending positions; returns the blocks that lost masks."""
    written = []
    for block in sequence.blocks:
        first, end = np.searchsorted(positions, (block.start, block.end))
        if first < end:
            sequence.write(block, positions[first:end], tokens[first:end])
            written.append(block)
    return written
