# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What a row of logits loses before a token is chosen: mask token, temperature, top-p, top-k.

The first two as device functions that other kernels call. The filters become one pair a row, the
value and the id of the last token kept, found by bisection over the bits of a float: about 35
readings of a filtered row, from L2, and none of other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# `_ordered(-inf)`
ORDER_OF_MINUS_INF = tl.constexpr(-2139095041)
FAR = tl.constexpr(2147483647)


def launch_cutoff(
    logits: Tensor,
    row_stride: int,
    vocab_size: int,
    mask_token_id: int,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    chunk: int,
    num_warps: int,
) -> tuple[Tensor, Tensor]:
    """(value [R] fp32, id [R] int32): kept is what is larger, or as large with no larger id."""
    rows = len(logits)
    cut_value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cut_token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _cutoff_kernel[(rows,)](
        logits,
        row_stride,
        vocab_size,
        mask_token_id,
        temperature,
        top_p,
        top_k,
        cut_value,
        cut_token,
        CHUNK=chunk,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return cut_value, cut_token


@triton.jit
def scaled(raw, tokens, start, mask_token_id, temperature, CHUNK: tl.constexpr):
    """A chunk's logits in fp32 over the temperature, -inf for the mask token."""
    values = raw.to(tl.float32)
    if temperature > 0:
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
    if (mask_token_id >= start) & (mask_token_id < start + CHUNK):
        values = tl.where(tokens == mask_token_id, float("-inf"), values)
    return values


@triton.jit
def cut(values, tokens, value_cut, token_cut):
    """-inf for what the row's filters drop."""
    keep = (values > value_cut) | ((values == value_cut) & (tokens <= token_cut))
    return tl.where(keep, values, float("-inf"))


@triton.jit
def load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK: tl.constexpr):
    """The chunk that begins at ``start``, scaled; -inf past the end of the vocabulary."""
    tokens = start + tl.arange(0, CHUNK)
    raw = tl.load(row_logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return scaled(raw, tokens, start, mask_token_id, temperature, CHUNK)


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
        values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
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
            values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
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
        values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
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
        values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
        is_tie = ((values == value) & (tokens < vocab_size)).to(tl.int32)
        rank = seen + tl.cumsum(is_tie, 0)
        found = tl.where((is_tie == 1) & (rank == ties), tokens, FAR)
        last = tl.minimum(last, tl.min(found, 0))
        seen += tl.sum(is_tie, 0)
    tl.store(cut_value + row, value)
    tl.store(cut_token + row, last)
