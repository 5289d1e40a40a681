# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Shared parts of the sampling kernels: cutting a row, random bits and Gumbel noise on the device.

The random bits are those of the counters that `sampling` defines. Noise is computed in fp32,
within about 1e-6 of the fp64 definition for every possible uniform.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """Launch parameters. Segments depend only on the vocabulary, so a row's sums do not depend on
    the batch."""

    segments: int
    chunk: int  # tokens in a tile
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens that a program reads together, [depth, lanes * elements]: a thread has one lane, and
    reads ``elements`` that fill 16 bytes at ``depth`` places."""

    depth: int
    lanes: int
    elements: int

    @classmethod
    def of(cls, dtype: torch.dtype, chunk: int, num_warps: int) -> "Tile":
        """``chunk`` tokens (a power of two, at least 16), if possible a lane per thread."""
        elements = 16 // dtype.itemsize
        lanes = min(32 * num_warps, chunk // elements)
        return cls(chunk // elements // lanes, lanes, elements)


def sampling_shape(vocab_size: int, most: int = MAX_CHUNK) -> SamplingShape:
    """The one shape for a vocabulary."""
    chunk = min(most, max(16, 1 << (vocab_size - 1).bit_length()))
    return SamplingShape(segments=4, chunk=chunk, num_warps=4)


@triton.jit
def words_of_quads(seed, quads, position, denoise_count, answer_index):
    """32 random bits for each of tokens 4 * quads .. 4 * quads + 3, along the last dimension."""
    zero = tl.zeros_like(quads)
    w0, w1, w2, w3 = tl.philox(
        seed,
        quads,
        zero + position.to(tl.int32),
        zero + denoise_count.to(tl.int32),
        zero + answer_index.to(tl.int32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_of_high_bits(k):
    """-log(-log(u)) for u = (2k + 1) / 2**25, k [N] int32 in 0 .. 2**24 - 1."""
    # Near 1 the hardware logarithm is too coarse, and u is not exact in fp32 but 1 - u is.
    is_high = k >= 3 * (1 << 22)
    odd = tl.where(is_high, 2 * ((1 << 24) - 1 - k) + 1, 2 * k + 1)
    fraction = odd.to(tl.float32) * (0.5**25)
    # -log(1 - f) / f on 0 .. 1/4, fitted at Chebyshev nodes; off by less than fp32 rounding.
    series = 0.08952038735151291 + fraction * 0.3339090645313263
    series = 0.2486901879310608 + fraction * (0.21425245702266693 + fraction * series)
    series = 0.49999910593032837 + fraction * (0.3333897590637207 + fraction * series)
    series = fraction + fraction * fraction * series
    exponential = tl.where(is_high, series, -tl.log(fraction))
    return -tl.log(exponential)
