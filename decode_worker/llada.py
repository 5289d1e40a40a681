"""LLaDA's own generate (arXiv 2502.09992): block by block, a share of the masks at each step.

Which masks a step proposes tokens for, and which of them it writes. Pure functions; `canvas.py` has
the order of a step. The authors require that blocks divide the answer and steps divide by blocks,
and then the steps are theirs. Otherwise the last block is shorter, and the first blocks take the
remaining steps.
"""

from dataclasses import replace

import numpy as np

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.sequence import CanvasStep, HostCandidates, IndexArray, IntArray, Sequence


def proposals(step: CanvasStep) -> IntArray:
    """All masks of the first generation block that has any."""
    masks = step.masks()
    return masks[masks < step.block_end]


def choose(step: CanvasStep, masks: IntArray, candidates: HostCandidates) -> IndexArray:
    """The step's share of those with the highest confidence, or drawn at random."""
    if step.settings.remasking == "random":
        candidates = replace(candidates, scores=step.drawn(masks).astype(np.float32))
    return candidates.best(share(step.sequence, step.settings, masks))


def share(sequence: Sequence, settings: DecodeSettings, masks: IntArray) -> int:
    """Masks that the coming step fills, of those left in its block: the block's tokens are split
    evenly over its steps, with the remainder first."""
    num_tokens, length = sequence.stopping.max_tokens, settings.block_length
    index = (int(masks[0]) - sequence.prompt_len) // length
    size = min(length, num_tokens - index * length)
    steps = _steps_of(index, -(-num_tokens // length), size, settings.steps)
    even, remainder = divmod(size, steps)
    goals = np.arange(1, steps + 1) * even + np.minimum(np.arange(1, steps + 1), remainder)
    written = size - len(masks)
    return int(goals[np.searchsorted(goals, written, side="right")]) - written


def _steps_of(index: int, num_blocks: int, size: int, steps: int) -> int:
    """Steps of block `index`: an even split, from one to one per token; 0 is one per token."""
    if steps == 0:
        return size
    even, remainder = divmod(steps, num_blocks)
    return min(size, max(1, even + (index < remainder)))
