# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of the products of a mixture of experts; `experts` is the way in.

They go over tiles of picks (`experts_routes_triton`), as many as any choice may need; programs of
those that are left over end at once. Bytes: the weights of each chosen expert once, as its tiles
run side by side and meet in the L2 cache; activations, and what experts give, once a pick.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.experts_routes_triton import launch_sort
from effuse.kernels.rowwise import swiglu

COLUMNS_PER_PROGRAM = 1024  # of adding up

PICKS_THAT_GROUP = 56
"""So many picks an expert on average, and torch's grouped products are faster (H200, bf16)."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One program's tile of a product, [rows, columns] with steps of `depth` along the sum."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def launch_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """[T, H] from x [T, H], gate_up [E, 2I, H], down [E, H, I] and the picks [T, K]."""
    if len(x) == 0:
        return torch.empty_like(x)
    if x.dtype == torch.bfloat16 and experts.numel() >= PICKS_THAT_GROUP * len(gate_up):
        return grouped_mlp(x, gate_up, down, experts, weights)
    tile_rows = rows_of_tiles(experts.numel(), len(gate_up))
    picks = launch_sort(experts, len(gate_up), tile_rows)
    activated = launch_gate_up(x, gate_up, picks.places, picks.owners, experts.shape[1])
    given = launch_down(activated, down, picks.places, picks.owners, experts.numel())
    return _launch_sum(given, None, weights)


def grouped_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """The same by torch's grouped products, over a copy of each pick's row; at least one row."""
    picks = launch_sort(experts, len(gate_up), 1)
    order, ends = picks.places.flatten(), picks.counts.cumsum(0, dtype=torch.int32)
    rows = x.index_select(0, order // experts.shape[1])
    activated = swiglu(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    given = torch._grouped_mm(activated, down.transpose(1, 2), offs=ends)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return _launch_sum(given, ranks, weights)


def rows_of_tiles(num_picks: int, num_experts: int) -> int:
    """Rows of a tile: the power of two that is nearest to what an expert gets on average.

    Larger ones are left half empty, and take longer than the weights do that they share (H200).
    """
    average = num_picks / num_experts
    return min(64, max(16, 1 << max(0, round(math.log2(average)))))


def launch_gate_up(
    x: Tensor,
    gate_up: Tensor,
    places: Tensor,
    owners: Tensor,
    picks_a_row: int,
    shape: ProductTile | None = None,
) -> Tensor:
    """silu(gate) * up of the rows that tiles hold, [tiles * tile_rows, I]; gate_up [E, 2I, H]."""
    inner = gate_up.shape[1] // 2
    activated = torch.empty((places.numel(), inner), dtype=x.dtype, device=x.device)
    shape = shape or _tile_shape(places.shape[1], x.dtype, inner, x.shape[1], 64)
    _gate_up_kernel[(len(owners) * triton.cdiv(inner, shape.columns),)](
        x,
        gate_up,
        activated,
        places,
        owners,
        x.stride(0),
        len(owners),
        PICKS=picks_a_row,
        INNER=inner,
        HIDDEN=x.shape[1],
        TILE_ROWS=shape.rows,
        TILE_COLUMNS=shape.columns,
        DEPTH=shape.depth,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
    return activated


def launch_down(
    activated: Tensor,
    down: Tensor,
    places: Tensor,
    owners: Tensor,
    num_picks: int,
    shape: ProductTile | None = None,
) -> Tensor:
    """What each pick gives, [picks, H]; activated [tiles * tile_rows, I], down [E, H, I]."""
    hidden, inner = down.shape[1:]
    given = torch.empty((num_picks, hidden), dtype=activated.dtype, device=activated.device)
    shape = shape or _tile_shape(places.shape[1], activated.dtype, hidden, inner, 128)
    _down_kernel[(len(owners) * triton.cdiv(hidden, shape.columns),)](
        activated,
        down,
        given,
        places,
        owners,
        len(owners),
        INNER=inner,
        HIDDEN=hidden,
        TILE_ROWS=shape.rows,
        TILE_COLUMNS=shape.columns,
        DEPTH=shape.depth,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
    return given


def _launch_sum(given: Tensor, ranks: Tensor | None, weights: Tensor) -> Tensor:
    """[T, H] of weights [T, K] and given [picks, H], whose rows are the picks' `ranks`, if any."""
    rows, hidden = len(weights), given.shape[1]
    out = torch.empty((rows, hidden), dtype=given.dtype, device=given.device)
    columns = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(hidden))
    _sum_kernel[(rows, triton.cdiv(hidden, columns))](
        given,
        given if ranks is None else ranks,
        weights,
        out,
        PICKS=weights.shape[1],
        HIDDEN=hidden,
        COLUMNS=columns,
        HAS_RANKS=ranks is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _tile_shape(
    rows: int, dtype: torch.dtype, columns: int, depth: int, widest: int
) -> ProductTile:
    """Of a product with `columns` columns and a sum over `depth`, at most `widest` columns wide.

    Two or three programs fit a processor, with some 100 KB of weights on their way to it.
    """
    is_half = dtype != torch.float32
    fits = max(16, triton.next_power_of_2(depth))
    return ProductTile(
        rows=rows,
        columns=min(widest if is_half else widest // 2, max(16, triton.next_power_of_2(columns))),
        depth=min(fits, (128 if rows <= 32 else 64) if is_half else 32),
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    x,
    gate_up,
    activated,
    places,
    owners,
    row_stride,
    num_tiles,
    PICKS: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    place = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    pick = tl.load(places + place)
    row = (tl.maximum(pick, 0) // PICKS).to(tl.int64)  # places without a pick compute row 0
    column = tl.program_id(0) // num_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < INNER
    depth = tl.arange(0, DEPTH)
    source = x + row[:, None] * row_stride + depth[None, :]
    gate_at = gate_up + expert * (2 * INNER * HIDDEN) + column[None, :] * HIDDEN + depth[:, None]
    gate = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0 and INNER % TILE_COLUMNS == 0:
            values = tl.load(source + begin)
            gates, ups = tl.load(gate_at + begin), tl.load(gate_at + INNER * HIDDEN + begin)
        else:
            left = depth < HIDDEN - begin
            both = left[:, None] & inside[None, :]
            values = tl.load(source + begin, mask=left[None, :], other=0.0)
            gates = tl.load(gate_at + begin, mask=both, other=0.0)
            ups = tl.load(gate_at + INNER * HIDDEN + begin, mask=both, other=0.0)
        gate = tl.dot(values, gates, gate, input_precision="ieee")
        up = tl.dot(values, ups, up, input_precision="ieee")
    # Rounded to the storage dtype as separate operators would.
    dtype = activated.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    target = activated + place.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, result.to(dtype), mask=inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_kernel(
    activated,
    down,
    given,
    places,
    owners,
    num_tiles,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    place = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    pick = tl.load(places + place)
    column = tl.program_id(0) // num_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < HIDDEN
    depth = tl.arange(0, DEPTH)
    source = activated + place.to(tl.int64)[:, None] * INNER + depth[None, :]
    weight = down + expert * (HIDDEN * INNER) + column[None, :] * INNER + depth[:, None]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0 and HIDDEN % TILE_COLUMNS == 0:
            values, weights = tl.load(source + begin), tl.load(weight + begin)
        else:
            left = depth < INNER - begin
            values = tl.load(source + begin, mask=left[None, :], other=0.0)
            both = left[:, None] & inside[None, :]
            weights = tl.load(weight + begin, mask=both, other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    target = given + pick.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    stored = (pick >= 0)[:, None] & inside[None, :]
    tl.store(target, total.to(given.dtype.element_ty), mask=stored)


@triton.jit
def _sum_kernel(
    given,
    ranks,
    weights,
    out,
    PICKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(PICKS):
        pick = row * PICKS + place
        at = tl.load(ranks + pick).to(tl.int64) if HAS_RANKS else pick
        values = tl.load(given + at * HIDDEN + column, mask=mask, other=0.0).to(tl.float32)
        total += values * tl.load(weights + pick)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=mask)
