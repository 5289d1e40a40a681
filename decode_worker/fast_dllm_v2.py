"""Fast-dLLM v2's decoding (arXiv 2509.26328): a block part by part, with its first token
separately.

Which masks need tokens, and which are written. Pure functions; `denoise.py` has the order of a
step. The model shifts its logits by one, so the forward that stores a block gives the next one's
first token. It is written separately: the likeliest token, at any confidence and temperature. From
then on each step fills the first part of `block_length` tokens that has masks.
"""

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.block_diffusion import activate, wants_block
from effuse.decode_worker.sequence import Block, HostCandidates, IndexArray, IntArray, Sequence

__all__ = ["activate", "choose", "is_greedy", "proposals", "wants_block"]


def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    """The block's first position if it is a mask, or the masks of its first unfinished part."""
    masks = sequence.masks(block)
    first = masks[:1]
    if not len(first) or first[0] == block.start:
        return first
    part = (first[0] - block.start) // settings.block_length
    wanted: IntArray = masks[masks < block.start + (part + 1) * settings.block_length]
    return wanted


def choose(block: Block, settings: DecodeSettings, candidates: HostCandidates) -> IndexArray:
    """All that are strictly above the threshold, or the best one."""
    above = candidates.above(settings.confidence_threshold)
    return above if len(above) else candidates.best(1)


def is_greedy(sequence: Sequence, block: Block) -> bool:
    """Whether the coming step writes the block's first token, which is not drawn at random."""
    return bool(sequence.masked[block.start])
