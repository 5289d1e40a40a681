# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of candidate sampling; call them through `sampling`.

Logits are read once and no probability is written. Each thread reduces the columns of its tiles to
a peak, a sum of exponentials and a runner-up, so that threads exchange nothing in the loop. Each
segment of a row stores the combination and the tile of its peak. The last kernel is in
`sampling_finish_triton`: it combines a row's segments and reads only the tile with the answer
again. Rows without temperature, filters and entropy have a separate kernel; the other one returns
immediately for them. That one draws in the same reading, because a Gumbel draw is one more maximum.
`sampling_filters_triton` finds cut-offs.

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
from effuse.kernels.sampling_finish_triton import FAR, LOWEST, NEG_ENTROPY, finish_kernel
from effuse.kernels.sampling_shared_triton import (
    SamplingShape,
    Tile,
    gumbel_of_high_bits,
    sampling_shape,
    words_of_quads,
)
from effuse.kernels.values import RECORD, Candidates, RowSampling

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
    rows, device = len(logits), logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    confidence = torch.empty(rows, dtype=torch.float32, device=device)
    score = torch.empty(rows, dtype=torch.float32, device=device)
    _sample(logits, sampling, mask_token_id, (token, confidence, score), shape, top_k_first)
    return Candidates(token, confidence, score)


def launch_record(
    logits: Tensor,
    sampling: RowSampling,
    mask_token_id: int,
    first_token: int,
    shape: SamplingShape | None = None,
) -> Tensor:
    """`sampling.share_record` on the device."""
    record = torch.empty(len(logits), RECORD, dtype=torch.float32, device=logits.device)
    _sample(logits, sampling, mask_token_id - first_token, (record,) * 3, shape, False, first_token)
    return record


def _sample(
    logits: Tensor,
    sampling: RowSampling,
    mask_token_id: int,
    results: tuple[Tensor, Tensor, Tensor],
    shape: SamplingShape | None,
    top_k_first: bool,
    first_token: int | None = None,
) -> None:
    """Fills the results: token, confidence and score, or a record three times if these logits are
    only those from a first token on."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, score_kind = sampling.temperature, sampling.score
    counters = (sampling.seed, sampling.position, sampling.denoise_count, sampling.answer_index)
    rows, vocab_size = logits.shape
    device = logits.device
    if rows == 0:
        return
    first_quad = (first_token or 0) // 4
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
        *rows_of, *limits, parts, places,
        SEGMENT=segment, DEPTH=tile.depth, LANES=tile.lanes, ELEMENTS=tile.elements,
        num_warps=shape.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    _drawn_kernel[(num_segments * rows,)](
        *rows_of, *limits, *counters, first_quad, parts, places,
        SEGMENT=segment, DEPTH=tile.depth, LANES=tile.lanes, ELEMENTS=tile.elements,
        num_warps=shape.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    finish_kernel[(rows,)](
        *rows_of, *limits, *counters, first_quad, parts, places, num_segments, *results,
        IS_SHARE=first_token is not None, CHUNK=shape.chunk,
        TILE_SEGMENTS=triton.next_power_of_2(num_segments), num_warps=shape.num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip


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
    logits, row_stride, vocab_size, mask_token_id, temperatures, cut_value, cut_token, score_kinds,
    parts, places,
    SEGMENT: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
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
    logits, row_stride, vocab_size, mask_token_id, temperatures, cut_value, cut_token, score_kinds,
    seeds, positions, denoise_counts, answer_indices, first_quad, parts, places,
    SEGMENT: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
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
            numbers = first_quad + start // 4 + quads
            words = words_of_quads(seed, numbers, position, denoise_count, answer_index)
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
