# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The steps before a token is chosen: mask token, temperature, top-p, top-k.

The first two are device functions that other kernels call. The filters become one pair for each
row: the value and the id of the last kept token. A search with three thresholds in each reading
finds it: about 8 readings of a filtered row in 16 bits, 20 in fp32, and none of other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.sampling_shared_triton import Tile
from effuse.kernels.values import RowSampling

# `_ordered(-inf)`
FAR = tl.constexpr(2147483647)
LARGE = tl.constexpr(1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LINEAR_ROUNDS = tl.constexpr(3)
# Bits of a float of each dtype that are zero in fp32.
SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def launch_cutoff(
    logits: Tensor,
    mask_token_id: int,
    sampling: RowSampling,
    tile: Tile,
    num_warps: int,
    top_k_first: bool,
) -> tuple[Tensor, Tensor]:
    """(value [R] fp32, id [R] int32): a token is kept if its logit is larger, or equal with an id
    that is not larger.

    ``top_k_first`` takes top-p of the mass that top-k keeps instead of the whole mass.
    """
    rows, vocab_size = logits.shape
    cut_value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cut_token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    # Without a bound of registers some compilers spill one to memory; two searches need more.
    # Nothing is fused: bases are rounded once and are then the same everywhere.
    _cutoff_kernel[(rows,)](
        logits, logits.stride(0), vocab_size, mask_token_id, sampling.temperature, sampling.top_p,
        sampling.top_k, cut_value, cut_token,
        TOP_K_FIRST=top_k_first, SPARE=SPARE_BITS[logits.dtype], DEPTH=tile.depth, LANES=tile.lanes,
        ELEMENTS=tile.elements, num_warps=num_warps, maxnreg=112 if top_k_first else 96,
        enable_fp_fusion=False,
    )  # fmt: skip
    return cut_value, cut_token


@triton.jit
def tile_offsets(DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """[DEPTH, WIDTH]: offsets of a tile's tokens from its first."""
    return tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def by_lane(values, DEPTH: tl.constexpr, LANES: tl.constexpr, ELEMENTS: tl.constexpr):
    """A tile as [DEPTH, LANES, ELEMENTS]: only the second dimension crosses threads."""
    return tl.reshape(values, (DEPTH, LANES, ELEMENTS))


@triton.jit
def scaled(raw, tokens, start, mask_token_id, temperature, CHUNK: tl.constexpr):
    """A chunk's logits in fp32 divided by the temperature, -inf for the mask token."""
    values = raw.to(tl.float32)
    if (temperature > 0) & (temperature != 1.0):
        # The quotient as IEEE rounds it, from the reciprocal and one correction.
        guess = values * (1.0 / temperature)
        rest = tl.fma(-guess, tl.zeros_like(values) + temperature, values)
        exact = tl.fma(rest, tl.zeros_like(values) + 1.0 / temperature, guess)
        values = tl.where(tl.abs(guess) < LARGE, exact, guess)
    if (mask_token_id >= start) & (mask_token_id < start + CHUNK):
        values = tl.where(tokens == mask_token_id, float("-inf"), values)
    return values


@triton.jit
def exp_from(values, base):
    """exp(values) over 2 ** base. A fused product and sum rounds once, so that a rounded base is
    the same everywhere."""
    return tl.exp2(tl.fma(values, tl.zeros_like(values) + LOG2_E, -base))


@triton.jit
def cut(values, tokens, value_cut, token_cut):
    """-inf for logits that the row's filters drop; NaN stays: the row must not look finite."""
    drop = (values < value_cut) | ((values == value_cut) & (tokens > token_cut))
    return tl.where(drop, float("-inf"), values)


@triton.jit
def load_scaled(row_logits, tokens, start, vocab_size, mask_token_id, temperature,
                CHUNK: tl.constexpr):  # fmt: skip
    """The chunk that begins at ``start``, scaled; -inf after the end of the vocabulary."""
    raw = tl.load(row_logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return scaled(raw, tokens, start, mask_token_id, temperature, CHUNK)


@triton.jit
def sum_of_lanes(values):
    """[LANES] sums of a tile by lane, each within its thread."""
    return tl.sum(tl.sum(values, 2), 0)


@triton.jit
def top_of_lanes(values):
    """[LANES] maxima of a tile by lane, each within its thread."""
    return tl.max(tl.max(values, 2), 0)


@triton.jit
def _order_of(value, SPARE: tl.constexpr):
    """int64 in the order of floats whose ``SPARE`` lowest bits are zero; -0.0 equals 0.0."""
    # Through a tensor, because the interpreter cannot read the bits of a scalar.
    values = tl.zeros([16], tl.float32) + value
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SPARE
    return tl.max(order, 0).to(tl.int64)


@triton.jit
def _value_of(order, SPARE: tl.constexpr):
    """The fp32 value of an order."""
    orders = tl.zeros([16], tl.int32) + order.to(tl.int32)
    bits = orders << SPARE
    bits = tl.where(orders < 0, (bits | ((1 << SPARE) - 1)) ^ 0x7FFFFFFF, bits)
    return tl.max(bits.to(tl.float32, bitcast=True), 0)


@triton.jit
def _between(low, high, quarter, linear, SPARE: tl.constexpr):
    """A threshold at 1, 2 or 3 quarters from ``low`` to ``high``, in values or in orders."""
    order = low + ((high - low) * quarter >> 2)
    if linear:
        begin = _value_of(low, SPARE)
        value = begin + (_value_of(high, SPARE) - begin) * (quarter * 0.25)
        order = _order_of(value, SPARE)
    return order


@triton.jit
def _search(
    row_logits, offsets, vocab_size, mask_token_id, divisor, factor, base, total,
    low, high, top_p, top_k, by_top_p, by_top_k,
    SPARE: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """The smallest order above which the mass is at most ``top_p`` and the count below ``top_k``,
    with that mass and count, and the count above the next lower order. The latter is FAR if the
    search never moved ``low``. ``low`` is too small and ``high`` is large enough; masses are added
    up if ``by_top_p``, counts if ``by_top_k``."""
    CHUNK: tl.constexpr = DEPTH * LANES * ELEMENTS
    mass_above = total * 0.0
    count_above = top_k * 0
    count_above_low = count_above + FAR
    rounds = count_above
    while high - low > 1:
        linear = (rounds < LINEAR_ROUNDS) & (high - low > 64)
        order_1 = _between(low, high, 1, linear, SPARE)
        order_2 = _between(low, high, 2, linear, SPARE)
        order_3 = _between(low, high, 3, linear, SPARE)
        value_1 = _value_of(order_1, SPARE)
        value_2 = _value_of(order_2, SPARE)
        value_3 = _value_of(order_3, SPARE)
        sums_1 = tl.zeros([LANES], tl.float32)
        sums_2 = tl.zeros([LANES], tl.float32)
        sums_3 = tl.zeros([LANES], tl.float32)
        counts_1 = tl.zeros([LANES], tl.int32)
        counts_2 = tl.zeros([LANES], tl.int32)
        counts_3 = tl.zeros([LANES], tl.int32)
        for start in range(0, vocab_size, CHUNK):
            keys = load_scaled(
                row_logits, start + offsets, start, vocab_size, mask_token_id, divisor, CHUNK
            )
            keys = by_lane(keys, DEPTH, LANES, ELEMENTS)
            if by_top_p:
                weights = tl.exp2(tl.fma(keys, tl.zeros_like(keys) + factor, -base))
                sums_1 += sum_of_lanes(tl.where(keys > value_1, weights, 0.0))
                sums_2 += sum_of_lanes(tl.where(keys > value_2, weights, 0.0))
                sums_3 += sum_of_lanes(tl.where(keys > value_3, weights, 0.0))
            if by_top_k:
                counts_1 += sum_of_lanes((keys > value_1).to(tl.int32))
                counts_2 += sum_of_lanes((keys > value_2).to(tl.int32))
                counts_3 += sum_of_lanes((keys > value_3).to(tl.int32))
        mass_1, count_1 = tl.sum(sums_1, 0), tl.sum(counts_1, 0)
        mass_2, count_2 = tl.sum(sums_2, 0), tl.sum(counts_2, 0)
        mass_3, count_3 = tl.sum(sums_3, 0), tl.sum(counts_3, 0)
        fits_1 = (mass_1 / total <= top_p) & (count_1 < top_k)
        fits_2 = (mass_2 / total <= top_p) & (count_2 < top_k)
        fits_3 = (mass_3 / total <= top_p) & (count_3 < top_k)
        if fits_1:
            high = order_1
            mass_above = mass_1
            count_above = count_1
        elif fits_2:
            low = order_1
            count_above_low = count_1
            high = order_2
            mass_above = mass_2
            count_above = count_2
        elif fits_3:
            low = order_2
            count_above_low = count_2
            high = order_3
            mass_above = mass_3
            count_above = count_3
        else:
            low = order_3
            count_above_low = count_3
        rounds += 1
    return high, mass_above, count_above, count_above_low


@triton.jit
def _cutoff_kernel(
    logits, row_stride, vocab_size, mask_token_id, temperatures, top_ps, top_ks,
    cut_value, cut_token,
    TOP_K_FIRST: tl.constexpr, SPARE: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """The value and the id of the last token that top-p and top-k keep; -inf if all are kept."""
    CHUNK: tl.constexpr = DEPTH * LANES * ELEMENTS
    row = tl.program_id(0)
    top_p = tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    if top_k <= 0:
        top_k = vocab_size
    if (top_p >= 1.0) & (top_k >= vocab_size):
        tl.store(cut_value + row, float("-inf"))
        tl.store(cut_token + row, vocab_size)
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    offsets = tile_offsets(DEPTH, LANES * ELEMENTS)
    # The compared values: logits of 16 bits unchanged, because a division keeps their order and
    # ties; others divided by the temperature, which may make two of them equal.
    divisor = temperature
    factor = temperature * 0.0 + LOG2_E  # of a key in base 2
    if SPARE > 0:
        divisor = 0.0
        if temperature > 0:
            factor = LOG2_E / temperature

    peaks = tl.zeros([LANES], tl.float32) - LARGE
    least = tl.zeros([LANES], tl.float32) + LARGE
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab_size, CHUNK):
        keys = load_scaled(
            row_logits, start + offsets, start, vocab_size, mask_token_id, divisor, CHUNK
        )
        keys = by_lane(keys, DEPTH, LANES, ELEMENTS)
        new_peaks = tl.maximum(peaks, top_of_lanes(keys))
        bases = new_peaks * factor
        weights = tl.exp2(tl.fma(keys, tl.zeros_like(keys) + factor, -bases[None, :, None]))
        sums = sums * tl.exp2(peaks * factor - bases) + sum_of_lanes(weights)
        finite = tl.where(keys == float("-inf"), LARGE, keys)
        least = tl.minimum(least, tl.min(tl.min(finite, 2), 0))
        peaks = new_peaks
    peak = tl.max(peaks, 0)
    base = peak * factor
    total = tl.sum(sums * tl.exp2(peaks * factor - base), 0)
    if total == 0:
        tl.store(cut_value + row, float("-inf"))
        tl.store(cut_token + row, vocab_size)
        return

    # The cut is at least the smallest value, and at least the value below which all tokens together
    # have less mass than top-p drops.
    by_top_k = top_k < vocab_size
    by_top_p = top_p < 1.0
    low = _order_of(tl.min(least, 0), SPARE) - 1
    high = _order_of(peak, SPARE)
    if TOP_K_FIRST:  # noqa: SIM102 - known when it is compiled, the other ones are not
        if by_top_k & by_top_p:
            # Top-p of the whole mass is less by the share that top-k keeps: whole ties, so all of
            # them if the search found no lower order with more.
            order, mass, count, count_low = _search(
                row_logits, offsets, vocab_size, mask_token_id, divisor, factor, base, total,
                low, high, total * 0.0 + 2.0, top_k, True, True,
                SPARE, DEPTH, LANES, ELEMENTS,
            )  # fmt: skip
            low = order - 1
            each = tl.exp2(tl.fma(_value_of(order, SPARE), factor, -base))
            share = tl.minimum((mass + each * (count_low - count).to(tl.float32)) / total, 1.0)
            top_p *= tl.where(count_low == FAR, 1.0, share)
    if by_top_p:
        dropped = tl.maximum((1.0 - top_p) * total / vocab_size, 1.0e-37)
        far = peak + (tl.log2(dropped) - 1.0) / factor
        low = tl.maximum(low, _order_of(far, SPARE) - 1)
    else:
        top_p = 2.0
    high, mass_above, count_above, count_above_low = _search(
        row_logits, offsets, vocab_size, mask_token_id, divisor, factor, base, total,
        low, high, top_p, top_k, by_top_p, by_top_k,
        SPARE, DEPTH, LANES, ELEMENTS,
    )  # fmt: skip

    # Ties at the cut are kept by lowest id, as many as top-p allows; top-k keeps all of them.
    value = _value_of(high, SPARE)
    each = tl.exp2(tl.fma(value, factor, -base)) / total
    by_mass = (top_p - mass_above / total) / tl.maximum(each, 1.0e-30)
    ties = 1 + tl.floor(tl.minimum(by_mass, 1.0e9)).to(tl.int32)
    last = count_above * 0 + vocab_size
    # Not counted if only top-p is used.
    if by_top_p & ((not by_top_k) | (count_above_low - count_above > ties)):
        seen = count_above * 0
        for start in range(0, vocab_size, CHUNK):
            tokens = start + tl.arange(0, CHUNK)
            keys = load_scaled(row_logits, tokens, start, vocab_size, mask_token_id, divisor, CHUNK)
            is_tie = ((keys == value) & (tokens < vocab_size)).to(tl.int32)
            rank = seen + tl.cumsum(is_tie, 0)
            found = tl.where((is_tie == 1) & (rank == ties), tokens, FAR)
            last = tl.minimum(last, tl.min(found, 0))
            seen += tl.sum(is_tie, 0)
    if (SPARE > 0) & (temperature > 0):
        value = tl.div_rn(value, temperature)
    tl.store(cut_value + row, value)
    tl.store(cut_token + row, last)
