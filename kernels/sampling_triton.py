# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of candidate sampling; call them through `sampling`.

Logits are read once and no probability is written. Each thread reduces the columns of its tiles to
a peak, a sum of exponentials and a runner-up, so that threads exchange nothing in the loop. Each
segment of a row stores the combination and the tile of its peak. The last kernel combines a row's
segments and only reads the tile with the answer again. Rows without temperature, filters and
entropy have a separate kernel; the other one returns immediately for them. That one draws in the
same reading, because a Gumbel draw is one more maximum. `sampling_filters_triton` finds cut-offs.

Bytes: R * V logits once, one tile of each row again; filtered rows about 8 times more (in 16 bits).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels import sampling_filters_triton
from effuse.kernels.sampling_filters_triton import (
    LOG2_E,
    by_lane,
    cut,
    exp_from,
    load_scaled,
    scaled,
    sum_of_lanes,
    tile_offsets,
    top_of_lanes,
)
from effuse.kernels.sampling_shared_triton import (
    SamplingShape,
    Tile,
    gumbel_of_high_bits,
    sampling_shape,
    words_of_quads,
)
from effuse.kernels.values import Candidates, RowSampling

MARGIN = tl.constexpr(1)
NEG_ENTROPY = tl.constexpr(2)
FAR = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-1.0e30)  # finite, because a tile may have only -inf
MOST_NOISE = tl.constexpr(17.4)  # Gumbel noise is smaller: -log(-log(1 - 2**-25)) = 17.33


def launch(
    logits: Tensor,
    sampling: RowSampling,
    mask_token_id: int,
    shape: SamplingShape | None = None,
    *,
    top_k_first: bool = False,
) -> Candidates:
    """`sampling.sample_confidence` on the device; nothing is read back by the host."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, score_kind = sampling.temperature, sampling.score
    counters = (
        sampling.seed,
        sampling.position,
        sampling.denoise_count,
        sampling.answer_index,
    )
    rows, vocab_size = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    confidence = torch.empty(rows, dtype=torch.float32, device=device)
    score = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return Candidates(token, confidence, score)
    shape = shape or sampling_shape(vocab_size)
    tile = Tile.of(logits.dtype, shape.chunk, shape.num_warps)
    segment = triton.cdiv(triton.cdiv(vocab_size, shape.segments), shape.chunk) * shape.chunk
    num_segments = triton.cdiv(vocab_size, segment)
    parts = torch.empty((5, rows, num_segments), dtype=torch.float32, device=device)
    places = torch.empty((2, rows, num_segments), dtype=torch.int32, device=device)
    cut_value, cut_token = sampling_filters_triton.launch_cutoff(
        logits, mask_token_id, sampling, tile, shape.num_warps, top_k_first
    )
    rows_of = (logits, logits.stride(0), vocab_size, mask_token_id, temperature)
    limits = (cut_value, cut_token, score_kind)
    # A base is rounded once and is then the same everywhere: no other product may be fused with its
    # difference. In one dimension, because a second one is limited to 65535 rows.
    _greedy_kernel[(num_segments * rows,)](
        *rows_of,
        *limits,
        parts,
        places,
        SEGMENT=segment,
        DEPTH=tile.depth,
        LANES=tile.lanes,
        ELEMENTS=tile.elements,
        num_warps=shape.num_warps,
        enable_fp_fusion=False,
    )
    _drawn_kernel[(num_segments * rows,)](
        *rows_of,
        *limits,
        *counters,
        parts,
        places,
        SEGMENT=segment,
        DEPTH=tile.depth,
        LANES=tile.lanes,
        ELEMENTS=tile.elements,
        num_warps=shape.num_warps,
        enable_fp_fusion=False,
    )
    _finish_kernel[(rows,)](
        *rows_of,
        *limits,
        *counters,
        parts,
        places,
        num_segments,
        token,
        confidence,
        score,
        CHUNK=shape.chunk,
        TILE_SEGMENTS=triton.next_power_of_2(num_segments),
        num_warps=shape.num_warps,
        enable_fp_fusion=False,
    )
    return Candidates(token, confidence, score)


@triton.jit
def _segment_and_row(vocab_size, SEGMENT: tl.constexpr):
    """The segments of this program: segment after segment of one row, then of the next."""
    num_segments = tl.cdiv(vocab_size, SEGMENT)
    return tl.program_id(0) % num_segments, tl.program_id(0) // num_segments


@triton.jit
def _is_plain(temperature, value_cut, score_kind):
    """Whether a row only needs peak and sum."""
    return (temperature <= 0) & (value_cut == float("-inf")) & (score_kind != NEG_ENTROPY)


@triton.jit
def _fold(values, start, peaks, sums, tiles, runners_up):
    """Adds a tile to each lane's peak, sum, tile of the peak and largest value elsewhere."""
    tops = top_of_lanes(values)
    tiles = tl.where(tops > peaks, start, tiles)
    runners_up = tl.maximum(runners_up, tl.minimum(peaks, tops))
    new_peaks = tl.maximum(peaks, tops)
    bases = new_peaks * LOG2_E
    weights = exp_from(values, bases[None, :, None])
    sums = sums * tl.exp2(peaks * LOG2_E - bases) + sum_of_lanes(weights)
    return new_peaks, sums, tiles, runners_up


@triton.jit
def _leave(parts, places, peaks, sums, tiles, runners_up):
    """Combines the lanes of a segment and stores the inputs of the last kernel."""
    peak = tl.max(peaks, 0)
    tile = tl.min(tl.where(peaks == peak, tiles, FAR), 0)
    runner_up = tl.max(tl.where(tiles == tile, runners_up, peaks), 0)
    place, step = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + place, peak)
    shrink = tl.exp2(peaks * LOG2_E - peak * LOG2_E)
    tl.store(parts + place + step, tl.sum(sums * shrink, 0))
    tl.store(parts + place + 2 * step, runner_up)
    tl.store(places + place, tile)


@triton.jit
def _greedy_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    score_kinds,
    parts,
    places,
    SEGMENT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """One segment of one row without temperature, filters and entropy."""
    CHUNK: tl.constexpr = DEPTH * LANES * ELEMENTS
    segment, row = _segment_and_row(vocab_size, SEGMENT)
    temperature = tl.load(temperatures + row)
    if not _is_plain(temperature, tl.load(cut_value + row), tl.load(score_kinds + row)):
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, vocab_size)
    whole_end = begin + (end - begin) // CHUNK * CHUNK
    offsets = tile_offsets(DEPTH, LANES * ELEMENTS)
    peaks = tl.zeros([LANES], tl.float32) + LOWEST
    sums = tl.zeros([LANES], tl.float32)
    tiles = tl.zeros([LANES], tl.int32) + begin
    runners_up = tl.zeros([LANES], tl.float32) + LOWEST
    for start in tl.range(begin, whole_end, CHUNK):
        raw = tl.load(row_logits + (start + offsets))
        values = scaled(raw, start + offsets, start, mask_token_id, 0.0, CHUNK)
        values = by_lane(values, DEPTH, LANES, ELEMENTS)
        peaks, sums, tiles, runners_up = _fold(values, start, peaks, sums, tiles, runners_up)
    if whole_end < end:
        values = load_scaled(
            row_logits, whole_end + offsets, whole_end, vocab_size, mask_token_id, 0.0, CHUNK
        )
        values = by_lane(values, DEPTH, LANES, ELEMENTS)
        peaks, sums, tiles, runners_up = _fold(values, whole_end, peaks, sums, tiles, runners_up)
    _leave(parts, places, peaks, sums, tiles, runners_up)


@triton.jit
def _drawn_kernel(
    logits,
    row_stride,
    vocab_size,
    mask_token_id,
    temperatures,
    cut_value,
    cut_token,
    score_kinds,
    seeds,
    positions,
    denoise_counts,
    answer_indices,
    parts,
    places,
    SEGMENT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """One segment of one row with temperature, filters or entropy."""
    CHUNK: tl.constexpr = DEPTH * LANES * ELEMENTS
    segment, row = _segment_and_row(vocab_size, SEGMENT)
    temperature = tl.load(temperatures + row)
    value_cut = tl.load(cut_value + row)
    kind = tl.load(score_kinds + row)
    if _is_plain(temperature, value_cut, kind):
        return
    token_cut = tl.load(cut_token + row)
    position = tl.load(positions + row)
    denoise_count = tl.load(denoise_counts + row)
    answer_index = tl.load(answer_indices + row)
    row_logits = logits + row.to(tl.int64) * row_stride
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, vocab_size)
    offsets = tile_offsets(DEPTH, LANES * ELEMENTS)
    quads = tile_offsets(DEPTH, LANES * ELEMENTS // 4)
    peaks = tl.zeros([LANES], tl.float32) + LOWEST
    sums = tl.zeros([LANES], tl.float32)
    terms = tl.zeros([LANES], tl.float32)
    tiles = tl.zeros([LANES], tl.int32) + begin
    runners_up = tl.zeros([LANES], tl.float32) + LOWEST
    drawn = tl.zeros([LANES], tl.float32) - float("inf")
    drawn_tiles = tl.zeros([LANES], tl.int32) + begin
    best = LOWEST * (denoise_count * 0 + 1)
    for start in range(begin, end, CHUNK):
        tokens = start + offsets
        values = load_scaled(
            row_logits, tokens, start, vocab_size, mask_token_id, temperature, CHUNK
        )
        if value_cut > float("-inf"):
            values = cut(values, tokens, value_cut, token_cut)
        # If a row is sure of a few tokens, most of its tiles cannot have the drawn one.
        if (temperature > 0) & (tl.max(tl.max(values, 1), 0) + MOST_NOISE > best):
            seed = tl.load(seeds + row)
            words = words_of_quads(seed, start // 4 + quads, position, denoise_count, answer_index)
            # Most other tokens cannot either: noise beats the best one only if 1 - u < -log(u) <
            # exp(value - best), and that needs no logarithm. The slack covers the rounding of both
            # sides.
            rest = (words ^ 0xFFFFFFFF).to(tl.uint32) >> 8
            room = exp_from(values, best * LOG2_E) * 1.05 - rest.to(tl.float32) * 0.5**24
            if tl.max(tl.max(room, 1), 0) > 0:
                noise = gumbel_of_high_bits((words >> 8).to(tl.int32))
                tops = top_of_lanes(by_lane(values + noise, DEPTH, LANES, ELEMENTS))
                drawn_tiles = tl.where(tops > drawn, start, drawn_tiles)
                drawn = tl.maximum(drawn, tops)
                best = tl.maximum(best, tl.max(drawn, 0))
        values = by_lane(values, DEPTH, LANES, ELEMENTS)
        old_peaks = peaks
        old_sums = sums
        peaks, sums, tiles, runners_up = _fold(values, start, peaks, sums, tiles, runners_up)
        if kind == NEG_ENTROPY:
            bases = peaks * LOG2_E
            below = tl.fma(values, tl.zeros_like(values) + LOG2_E, -bases[None, :, None])
            weights = tl.exp2(below)
            fresh = sum_of_lanes(tl.where(weights > 0, weights * below, 0.0))
            fall = old_peaks * LOG2_E - bases
            terms = (terms + fall * old_sums) * tl.exp2(fall) + fresh
    _leave(parts, places, peaks, sums, tiles, runners_up)
    place, step = tl.program_id(0), tl.num_programs(0)
    peak = tl.max(peaks, 0)
    fall = peaks * LOG2_E - peak * LOG2_E
    moved = tl.exp2(fall) * (terms + tl.where(sums > 0, fall * sums, 0.0))
    tl.store(parts + place + 3 * step, tl.sum(moved, 0))
    best = tl.max(drawn, 0)
    tl.store(parts + place + 4 * step, best)
    tl.store(places + place + step, tl.min(tl.where(drawn == best, drawn_tiles, FAR), 0))


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
    seeds,
    positions,
    denoise_counts,
    answer_indices,
    parts,
    places,
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
    peaks = tl.load(parts + place, mask=present, other=LOWEST)
    sums = tl.load(parts + place + step, mask=present, other=0.0)
    peak = tl.max(peaks, 0)
    base = peak * LOG2_E
    shrink = tl.exp2(peaks * LOG2_E - base)
    total = tl.sum(sums * shrink, 0)
    if total == 0:
        # Only -inf: the lowest allowed id, with confidence 0.
        tl.store(token_out + row, tl.where(mask_token_id == 0, 1, 0).to(tl.int64))
        tl.store(confidence_out + row, 0.0)
        tl.store(score_out + row, tl.where(kind == NEG_ENTROPY, float("-inf"), 0.0))
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
    token = mode
    confidence = exp_from(peak, base) / total
    score = confidence
    if kind == MARGIN:
        second = tl.max(tl.where(tokens == mode, float("-inf"), values), 0)
        runners_up = tl.load(parts + place + 2 * step, mask=present, other=LOWEST)
        elsewhere = tl.max(tl.where(segment == best, runners_up, peaks), 0)
        score = confidence - exp_from(tl.maximum(second, elsewhere), base) / total
    if kind == NEG_ENTROPY:
        terms = tl.load(parts + place + 3 * step, mask=present, other=0.0)
        fall = peaks * LOG2_E - base
        moved = tl.sum(shrink * (terms + tl.where(sums > 0, fall * sums, 0.0)), 0)
        score = (moved / total - tl.log2(total)) / LOG2_E
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
        quads = start // 4 + tl.arange(0, CHUNK // 4)
        words = words_of_quads(
            tl.load(seeds + row),
            quads,
            tl.load(positions + row),
            tl.load(denoise_counts + row),
            tl.load(answer_indices + row),
        )
        noisy = values + gumbel_of_high_bits((words >> 8).to(tl.int32))
        token = tl.min(tl.where(noisy == tl.max(noisy, 0), tokens, FAR), 0)
        value = tl.max(tl.where(tokens == token, values, float("-inf")), 0)
        confidence = exp_from(value, base) / total
        if kind == 0:
            score = confidence
    # NaN equals nothing, so no token was found; a reader of this one must find it.
    token = tl.minimum(token, vocab_size - 1)
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(confidence_out + row, confidence)
    tl.store(score_out + row, score)
