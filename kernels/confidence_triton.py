# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of candidate sampling; `confidence` is the way in.

Logits are read once, in chunks, and no probability is written: each chunk leaves its peak, its
sum of exponentials and, where asked, an entropy term; the last kernel combines a row's chunks and
looks again only into the chunk that holds the token. Two more kernels return at once for rows that
do not need them: the cut-off of top-p and top-k, by bisection over the bits of a float, and the
draw under Gumbel noise.

Bytes: R * V logits once, one chunk a row again; drawn rows once more, filtered rows about 35 times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.philox_triton import gumbel_tile

MAX_CHUNK = 8192
# Noise takes more registers for each token.
DRAW_CHUNK = 2048
# `_ordered(-inf)`
ORDER_OF_MINUS_INF = tl.constexpr(-2139095041)
MARGIN = tl.constexpr(1)
NEG_ENTROPY = tl.constexpr(2)
FAR = tl.constexpr(2147483647)


def launch(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    counters: tuple[Tensor, Tensor, Tensor, Tensor],
    score_kind: Tensor,
    mask_token_id: int,
    max_chunk: int = MAX_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token [R] int64, confidence [R] fp32, score [R] fp32); nothing is read back by the host.

    ``counters`` is (seed, position, denoise_count, answer_index).
    """
    rows, vocab_size = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    confidence = torch.empty(rows, dtype=torch.float32, device=device)
    score = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return token, confidence, score
    chunk = min(max_chunk, max(16, triton.next_power_of_2(vocab_size)))
    num_chunks = triton.cdiv(vocab_size, chunk)
    cut_value = torch.empty(rows, dtype=torch.float32, device=device)
    cut_token = torch.empty(rows, dtype=torch.int32, device=device)
    drawn_token = torch.empty(rows, dtype=torch.int32, device=device)
    drawn_value = torch.empty(rows, dtype=torch.float32, device=device)
    partial = torch.empty((3, rows, num_chunks), dtype=torch.float32, device=device)
    num_warps = 8 if chunk >= 4096 else 4
    shape = (logits, logits.stride(0), vocab_size, mask_token_id, temperature)
    _cutoff_kernel[(rows,)](
        *shape,
        top_p,
        top_k,
        cut_value,
        cut_token,
        CHUNK=chunk,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    _chunk_kernel[(num_chunks, rows)](
        *shape,
        cut_value,
        cut_token,
        score_kind,
        partial,
        CHUNK=chunk,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    _draw_kernel[(rows,)](
        *shape,
        cut_value,
        cut_token,
        *counters,
        drawn_token,
        drawn_value,
        CHUNK=min(chunk, DRAW_CHUNK),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    _finish_kernel[(rows,)](
        *shape,
        cut_value,
        cut_token,
        score_kind,
        partial,
        drawn_token,
        drawn_value,
        num_chunks,
        token,
        confidence,
        score,
        CHUNK=chunk,
        TILE_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return token, confidence, score


@triton.jit
def _load_scaled(row_logits, tokens, vocab_size, mask_token_id, temperature):
    """Logits in fp32 over the temperature, -inf for the mask token and past the end."""
    allowed = (tokens < vocab_size) & (tokens != mask_token_id)
    values = tl.load(row_logits + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    if temperature > 0:
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
    return tl.where(allowed, values, float("-inf"))


@triton.jit
def _load_kept(
    row_logits, tokens, vocab_size, mask_token_id, temperature, cut_value, cut_token
):  # fmt: skip
    """`_load_scaled` without what the row's filters drop."""
    values = _load_scaled(row_logits, tokens, vocab_size, mask_token_id, temperature)
    if cut_value > float("-inf"):
        keep = (values > cut_value) | ((values == cut_value) & (tokens <= cut_token))
        values = tl.where(keep, values, float("-inf"))
    return values


@triton.jit
def _ordered(values):
    """int32 with the order of the floats; -0.0 equals 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _cutoff_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    top_ps,
    top_ks,
    cut_value,
    cut_token,
    CHUNK: tl.constexpr,
):
    """The value and the id of the last token that top-p and top-k keep; -inf where all are kept."""
    row = tl.program_id(0)
    top_p = tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    if top_k <= 0:
        top_k = vocab_size
    if (top_p >= 1.0) & (top_k >= vocab_size):
        tl.store(cut_value + row, float("-inf"))
        tl.store(cut_token + row, vocab_size)
        return
    if top_p >= 1.0:
        top_p = 2.0
    row_logits = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, CHUNK)
    peak = -1.0e30
    total = 0.0
    for start in range(0, vocab_size, CHUNK):
        values = _load_scaled(row_logits, start + lane, vocab_size, mask_token_id, temperature)
        new_peak = tl.maximum(peak, tl.max(values, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(values - new_peak), 0)
        peak = new_peak

    # Smallest order so that what lies above it is less than top_p of the mass and than top_k.
    low = tl.full((), ORDER_OF_MINUS_INF - 1, tl.int64)
    high = tl.max(_ordered(tl.zeros([16], tl.float32) + peak), 0).to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        mass = 0.0
        count = 0
        for start in range(0, vocab_size, CHUNK):
            values = _load_scaled(row_logits, start + lane, vocab_size, mask_token_id, temperature)
            above = _ordered(values) > middle
            mass += tl.sum(tl.where(above, tl.exp(values - peak), 0.0), 0)
            count += tl.sum(above.to(tl.int32), 0)
        if (mass / total < top_p) & (count < top_k):
            high = middle
        else:
            low = middle

    # Ties at the cut-off are kept by lowest id, as many as both limits allow.
    order = high.to(tl.int32)
    value = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    mass = 0.0
    count = 0
    for start in range(0, vocab_size, CHUNK):
        values = _load_scaled(row_logits, start + lane, vocab_size, mask_token_id, temperature)
        above = values > value
        mass += tl.sum(tl.where(above, tl.exp(values - peak), 0.0), 0)
        count += tl.sum(above.to(tl.int32), 0)
    each = tl.exp(value - peak) / total
    by_mass = tl.ceil(tl.minimum((top_p - mass / total) / tl.maximum(each, 1.0e-30), 1.0e9))
    ties = tl.maximum(1, tl.minimum(top_k - count, by_mass.to(tl.int32)))
    seen = 0
    last = vocab_size
    for start in range(0, vocab_size, CHUNK):
        tokens = start + lane
        values = _load_scaled(row_logits, tokens, vocab_size, mask_token_id, temperature)
        is_tie = ((values == value) & (tokens < vocab_size)).to(tl.int32)
        rank = seen + tl.cumsum(is_tie, 0)
        found = tl.where((is_tie == 1) & (rank == ties), tokens, FAR)
        last = tl.minimum(last, tl.min(found, 0))
        seen += tl.sum(is_tie, 0)
    tl.store(cut_value + row, value)
    tl.store(cut_token + row, last)


@triton.jit
def _chunk_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    score_kinds,
    partial,
    CHUNK: tl.constexpr,
):
    """Peak, sum and entropy term of one chunk of one row."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    values = _load_kept(
        logits + row.to(tl.int64) * row_stride,
        chunk * CHUNK + tl.arange(0, CHUNK),
        vocab_size,
        mask_token_id,
        tl.load(temperatures + row),
        tl.load(cut_value + row),
        tl.load(cut_token + row),
    )
    # A chunk may hold nothing but -inf; its peak must stay finite for the differences.
    peak = tl.maximum(tl.max(values, 0), -1.0e30)
    weights = tl.exp(values - peak)
    place = partial + row * tl.num_programs(0) + chunk
    step = tl.num_programs(1) * tl.num_programs(0)
    tl.store(place, peak)
    tl.store(place + step, tl.sum(weights, 0))
    if tl.load(score_kinds + row) == NEG_ENTROPY:
        terms = tl.where(weights > 0, weights * (values - peak), 0.0)
        tl.store(place + 2 * step, tl.sum(terms, 0))


@triton.jit
def _draw_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    seeds,
    positions,
    denoise_counts,
    answer_indices,
    drawn_token,
    drawn_value,
    CHUNK: tl.constexpr,
):
    """The token of largest noisy logit of one row with temperature, and its logit."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    value_cut = tl.load(cut_value + row)
    token_cut = tl.load(cut_token + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    denoise_count = tl.load(denoise_counts + row)
    answer_index = tl.load(answer_indices + row)
    best = -float("inf")
    best_token = 0
    best_value = -float("inf")
    for start in range(0, vocab_size, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        values = _load_kept(
            row_logits, tokens, vocab_size, mask_token_id, temperature, value_cut, token_cut
        )
        noisy = values + gumbel_tile(seed, start, position, denoise_count, answer_index, CHUNK)
        top = tl.max(noisy, 0)
        if top > best:
            best = top
            best_token = tl.min(tl.where(noisy == top, tokens, FAR), 0)
            best_value = tl.max(tl.where(tokens == best_token, values, float("-inf")), 0)
    tl.store(drawn_token + row, best_token)
    tl.store(drawn_value + row, best_value)


@triton.jit
def _finish_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    score_kinds,
    partial,
    drawn_token,
    drawn_value,
    num_chunks,
    token_out,
    confidence_out,
    score_out,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Combine the chunks of one row and find its token."""
    row = tl.program_id(0)
    kind = tl.load(score_kinds + row)
    chunk = tl.arange(0, TILE_CHUNKS)
    present = chunk < num_chunks
    place = partial + row * num_chunks + chunk
    step = tl.num_programs(0) * num_chunks
    peaks = tl.load(place, mask=present, other=-1.0e30)
    sums = tl.load(place + step, mask=present, other=0.0)
    peak = tl.max(peaks, 0)
    shrink = tl.exp(peaks - peak)
    total = tl.sum(sums * shrink, 0)
    if total == 0:
        # Nothing but -inf: the lowest allowed id, without any confidence.
        tl.store(token_out + row, tl.where(mask_token_id == 0, 1, 0).to(tl.int64))
        tl.store(confidence_out + row, 0.0)
        tl.store(score_out + row, tl.where(kind == NEG_ENTROPY, float("-inf"), 0.0))
        return

    temperature = tl.load(temperatures + row)
    best = tl.min(tl.where(present & (peaks == peak), chunk, FAR), 0)
    tokens = best * CHUNK + tl.arange(0, CHUNK)
    values = _load_kept(
        logits + row.to(tl.int64) * row_stride,
        tokens,
        vocab_size,
        mask_token_id,
        temperature,
        tl.load(cut_value + row),
        tl.load(cut_token + row),
    )
    mode = tl.min(tl.where(values == tl.max(values, 0), tokens, FAR), 0)
    token = mode
    confidence = 1.0 / total
    if temperature > 0:
        token = tl.load(drawn_token + row)
        confidence = tl.exp(tl.load(drawn_value + row) - peak) / total
    score = confidence
    if kind == MARGIN:
        second = tl.max(tl.where(tokens == mode, float("-inf"), values), 0)
        elsewhere = tl.max(tl.where(present & (chunk != best), peaks, -1.0e30), 0)
        score = (1.0 - tl.exp(tl.maximum(second, elsewhere) - peak)) / total
    if kind == NEG_ENTROPY:
        terms = tl.load(place + 2 * step, mask=present, other=0.0)
        moved = tl.sum(shrink * (terms + tl.where(sums > 0, (peaks - peak) * sums, 0.0)), 0)
        score = moved / total - tl.log(total)
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(confidence_out + row, confidence)
    tl.store(score_out + row, score)
