# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel that sums ranks' rows over the memory of peers; call it through `peers`.

A program has one row. It writes its rank's partial row into the buffers of its peers, waits until
theirs have arrived in its own buffer, adds all of them in the order of the ranks, and normalises.
The values are their own signals: a free place holds FREE, and no value that is sent has these bits.

A place is used again by the next sum but one of the same row. It is free by then. A rank clears it
in its kernel of sum n, before its kernel of sum n + 1 sends anything. A peer writes to it in sum
n + 2, so after its own sum n + 1, which waited for that. Nothing here depends on other rows, on the
number of rows, on collectives in between or on graphs, because each row's turn is in the device's
memory. All ranks must launch the same sums in the same order on one stream, as for NCCL.

Bytes of a row of H values, sent by each of N ranks: N - 1 rows, or with SHARES 2 (N - 1) / N rows,
because then one rank adds up the row for all of them and sends the sum.

It may be launched early (`early_start`). Then it waits for the previous kernel before it reads
anything but the norm's weight. It lets no kernel begin early.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.early_start import may_start_early

FREE = tl.constexpr(-1)  # the bits of a place that waits for a value: a NaN of every float type
WIDE = 4096  # values of a row from which a program has more warps
BITS = {2: torch.int16, 4: torch.int32}  # of values, by their bytes


def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: Tensor,
    turns: Tensor,
    *,
    rank: int,
    size: int,
    shares: bool,
    num_warps: int = 0,
    starts_early: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(normalised sum, sum) [T, H] of all ranks' x [T, H] and of residual [T, H]; all contiguous.

    buffers: addresses [N] int64 of all ranks' buffers [2, N, R, H]; turns: [R] int32, of T <= R
    rows. With `shares` one rank adds up a row for all. A program has `num_warps`, else as many
    as suit. `starts_early`: None if it may.
    """
    starts_early = may_start_early(x.device) if starts_early is None else starts_early
    num_rows, width = x.shape
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    tile = triton.next_power_of_2(width)
    if num_rows:
        _sum_norm_kernel[(num_rows,)](
            x.view(BITS[x.element_size()]),
            residual,
            weight,
            out,
            total,
            buffers,
            turns,
            len(turns) * width,
            eps,
            RANK=rank,
            SIZE=size,
            PARTS=triton.next_power_of_2(size),
            SHARES=shares,
            NAN=2 ** (8 * x.element_size() - 1) - 1,
            WIDTH=width,
            TILE=tile,
            STARTS_EARLY=starts_early,
            num_warps=num_warps or (4 if tile < WIDE else 8 if shares else 16),
            enable_fp_fusion=True,
            launch_pdl=starts_early,
        )
    return out, total


@triton.jit
def _sum_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    buffers,
    turns,
    part_stride,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    NAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < WIDTH
    at = row * WIDTH + column
    factor = tl.load(weight + column, mask=mask, other=0.0)
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row)
    # In any rank's buffer, this row of the part of rank 0.
    place = (turn * SIZE).to(tl.int64) * part_stride + row * WIDTH
    own = _sendable(tl.load(x + at, mask=mask, other=0), NAN)
    added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    mine = _buffer(buffers, RANK, own) + place
    for step in tl.static_range(1, SIZE):
        # Each rank begins with another one.
        other = (RANK + step) % SIZE
        there = _buffer(buffers, other, own) + place + RANK * part_stride
        if SHARES:
            if row % SIZE == other:
                tl.store(there + column, own, mask=mask)
        else:
            tl.store(there + column, own, mask=mask)
    if SHARES:
        if row % SIZE == RANK:
            values = _sum(mine, part_stride, own, added, mask, out, RANK, SIZE, PARTS, TILE)
            bits = _sendable(values.to(own.dtype, bitcast=True), NAN)
            values = bits.to(out.dtype.element_ty, bitcast=True)
            for step in tl.static_range(1, SIZE):
                there = _buffer(buffers, (RANK + step) % SIZE, own) + place
                tl.store(there + RANK * part_stride + column, bits, mask=mask)
        else:
            from_owner = mine + (row % SIZE) * part_stride + column
            values = _received(from_owner, mask).to(out.dtype.element_ty, bitcast=True)
    else:
        values = _sum(mine, part_stride, own, added, mask, out, RANK, SIZE, PARTS, TILE)
    tl.store(turns + row, 1 - turn)
    tl.store(total + at, values, mask=mask)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / WIDTH
    normed = (values * tl.rsqrt(mean + eps)).to(out.dtype.element_ty)
    result = normed.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _buffer(buffers, rank, like):
    """A rank's buffer, in elements of the type of `like`."""
    address = tl.multiple_of(tl.load(buffers + rank), 16)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype)), 16)


@triton.jit
def _sendable(bits, NAN: tl.constexpr):
    return tl.where(bits == FREE, NAN, bits).to(bits.dtype)


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
    mine,
    part_stride,
    own,
    added,
    mask,
    out,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sum of all parts and `added`, rounded like `out`, because the next layer reads that."""
    part = tl.arange(0, PARTS)
    places = mine + part[:, None] * part_stride + tl.arange(0, TILE)[None, :]
    is_other = (part < SIZE) & (part != RANK)
    bits = _received(places, is_other[:, None] & mask[None, :])
    bits = tl.where((part == RANK)[:, None], own[None, :], bits)
    values = bits.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    return (tl.sum(values, axis=0) + added).to(out.dtype.element_ty)
