"""How many logits a program of the sampling kernels reads at once, and how a row is cut.

Values only; the kernels are `sampling_triton` and `sampling_filters_triton`.
"""

from dataclasses import dataclass

import torch

MAX_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """Launch parameters. Segments depend on the vocabulary alone, so a row's sums do not depend
    on the batch."""

    segments: int
    chunk: int  # tokens in a tile
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens that a program reads at once, [depth, lanes * elements]: a lane is a thread's, which
    reads ``elements`` of 16 bytes at ``depth`` places."""

    depth: int
    lanes: int
    elements: int

    @classmethod
    def of(cls, dtype: torch.dtype, chunk: int, num_warps: int) -> "Tile":
        """``chunk`` tokens (a power of two, at least 16), one lane for each thread if it can be."""
        elements = 16 // dtype.itemsize
        lanes = min(32 * num_warps, chunk // elements)
        return cls(chunk // elements // lanes, lanes, elements)


def sampling_shape(vocab_size: int, most: int = MAX_CHUNK) -> SamplingShape:
    """The one shape for a vocabulary."""
    chunk = min(most, max(16, 1 << (vocab_size - 1).bit_length()))
    return SamplingShape(segments=4, chunk=chunk, num_warps=4)
