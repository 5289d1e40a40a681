"""Block diffusion as in SDAR: one block in flight, filled in a number of steps.

When a block is appended, which of its masks are written, and which of its tokens are edited
(LLaDA2.1, arXiv 2602.08676). Pure functions; `denoise.py` has the order of a step.
"""

import numpy as np

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.sequence import Block, HostCandidates, IndexArray, IntArray, Sequence


def wants_block(sequence: Sequence, settings: DecodeSettings) -> bool:
    """True if no block has masks: the next one is denoised together with the last one's commit."""
    return not sequence.active


def activate(sequence: Sequence, settings: DecodeSettings) -> None:
    """Every block must advance."""
    for block in sequence.blocks:
        block.full = True


def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    """All masks of the block; if tokens may be edited, all of its tokens except the prompt's."""
    if not settings.edits_tokens:
        return sequence.masks(block)
    return np.arange(max(block.start, sequence.prompt_len), block.end)


def choose(block: Block, settings: DecodeSettings, candidates: HostCandidates) -> IndexArray:
    """Indices of the block's candidates that this step writes, by the remasking rule.

    SDAR's own code writes the whole share even if fewer masks are left, over existing tokens; here
    no written token changes.
    """
    if settings.remasking == "entropy_bounded":
        return _within_entropy(settings.entropy_bound, candidates)
    share = min(step_share(block, settings.denoising_steps), len(candidates))
    if settings.remasking == "sequential":
        return np.arange(share, dtype=np.intp)
    if settings.remasking == "low_confidence_dynamic":
        above = candidates.above(settings.confidence_threshold)
        if len(above) >= share:
            return above
    return candidates.best(share)


def edit(
    sequence: Sequence,
    block: Block,
    settings: DecodeSettings,
    positions: IntArray,
    candidates: HostCandidates,
) -> bool:
    """Replaces written tokens for which the model is sure of another one (LLaDA2.1); returns
    whether it did.

    A block without masks is done after the first step that changes nothing, or after
    `max_post_steps`.
    """
    is_other = candidates.tokens != sequence.token_ids[positions]
    is_sure = candidates.confidences > settings.editing_threshold
    edited = np.flatnonzero(~sequence.masked[positions] & is_other & is_sure)
    if not block.masks_left:
        block.edits_left = block.edits_left - 1 if len(edited) else 0
    if len(edited):
        sequence.edit(positions[edited], candidates.tokens[edited])
    return len(edited) > 0


def step_share(block: Block, denoising_steps: int) -> int:
    """Masks that the block's coming step fills: an even split, with the remainder first.

    Of the block's length, even if a prompt's tail left it fewer masks, as in SDAR's code.
    """
    step = min(block.denoise_count, denoising_steps - 1)
    even, remainder = divmod(block.end - block.start, denoising_steps)
    return max(1, even + (step < remainder))


def _within_entropy(bound: float, candidates: HostCandidates) -> IndexArray:
    """The surest masks whose entropies add up to less than `bound` nats, and at least one; scores
    are negative entropies. Computed in fp64, so that a device gets the same result."""
    surest = np.argsort(-candidates.scores, kind="stable")
    entropies = -candidates.scores[surest].astype(np.float64)
    count = max(1, int((entropies.cumsum() < bound).sum()))
    return np.sort(surest[:count])
