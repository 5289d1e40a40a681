# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gumbel noise on the device, from the counters that `philox` defines; no launcher of its own.

Computed in fp32, within about 1e-6 of the fp64 definition for every possible uniform.
"""

import triton
import triton.language as tl


@triton.jit
def gumbel_tile(seed, first_token, position, denoise_count, answer_index, TILE: tl.constexpr):
    """Noise [TILE] fp32 of tokens first_token .. first_token + TILE - 1; both multiples of 4."""
    quad = first_token // 4 + tl.arange(0, TILE // 4)
    zero = tl.zeros_like(quad)
    w0, w1, w2, w3 = tl.philox(
        seed,
        quad,
        zero + position.to(tl.int32),
        zero + denoise_count.to(tl.int32),
        zero + answer_index.to(tl.int32),
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return gumbel_of_high_bits((words >> 8).to(tl.int32))


@triton.jit
def gumbel_of_high_bits(k):
    """-log(-log(u)) for u = (2k + 1) / 2**25, k [N] int32 in 0 .. 2**24 - 1."""
    # Above one half u is not exact in fp32, but 1 - u is.
    is_high = k >= (1 << 23)
    odd = tl.where(is_high, 2 * ((1 << 24) - 1 - k) + 1, 2 * k + 1)
    fraction = odd.to(tl.float32) * (0.5**25)
    # -log(1 - f) = 2 atanh(f / (2 - f)): the hardware logarithm is too coarse next to 1.
    s = fraction / (2.0 - fraction)
    s2 = s * s
    series = 1.0 / 11 + s2 * (1.0 / 13 + s2 * (1.0 / 15))
    series = 1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * series))
    series = 2.0 * s * (1.0 + s2 * (1.0 / 3 + s2 * series))
    exponential = tl.where(is_high, series, -tl.log(fraction))
    return -tl.log(exponential)
