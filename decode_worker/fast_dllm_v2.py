"""Fast-dLLM v2's decoding (arXiv 2509.26328): a block part by part, with its first token
separately.

Which masks need tokens, and which are written. Pure functions; `denoise.py` has the order of a
step. The model shifts its logits by one, so the forward that stores a block gives the next one's
first token. It is written separately: the likeliest token, at any confidence and temperature. From
then on each step fills the first part of `block_length` tokens that has masks.
"""

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.block_diffusion import activate, wants_block
from effuse.decode_worker.d2f import choose
from effuse.decode_worker.sequence import Block, IntArray, Sequence

__all__ = ["activate", "choose", "is_greedy", "proposals", "wants_block"]


def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    """Masks that need a token: the block's first position, or those of its first unfinished part.

    `choose` takes all of them that are strictly above the threshold, or the best one.
    """
    masks = sequence.masks(block)
    first = masks[:1]
    if not len(first) or first[0] == block.start:
        return first
    part = (first[0] - block.start) // settings.block_length
    wanted: IntArray = masks[masks < block.start + (part + 1) * settings.block_length]
    return wanted


def is_greedy(sequence: Sequence, block: Block) -> bool:
    """Whether the coming step writes the block's first token, which is not drawn at random."""
    return bool(sequence.masked[block.start])
