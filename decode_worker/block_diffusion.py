"""Block diffusion as SDAR decodes: one block in flight, filled in a number of steps.

When a block is appended, which of its masks are written, and which of its tokens are edited
(LLaDA2.1, arXiv 2602.08676). Pure functions; the order of a step is in `denoise.py`.
"""

import numpy as np

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.sequence import Block, HostCandidates, IndexArray, IntArray, Sequence


def wants_block(sequence: Sequence, settings: DecodeSettings) -> bool:
    """True where no block holds masks: the next one is denoised beside the last one's commit."""
    return sequence.num_active == 0


def activate(sequence: Sequence, settings: DecodeSettings) -> None:
    """Every block must advance."""
    for block in sequence.blocks:
        block.full = True


def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    """All masks of the block, and where tokens may be edited all of its tokens but the prompt's."""
    if not settings.edits_tokens:
        return sequence.masks(block)
    return np.arange(max(block.start, sequence.prompt_len), block.end)


def choose(block: Block, settings: DecodeSettings, candidates: HostCandidates) -> IndexArray:
    """Indices into the block's candidates that are written in this step, by the remasking rule.

    SDAR's own code writes the whole share even where fewer masks are left, over tokens that are
    there; here no written token changes.
    """
    if settings.remasking == "entropy_bounded":
        return _within_entropy(settings.entropy_bound, candidates)
    share = min(step_share(block, settings.denoising_steps), len(candidates))
    if settings.remasking == "sequential":
        return np.arange(share, dtype=np.intp)
    if settings.remasking == "low_confidence_dynamic":
        above = np.flatnonzero(candidates.confidences > settings.confidence_threshold)
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
    """Replaces written tokens that the model is sure to be others (LLaDA2.1); whether it did.

    A block without masks is done by the first step that changes nothing, or after
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
    """Masks that the block's coming step fills: an even split, the remainder going first.

    Of the block's length, also where a prompt's tail left it fewer masks, as SDAR's code has it.
    """
    step = min(block.denoise_count, denoising_steps - 1)
    even, remainder = divmod(block.end - block.start, denoising_steps)
    return max(1, even + (step < remainder))


def _within_entropy(bound: float, candidates: HostCandidates) -> IndexArray:
    """The surest masks whose entropies add up to less than `bound` nats, and at least one; scores
    are negative entropies. In fp64, so that a device comes to the same."""
    surest = np.argsort(-candidates.scores, kind="stable")
    entropies = -candidates.scores[surest].astype(np.float64)
    count = max(1, int((entropies.cumsum() < bound).sum()))
    return np.sort(surest[:count])
