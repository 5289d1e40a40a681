"""One step of a canvas: prompt and answer, masks included, in a forward that sees all of itself.

As models like LLaDA and Dream were trained, and so nothing of it can be cached: what each position
computes depends on every mask that is left. Two pure functions around the forward, as in
`denoise.py`; which masks are proposed and written is an algorithm's own. Blocks here are what is
sent at once: all are in flight from the first step on, each counts every step, and those without
masks settle from the left.
"""

from typing import Protocol

import numpy as np

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker import dream, llada
from effuse.decode_worker.denoise import StepOutcome, StepPlan, settle_step
from effuse.decode_worker.scheduler import Footprint
from effuse.decode_worker.sequence import (
    Block,
    CanvasStep,
    HostCandidates,
    IndexArray,
    IntArray,
    PositionNoise,
    Sequence,
)


class CanvasRules(Protocol):
    """What an algorithm decides; masks are absolute positions, ascending."""

    def proposals(self, step: CanvasStep) -> IntArray:
        """Masks that want a token; there may be none."""
        ...

    def choose(self, step: CanvasStep, masks: IntArray, candidates: HostCandidates) -> IndexArray:
        """Indices of the proposals for `masks` that are written."""
        ...


def rules_of(settings: DecodeSettings) -> CanvasRules:
    """The rules of the settings' algorithm. Raises ValueError where it denoises no canvas."""
    match settings.algorithm:
        case "llada":
            return llada
        case "dream":
            return dream
        case other:
            raise ValueError(f"{other} denoises no canvas")


def open_step(sequence: Sequence, settings: DecodeSettings, noise: PositionNoise) -> StepPlan:
    """Plans the forward over the whole canvas; a step that could not run may be opened again."""
    while sequence.may_grow:
        sequence.append_block().full = True
    step = _step(sequence, settings, noise)
    masks = rules_of(settings).proposals(step)
    return StepPlan(
        start=0,
        end=sequence.mask_end,
        num_stored=0,
        candidates=masks,
        denoise_counts=np.full(len(masks), step.number, dtype=np.int64),
    )


def apply_step(
    sequence: Sequence,
    settings: DecodeSettings,
    noise: PositionNoise,
    plan: StepPlan,
    candidates: HostCandidates,
) -> StepOutcome:
    """Writes what the algorithm chooses, and settles blocks in ascending order."""
    assert len(candidates) == len(plan.candidates)
    step = _step(sequence, settings, noise)
    chosen = rules_of(settings).choose(step, plan.candidates, candidates)
    written = _write(sequence, plan.candidates[chosen], candidates.tokens[chosen])
    for block in sequence.blocks:
        block.denoise_count += 1
    return settle_step(sequence, written, num_semi_writes=0)


def footprint(sequence: Sequence, passes: int) -> Footprint:
    """The most that a canvas ever needs: `passes` times all of its rows at once, and no page."""
    return Footprint(
        prompt_len=sequence.prompt_len,
        max_tokens=sequence.stopping.max_tokens,
        most_cached=0,
        most_rows=sequence.mask_end * passes,
        first_chunk=0,
    )


def _step(sequence: Sequence, settings: DecodeSettings, noise: PositionNoise) -> CanvasStep:
    number = sequence.blocks[-1].denoise_count  # the last block is in flight to the end
    return CanvasStep(sequence, settings, number, noise)


def _write(sequence: Sequence, positions: IntArray, tokens: IntArray) -> list[Block]:
    """Writes tokens at ascending positions; the blocks that lost masks."""
    written = []
    for block in sequence.blocks:
        first, end = np.searchsorted(positions, (block.start, block.end))
        if first < end:
            sequence.write(block, positions[first:end], tokens[first:end])
            written.append(block)
    return written
