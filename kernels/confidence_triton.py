# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of candidate sampling; `confidence` is the way in.

Logits are read once, in chunks, and no probability is written: each segment of a row leaves its
peak and where it is, its runner-up chunk, its sum of exponentials and, where asked, an entropy
term; the last kernel combines a row's segments and looks again only into the chunk that holds the
peak. Two more kernels return at once for rows that do not need them: the cut-off of top-p and
top-k (`filters_triton`), and the draw under Gumbel noise.

Bytes: R * V logits once, one chunk a row again; drawn rows once more, filtered rows about 35 times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels import filters_triton
from effuse.kernels.filters_triton import cut, load_scaled, scaled
from effuse.kernels.philox_triton import gumbel_tile

MAX_CHUNK = 4096
SEGMENTS = 8
# Noise takes more registers for each token.
DRAW_CHUNK = 2048
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
    # Segments depend on the vocabulary alone, so a row's sums do not depend on the batch.
    segment = triton.cdiv(triton.cdiv(vocab_size, SEGMENTS), chunk) * chunk
    num_segments = triton.cdiv(vocab_size, segment)
    drawn_token = torch.empty(rows, dtype=torch.int32, device=device)
    drawn_value = torch.empty(rows, dtype=torch.float32, device=device)
    partial = torch.empty((4, rows, num_segments), dtype=torch.float32, device=device)
    peak_chunk = torch.empty((rows, num_segments), dtype=torch.int32, device=device)
    num_warps = 8 if chunk >= 4096 else 4
    shape = (logits, logits.stride(0), vocab_size, mask_token_id, temperature)
    cut_value, cut_token = filters_triton.launch_cutoff(*shape, top_p, top_k, chunk, num_warps)
    _segment_kernel[(num_segments, rows)](
        *shape,
        cut_value,
        cut_token,
        score_kind,
        partial,
        peak_chunk,
        SEGMENT=segment,
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
        peak_chunk,
        drawn_token,
        drawn_value,
        num_segments,
        token,
        confidence,
        score,
        CHUNK=chunk,
        TILE_SEGMENTS=triton.next_power_of_2(num_segments),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return token, confidence, score


@triton.jit
def _segment_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    score_kinds,
    partial,
    peak_chunk,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Peak, sum, entropy term and runner-up of one segment of one row, and the peak's chunk."""
    segment = tl.program_id(0)
    row = tl.program_id(1)
    row_logits = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    value_cut = tl.load(cut_value + row)
    token_cut = tl.load(cut_token + row)
    has_entropy = tl.load(score_kinds + row) == NEG_ENTROPY
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, vocab_size)
    lane = tl.arange(0, CHUNK)
    # The peak starts finite: a chunk may hold nothing but -inf.
    peak = -1.0e30
    runner_up = -1.0e30
    where_peak = begin
    sums = tl.zeros([CHUNK], tl.float32)
    terms = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(begin, end, CHUNK, num_stages=3):
        tokens = start + lane
        raw = tl.load(row_logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        values = scaled(raw, tokens, start, mask_token_id, temperature, CHUNK)
        if value_cut > float("-inf"):
            values = cut(values, tokens, value_cut, token_cut)
        top = tl.max(values, 0)
        if top > peak:
            where_peak = start
        runner_up = tl.maximum(runner_up, tl.minimum(peak, top))
        new_peak = tl.maximum(peak, top)
        weights = tl.exp(values - new_peak)
        shrink = tl.exp(peak - new_peak)
        if has_entropy:
            fresh = tl.where(weights > 0, weights * (values - new_peak), 0.0)
            terms = (terms + (peak - new_peak) * sums) * shrink + fresh
        sums = sums * shrink + weights
        peak = new_peak
    place = row * tl.num_programs(0) + segment
    step = tl.num_programs(1) * tl.num_programs(0)
    tl.store(peak_chunk + place, where_peak)
    tl.store(partial + place, peak)
    tl.store(partial + place + step, tl.sum(sums, 0))
    tl.store(partial + place + 2 * step, tl.sum(terms, 0))
    tl.store(partial + place + 3 * step, runner_up)


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
        values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
        values = cut(values, tokens, value_cut, token_cut)
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
    peak_chunk,
    drawn_token,
    drawn_value,
    num_segments,
    token_out,
    confidence_out,
    score_out,
    CHUNK: tl.constexpr,
    TILE_SEGMENTS: tl.constexpr,
):
    """Combine the segments of one row and find its token."""
    row = tl.program_id(0)
    kind = tl.load(score_kinds + row)
    segment = tl.arange(0, TILE_SEGMENTS)
    present = segment < num_segments
    place = row * num_segments + segment
    step = tl.num_programs(0) * num_segments
    peaks = tl.load(partial + place, mask=present, other=-1.0e30)
    sums = tl.load(partial + place + step, mask=present, other=0.0)
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
    best = tl.min(tl.where(present & (peaks == peak), segment, FAR), 0)
    start = tl.load(peak_chunk + row * num_segments + best)
    tokens = start + tl.arange(0, CHUNK)
    row_logits = logits + row.to(tl.int64) * row_stride
    values = load_scaled(row_logits, start, vocab_size, mask_token_id, temperature, CHUNK)
    values = cut(values, tokens, tl.load(cut_value + row), tl.load(cut_token + row))
    mode = tl.min(tl.where(values == tl.max(values, 0), tokens, FAR), 0)
    token = mode
    confidence = 1.0 / total
    if temperature > 0:
        token = tl.load(drawn_token + row)
        confidence = tl.exp(tl.load(drawn_value + row) - peak) / total
    score = confidence
    if kind == MARGIN:
        second = tl.max(tl.where(tokens == mode, float("-inf"), values), 0)
        runners_up = tl.load(partial + place + 3 * step, mask=present, other=-1.0e30)
        elsewhere = tl.max(tl.where(segment == best, runners_up, peaks), 0)
        score = (1.0 - tl.exp(tl.maximum(second, elsewhere) - peak)) / total
    if kind == NEG_ENTROPY:
        terms = tl.load(partial + place + 2 * step, mask=present, other=0.0)
        moved = tl.sum(shrink * (terms + tl.where(sums > 0, (peaks - peak) * sums, 0.0)), 0)
        score = moved / total - tl.log(total)
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(confidence_out + row, confidence)
    tl.store(score_out + row, score)
