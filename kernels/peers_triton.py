# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel that sums ranks' rows over the memory of peers; call it through `peers`.

A program writes its rank's partial row into the buffers of its peers, waits until theirs have
arrived in its own buffer, adds all of them in the order of the ranks, and normalises. The values
are their own signals: a free place holds FREE, and no value that is sent has these bits.

A place is used again by the next sum but one of the same row. It is free by then. A rank clears it
in its kernel of sum n, before its kernel of sum n + 1 sends anything. A peer writes to it in sum
n + 2, so after its own sum n + 1, which waited for that. Nothing here depends on other rows, on the
number of rows, on collectives in between or on graphs, because each row's turn is in the device's
memory. All ranks must launch the same sums in the same order on one stream, as for NCCL.

Bytes of a row of H values, sent by each of N ranks: N - 1 rows, or with SHARES 2 (N - 1) / N rows,
because then one rank adds up the row for all of them and sends the sum. With AHEAD, which needs
SHARES, the first programs only send rows and never wait. Then come those that add up rows, then
those that wait for sums, so that the links are never idle. A row's turn ends after its sum has
arrived, and the sum needs the row that was sent. So the program that sends it has read the turn.

It may be launched early (`early_start`). Then it waits for the previous kernel before it reads
anything but the norm's weight and the addresses. It lets no kernel begin early.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.early_start import may_start_early
from effuse.kernels.rowwise_triton import weighted_sum
from effuse.kernels.values import WeightedParts

FREE = tl.constexpr(-1)  # the bits of a place that waits for a value: a NaN of every float type
WIDE = 4096  # values of a row from which a program has more warps
BITS = {2: torch.int16, 4: torch.int32}  # of values, by their bytes
_BITS = {2: tl.int16, 4: tl.int32}


def launch(
    x: Tensor | WeightedParts,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: Tensor,
    turns: Tensor,
    *,
    rank: int,
    size: int,
    shares: bool,
    ahead: bool | None = None,
    is_alike: bool = False,
    num_warps: int = 0,
    starts_early: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(normalised sum, sum) [T, H] of all ranks' x [T, H] and of residual [T, H]; all contiguous.

    buffers: addresses [N] int64 of all ranks' buffers [2, N, R, H]; turns: [R] int32. One kernel
    sums up to R rows. With `shares` one rank adds up a row for all, and `ahead` (None: also) lets
    all rows leave first. A program has `num_warps`, else as many as suit; these choose the order in
    which a row's squares are added, so with `is_alike` they do not depend on `shares`.
    `starts_early`: None if it may.
    """
    starts_early = may_start_early(residual.device) if starts_early is None else starts_early
    ahead = shares if ahead is None else ahead
    num_rows, width = residual.shape
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    tile = triton.next_power_of_2(width)
    weighted = x if isinstance(x, WeightedParts) else None
    places = None if weighted is None else weighted.places
    for first in range(0, num_rows, len(turns)):
        count = min(len(turns), num_rows - first)
        _sum_norm_kernel[((1 + ahead) * count,)](
            x.parts if isinstance(x, WeightedParts) else x, turns if places is None else places,
            weight if weighted is None else weighted.weights, residual, weight, out, total, buffers,
            turns, len(turns) * width, first, count, eps,
            RANK=rank, SIZE=size, PARTS=triton.next_power_of_2(size), SHARES=shares, AHEAD=ahead,
            WEIGHTED=0 if weighted is None else weighted.weights.shape[1],
            HAS_PLACES=places is not None, BITS=_BITS[residual.element_size()], WIDTH=width,
            TILE=tile, STARTS_EARLY=starts_early,
            num_warps=num_warps or (4 if tile < WIDE else 8 if shares or is_alike else 16),
            enable_fp_fusion=True, launch_pdl=starts_early,
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["first", "num_rows"])
def _sum_norm_kernel(
    x, places, weights, residual, weight, out, total, buffers, turns, part_stride, first, num_rows,
    eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr,
    AHEAD: tl.constexpr, WEIGHTED: tl.constexpr, HAS_PLACES: tl.constexpr, BITS: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program
    if AHEAD and program >= num_rows:
        row = _waiting_row(program - num_rows, num_rows, RANK, SIZE)
    owner = row % SIZE
    row = row.to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < WIDTH
    factor = tl.load(weight + column, mask=mask, other=0.0)
    here = _buffer(buffers, RANK, BITS)
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row)
    # In any rank's buffer, this row of the part of rank 0.
    place = (turn * SIZE).to(tl.int64) * part_stride + row * WIDTH
    from_here = place + RANK * part_stride + column
    own = tl.zeros([TILE], BITS)
    if (not AHEAD) or ((program < num_rows) != (owner == RANK)):
        own = _own(
            x, places, weights, first + row, column, out, BITS, WEIGHTED, HAS_PLACES, WIDTH, TILE
        )
    if SHARES:
        if (owner != RANK) and ((not AHEAD) or program < num_rows):
            tl.store(_buffer(buffers, owner, BITS) + from_here, own, mask=mask)
    else:
        for step in tl.static_range(1, SIZE):
            # Each rank begins with another one.
            there = _buffer(buffers, (RANK + step) % SIZE, BITS)
            tl.store(there + from_here, own, mask=mask)
    if AHEAD and program < num_rows:
        return
    at = (first + row) * WIDTH + column
    mine = here + place
    if SHARES and owner != RANK:
        bits = _received(mine + owner * part_stride + column, mask)
        values = bits.to(out.dtype.element_ty, bitcast=True)
    else:
        added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        values = _sum(mine, part_stride, own, added, mask, out, RANK, SIZE, PARTS, TILE)
        if SHARES:
            bits = _sendable(values.to(BITS, bitcast=True))
            for step in tl.static_range(1, SIZE):
                there = _buffer(buffers, (RANK + step) % SIZE, BITS)
                tl.store(there + from_here, bits, mask=mask)
            values = bits.to(out.dtype.element_ty, bitcast=True)
    tl.store(turns + row, 1 - turn)
    tl.store(total + at, values, mask=mask)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / WIDTH
    normed = (values * tl.rsqrt(mean + eps)).to(out.dtype.element_ty)
    result = normed.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _waiting_row(number, num_rows, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The rows that this rank adds up, then the others."""
    num_owned = (num_rows - RANK + SIZE - 1) // SIZE
    other = number - num_owned
    at = other % (SIZE - 1)
    of_others = other // (SIZE - 1) * SIZE + at + (at >= RANK).to(tl.int32)
    return tl.where(number < num_owned, number * SIZE + RANK, of_others)


@triton.jit
def _own(
    x, places, weights, row, column, out,
    BITS: tl.constexpr, WEIGHTED: tl.constexpr, HAS_PLACES: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The bits that this rank adds to a row; of weighted parts their sum, rounded."""
    if WEIGHTED > 0:
        given = weighted_sum(x, places, weights, row, column, WEIGHTED, HAS_PLACES, WIDTH, TILE)
    else:
        given = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0)
    return _sendable(given.to(out.dtype.element_ty).to(BITS, bitcast=True))


@triton.jit
def _buffer(buffers, rank, BITS: tl.constexpr):
    address = tl.multiple_of(tl.load(buffers + rank), 16)
    return tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)


@triton.jit
def _sendable(bits):
    # The largest value is a NaN too.
    largest: tl.constexpr = 2 ** (bits.dtype.primitive_bitwidth - 1) - 1
    return tl.where(bits == FREE, largest, bits).to(bits.dtype)


@triton.jit
def _received(places, mask):
    """What arrives in places, which are free again then."""
    bits = tl.load(places, mask=mask, other=0, volatile=True)
    while tl.max((bits == FREE).to(tl.int32), axis=None) != 0:
        bits = tl.load(places, mask=mask, other=0, volatile=True)
    # Each place was last read before the maximum of all was known.
    tl.store(places, tl.full(bits.shape, FREE, bits.dtype), mask=mask)
    return bits


@triton.jit
def _sum(
    mine, part_stride, own, added, mask, out,
    RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of all parts and `added`, rounded like `out`, because the next layer reads that."""
    part = tl.arange(0, PARTS)
    places = mine + part[:, None] * part_stride + tl.arange(0, TILE)[None, :]
    is_other = (part < SIZE) & (part != RANK)
    bits = _received(places, is_other[:, None] & mask[None, :])
    bits = tl.where((part == RANK)[:, None], own[None, :], bits)
    values = bits.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    return (tl.sum(values, axis=0) + added).to(out.dtype.element_ty)
