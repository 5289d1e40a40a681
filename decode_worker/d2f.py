"""Discrete diffusion forcing (arXiv 2508.09192): several blocks in flight.

When a block is appended, when it must advance, and which of its masks are written. Pure functions;
the order of a step is in `denoise.py`.
"""

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.sequence import Block, HostCandidates, IndexArray, IntArray, Sequence


def wants_block(sequence: Sequence, settings: DecodeSettings) -> bool:
    """True if enough of the last block is written, and the window has room."""
    active = sequence.active
    if not active:
        return True
    return len(active) < settings.window and active[-1].progress >= settings.block_add_threshold


def activate(sequence: Sequence, settings: DecodeSettings) -> None:
    """Marks blocks as full if enough of their predecessor is written; the first one always is."""
    predecessor: Block | None = None
    for block in sequence.blocks:
        if predecessor is None or predecessor.progress >= settings.full_activation_threshold:
            block.full = True
        predecessor = block


def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    """All masks of the block."""
    return sequence.masks(block)


def choose(block: Block, settings: DecodeSettings, candidates: HostCandidates) -> IndexArray:
    """Indices of the block's candidates that this step writes.

    All strictly above the threshold; if there is none, a full block writes its best one and a
    semi-active block nothing.
    """
    above = candidates.above(settings.confidence_threshold)
    if len(above) or not block.full:
        return above
    return candidates.best(1)
