# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels that gather a step's last rows and exchange boundaries.

Bytes: every gathered row read and written once; a boundary read or written if it is exchanged.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


def launch_gather(
    mixed: Tensor, residual: Tensor, wanted: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows ``wanted`` [R] and then ``kept`` [S] (-1: any row) of mixed [T, Q] and residual [T, H],
    both contiguous.
    """
    num_wanted, num_rows = len(wanted), len(wanted) + len(kept)
    outs = (
        mixed.new_empty(num_rows, mixed.shape[1]),
        residual.new_empty(num_rows, residual.shape[1]),
    )
    widest = max(mixed.shape[1], residual.shape[1])
    _gather_kernel[(num_rows, triton.cdiv(widest, TILE))](
        mixed,
        residual,
        *outs,
        wanted,
        kept,
        num_wanted,
        mixed.shape[1],
        residual.shape[1],
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return outs


def launch_exchange(hidden: Tensor, boundary_slots: Tensor, kept: Tensor, boundary: Tensor) -> None:
    """Exchanges rows between hidden [R + S, H] of `launch_gather` and boundary [S, H], in place.

    Row i takes the boundary of slot ``boundary_slots`` [R] unless that is -1; slot s takes row R +
    s unless ``kept`` [S] is -1. No slot does both, because a slot that stores has its first
    candidate after the stored rows.
    """
    width = hidden.shape[1]
    _exchange_kernel[(len(hidden), triton.cdiv(width, TILE))](
        hidden,
        boundary_slots,
        kept,
        boundary,
        len(boundary_slots),
        width,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _gather_kernel(
    mixed,
    residual,
    mixed_out,
    residual_out,
    wanted,
    kept,
    num_wanted,
    mixed_width,
    residual_width,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if place < num_wanted:
        row = tl.load(wanted + place)
    else:
        row = tl.maximum(tl.load(kept + place - num_wanted), 0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = tl.load(mixed + row * mixed_width + column, mask=column < mixed_width)
    tl.store(mixed_out + place * mixed_width + column, values, mask=column < mixed_width)
    values = tl.load(residual + row * residual_width + column, mask=column < residual_width)
    tl.store(residual_out + place * residual_width + column, values, mask=column < residual_width)


@triton.jit
def _exchange_kernel(
    hidden, boundary_slots, kept, boundary, num_wanted, width, TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = hidden + place * width + column
    if place < num_wanted:
        slot = tl.load(boundary_slots + place).to(tl.int64)
        if slot >= 0:
            vector = tl.load(boundary + slot * width + column, mask=column < width)
            tl.store(own, vector, mask=column < width)
    else:
        slot = place - num_wanted
        if tl.load(kept + slot) >= 0:
            vector = tl.load(own, mask=column < width)
            tl.store(boundary + slot * width + column, vector, mask=column < width)
