# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The last kernels of candidate sampling: from a row's segments to its token, or to a record of its
share of the vocabulary; and from the records of all shares to its token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.sampling_filters_triton import LOG2_E, cut, exp_from, load_scaled
from effuse.kernels.sampling_shared_triton import gumbel_of_high_bits, words_of_quads
from effuse.kernels.values import RECORD as _RECORD
from effuse.kernels.values import Candidates, RowSampling

MARGIN = tl.constexpr(1)
NEG_ENTROPY = tl.constexpr(2)
FAR = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-1.0e30)  # finite, because a tile may have only -inf
RECORD = tl.constexpr(_RECORD)


def launch_shares(records: Tensor, sampling: RowSampling, mask_token_id: int) -> Candidates:
    """`sampling.of_shares` on the device."""
    shares, rows, _ = records.shape
    device = records.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    confidence = torch.empty(rows, dtype=torch.float32, device=device)
    score = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        shares_kernel[(rows,)](
            records, records.stride(1), records.stride(0), mask_token_id, sampling.temperature,
            sampling.score, token, confidence, score,
            SHARES=shares, TILE=triton.next_power_of_2(shares), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return Candidates(token, confidence, score)


@triton.jit
def finish_kernel(
    logits, row_stride, vocab_size, mask_token_id, temperatures, cut_value, cut_token, score_kinds,
    seeds, positions, denoise_counts, answer_indices, first_quad, parts, places, num_segments,
    token_out, confidence_out, score_out,
    IS_SHARE: tl.constexpr, CHUNK: tl.constexpr, TILE_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Combine the segments of one row and find its token. Of a share of the vocabulary, which
    begins with `first_quad`, all outputs are its record."""
    row = tl.program_id(0)
    kind = tl.load(score_kinds + row)
    segment = tl.arange(0, TILE_SEGMENTS)
    present = segment < num_segments
    place = row * num_segments + segment
    step = tl.num_programs(0) * num_segments
    peaks = tl.load(parts + place, mask=present, other=LOWEST)
    sums = tl.load(parts + place + step, mask=present, other=0.0)
    peak = tl.max(peaks, 0)
    base = peak * LOG2_E
    shrink = tl.exp2(peaks * LOG2_E - base)
    total = tl.sum(sums * shrink, 0)
    if total == 0:
        if IS_SHARE:
            nothing = peak * 0.0
            _store_record(
                token_out, row, nothing + LOWEST, nothing, 0, nothing + float("-inf"), nothing,
                nothing + float("-inf"), 0, nothing + float("-inf"),
            )  # fmt: skip
        else:
            _store_nothing(token_out, confidence_out, score_out, row, mask_token_id, kind)
        return

    temperature = tl.load(temperatures + row)
    value_cut = tl.load(cut_value + row)
    token_cut = tl.load(cut_token + row)
    row_logits = logits + row.to(tl.int64) * row_stride
    best = tl.min(tl.where(present & (peaks == peak), segment, FAR), 0)
    start = tl.multiple_of(tl.load(places + row * num_segments + best), CHUNK)
    tokens = start + tl.arange(0, CHUNK)
    values = load_scaled(row_logits, tokens, start, vocab_size, mask_token_id, temperature, CHUNK)
    values = cut(values, tokens, value_cut, token_cut)
    mode = tl.min(tl.where(values == tl.max(values, 0), tokens, FAR), 0)
    second = peak * 0.0 + float("-inf")
    moved = peak * 0.0
    highest = peak * 0.0 + float("-inf")
    token = mode
    value = peak
    if kind == MARGIN:
        second = tl.max(tl.where(tokens == mode, float("-inf"), values), 0)
        runners_up = tl.load(parts + place + 2 * step, mask=present, other=LOWEST)
        elsewhere = tl.max(tl.where(segment == best, runners_up, peaks), 0)
        second = tl.maximum(second, elsewhere)
    if kind == NEG_ENTROPY:
        terms = tl.load(parts + place + 3 * step, mask=present, other=0.0)
        moved = _moved(peaks, sums, terms, base)
    if temperature > 0:
        drawn = tl.load(parts + place + 4 * step, mask=present, other=float("-inf"))
        best = tl.min(tl.where(present & (drawn == tl.max(drawn, 0)), segment, FAR), 0)
        start = tl.load(places + (tl.num_programs(0) + row) * num_segments + best)
        start = tl.multiple_of(start, CHUNK)
        tokens = start + tl.arange(0, CHUNK)
        values = load_scaled(
            row_logits, tokens, start, vocab_size, mask_token_id, temperature, CHUNK
        )
        values = cut(values, tokens, value_cut, token_cut)
        quads = first_quad + start // 4 + tl.arange(0, CHUNK // 4)
        words = words_of_quads(
            tl.load(seeds + row),
            quads,
            tl.load(positions + row),
            tl.load(denoise_counts + row),
            tl.load(answer_indices + row),
        )
        noisy = values + gumbel_of_high_bits((words >> 8).to(tl.int32))
        highest = tl.max(noisy, 0)
        token = tl.min(tl.where(noisy == highest, tokens, FAR), 0)
        value = tl.max(tl.where(tokens == token, values, float("-inf")), 0)
    # NaN equals nothing, so no token was found; a reader of this one must find it.
    token = tl.minimum(token, vocab_size - 1)
    if IS_SHARE:
        mode = tl.minimum(mode, vocab_size - 1) + 4 * first_quad
        token += 4 * first_quad
        _store_record(token_out, row, peak, total, mode, second, moved, highest, token, value)
    else:
        _store_outcome(
            token_out, confidence_out, score_out, row, base, total, second, moved, token, value,
            peak, kind,
        )  # fmt: skip


@triton.jit
def shares_kernel(
    records, row_stride, share_stride, mask_token_id, temperatures, score_kinds, token_out,
    confidence_out, score_out,
    SHARES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Combine the records of one row's shares of the vocabulary, in their order."""
    row = tl.program_id(0)
    kind = tl.load(score_kinds + row)
    temperature = tl.load(temperatures + row)
    share = tl.arange(0, TILE)
    present = share < SHARES
    record = records + row * row_stride + share * share_stride
    peaks = tl.load(record, mask=present, other=LOWEST)
    sums = tl.load(record + 1, mask=present, other=0.0)
    peak = tl.max(peaks, 0)
    base = peak * LOG2_E
    total = tl.sum(sums * tl.exp2(peaks * LOG2_E - base), 0)
    if total == 0:
        _store_nothing(token_out, confidence_out, score_out, row, mask_token_id, kind)
        return
    best = tl.min(tl.where(present & (peaks == peak) & (sums > 0), share, SHARES - 1), 0)
    seconds = tl.load(record + 3, mask=present, other=float("-inf"))
    second = tl.max(tl.where(share == best, seconds, peaks), 0)
    moved = _moved(peaks, sums, tl.load(record + 4, mask=present, other=0.0), base)
    tokens = tl.load(record + 2, mask=present, other=0.0)
    values = peaks
    if temperature > 0:
        highest = tl.load(record + 5, mask=present, other=float("-inf"))
        best = tl.min(tl.where(present & (highest == tl.max(highest, 0)), share, SHARES - 1), 0)
        tokens = tl.load(record + 6, mask=present, other=0.0)
        values = tl.load(record + 7, mask=present, other=0.0)
    token = tl.max(tl.where(share == best, tokens, 0.0), 0).to(tl.int32)
    value = tl.max(tl.where(share == best, values, float("-inf")), 0)
    _store_outcome(
        token_out, confidence_out, score_out, row, base, total, second, moved, token, value, peak,
        kind,
    )  # fmt: skip


@triton.jit
def _moved(peaks, sums, terms, base):
    """The sum of the entropy's terms of all parts, which each part has by its own peak."""
    fall = peaks * LOG2_E - base
    return tl.sum(tl.exp2(fall) * (terms + tl.where(sums > 0, fall * sums, 0.0)), 0)


@triton.jit
def _store_outcome(
    token_out, confidence_out, score_out, row, base, total, second, moved, token, value, peak, kind,
):  # fmt: skip
    confidence = exp_from(value, base) / total
    score = confidence
    if kind == MARGIN:
        score = exp_from(peak, base) / total - exp_from(second, base) / total
    if kind == NEG_ENTROPY:
        score = (moved / total - tl.log2(total)) / LOG2_E
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(confidence_out + row, confidence)
    tl.store(score_out + row, score)


@triton.jit
def _store_nothing(token_out, confidence_out, score_out, row, mask_token_id, kind):
    """Only -inf: the lowest allowed id, with confidence 0."""
    tl.store(token_out + row, tl.where(mask_token_id == 0, 1, 0).to(tl.int64))
    tl.store(confidence_out + row, 0.0)
    tl.store(score_out + row, tl.where(kind == NEG_ENTROPY, float("-inf"), 0.0))


@triton.jit
def _store_record(
    record, row, peak, total, mode, second, moved, highest, token, value
):  # fmt: skip
    place = record + row * RECORD
    tl.store(place, peak)
    tl.store(place + 1, total)
    tl.store(place + 2, mode * 1.0)
    tl.store(place + 3, second)
    tl.store(place + 4, moved)
    tl.store(place + 5, highest)
    tl.store(place + 6, token * 1.0)
    tl.store(place + 7, value)
