# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of the products of a mixture of experts; call them through `experts`.

They cover tiles of picks (`experts_routes_triton`), as many as any choice may need; programs of
unused tiles end immediately. Rows are read in place, and intermediate results are in the picks'
order. Bytes: the weights of each chosen expert once, because its tiles run side by side and meet in
the L2 cache; activations and results once for each pick.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from effuse.kernels.experts_routes_triton import SortedPicks, launch_sort
from effuse.kernels.values import WeightedParts

PICKS_THAT_GROUP = 56
"""From this many picks for an expert on average, `grouped_mlp` is faster (H200, bf16)."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One program's tile of a product, [rows, columns] with steps of `depth` along the sum."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    by_descriptor: bool = False  # whether the tensor memory accelerator copies the weights
    weights_first: bool = False  # in the instruction, whose order does not depend on rows then


WIDE_TILE = ProductTile(128, 128, 64, num_warps=8, num_stages=4, by_descriptor=True)
"""For the first product if experts have many picks each (H200, bf16)."""


def launch_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    num_ranks: int = 1,
    batch_invariant: bool = False,
) -> WeightedParts:
    """[T, H] from x [T, H], gate_up [E, 2I, H], down [E, H, I] and the picks [T, K].

    If experts are spread over `num_ranks`, negative picks are of another rank's. Their weights are
    0, and their parts are not written. With `batch_invariant` a pick's result does not depend on
    other picks.
    """
    if len(x) == 0:
        return WeightedParts(torch.empty_like(x), None, weights)
    is_shared, num_picks = num_ranks > 1, max(1, experts.numel() // num_ranks)
    is_plain = not (is_shared or batch_invariant) and x.dtype == torch.bfloat16
    if is_plain and num_picks >= PICKS_THAT_GROUP * len(gate_up):
        return grouped_mlp(x, gate_up, down, experts, weights)
    of_gate_up, of_down = tiles_of(num_picks, gate_up, down, weights_first=batch_invariant)
    # Other ranks' picks are sorted behind all others, as one more expert, and not computed.
    picks = launch_sort(experts, len(gate_up) + is_shared, of_gate_up.rows)
    activated = launch_gate_up(x, gate_up, picks, of_gate_up)
    return WeightedParts(launch_down(activated, down, picks, of_down), None, weights)


def grouped_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> WeightedParts:
    """The same for many picks: wide tiles, then torch's grouped product; at least one row."""
    is_half = x.dtype == torch.bfloat16
    shape = WIDE_TILE if is_half else ProductTile(64, 32, 32, num_warps=4, num_stages=2)
    picks = launch_sort(experts, len(gate_up), shape.rows)
    activated = launch_gate_up(x, gate_up, picks, shape)
    given = torch._grouped_mm(activated, down.transpose(1, 2), offs=picks.ends)
    return WeightedParts(given, picks.ranks, weights)


def tiles_of(
    num_picks: int, gate_up: Tensor, down: Tensor, *, weights_first: bool = False
) -> tuple[ProductTile, ProductTile]:
    """Tiles of both products for this many picks, with the same rows."""
    inner = gate_up.shape[1] // 2
    tiles = _tile_of(num_picks, gate_up, inner, 64), _tile_of(num_picks, down, down.shape[1], 128)
    of_gate_up, of_down = (replace(tile, weights_first=weights_first) for tile in tiles)
    return of_gate_up, of_down


def rows_of_tiles(num_picks: int, num_experts: int) -> int:
    """Rows of a tile: the power of two nearest to an expert's average picks.

    Larger tiles are half empty, and take longer than the weights that they share (H200).
    """
    average = num_picks / num_experts
    return min(64, max(16, 1 << max(0, round(math.log2(average)))))


def launch_gate_up(x: Tensor, gate_up: Tensor, picks: SortedPicks, shape: ProductTile) -> Tensor:
    """silu(gate) * up of the picks in sorted order, [picks, I]; x [T, H], gate_up [E, 2I, H]."""
    num_picks, inner, hidden = len(picks.order), gate_up.shape[1] // 2, x.shape[1]
    activated = torch.empty((num_picks, inner), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(len(picks.owners) * triton.cdiv(inner, shape.columns),)](
        x, _weights(gate_up, shape), activated, picks.order, picks.ends, picks.owners, picks.starts,
        x.stride(0), len(picks.owners),
        PICKS=num_picks // len(x), EXPERTS=len(gate_up), INNER=inner, HIDDEN=hidden,
        TILE_ROWS=shape.rows, TILE_COLUMNS=shape.columns, DEPTH=shape.depth,
        BY_DESCRIPTOR=shape.by_descriptor, WEIGHTS_FIRST=shape.weights_first,
        num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return activated


def launch_down(activated: Tensor, down: Tensor, picks: SortedPicks, shape: ProductTile) -> Tensor:
    """The result of each pick, [picks, H] by pick; activated [picks, I], down [E, H, I]."""
    hidden, inner = down.shape[1:]
    given = activated.new_empty(len(activated), hidden)
    _down_kernel[(len(picks.owners) * triton.cdiv(hidden, shape.columns),)](
        activated, down, given, picks.order, picks.ends, picks.owners, picks.starts,
        len(picks.owners),
        EXPERTS=len(down), INNER=inner, HIDDEN=hidden, TILE_ROWS=shape.rows,
        TILE_COLUMNS=shape.columns, DEPTH=shape.depth, WEIGHTS_FIRST=shape.weights_first,
        num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return given


def _weights(weights: Tensor, shape: ProductTile) -> Tensor | TensorDescriptor:
    """[E, O, H] in the form that a kernel with this tile needs."""
    if not shape.by_descriptor:
        return weights
    rows = weights.view(-1, weights.shape[-1])
    return TensorDescriptor.from_tensor(rows, [shape.columns, shape.depth])


def _tile_of(num_picks: int, weights: Tensor, columns: int, widest: int) -> ProductTile:
    """The tile of a product of this many picks with weights [E, O, H], with at most `widest`
    columns.

    Two or three programs fit a processor, with about 100 KB of weights under way.
    """
    rows = rows_of_tiles(num_picks, len(weights))
    is_half = weights.dtype != torch.float32
    fits = max(16, triton.next_power_of_2(weights.shape[2]))
    return ProductTile(
        rows=rows,
        columns=min(widest if is_half else widest // 2, max(16, triton.next_power_of_2(columns))),
        depth=min(fits, (128 if rows <= 32 else 64) if is_half else 32),
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """[rows, columns] fp32, or [columns, rows] if the weights come first."""
    if WEIGHTS_FIRST:
        zeros = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    return zeros


@triton.jit
def _add_product(values, weights, total, WEIGHTS_FIRST: tl.constexpr):
    """Adds values [rows, depth] times weights [depth, columns] to a total of `_zeros`."""
    if WEIGHTS_FIRST:
        total = tl.dot(tl.trans(weights), tl.trans(values), total, input_precision="ieee")
    else:
        total = tl.dot(values, weights, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    x, gate_up, activated, order, ends, owners, starts, row_stride, num_tiles,
    PICKS: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(owners + tile).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):  # an unused tile, or picks of another rank's experts
        return
    place = tl.load(starts + tile) + tl.arange(0, TILE_ROWS)
    held = place < tl.load(ends + expert)
    # Unused places compute row 0.
    row = (tl.load(order + place, mask=held, other=0) // PICKS).to(tl.int64)
    first = tl.program_id(0) // num_tiles * TILE_COLUMNS
    column = first + tl.arange(0, TILE_COLUMNS)
    inside = column < INNER
    depth = tl.arange(0, DEPTH)
    source = x + row[:, None] * row_stride + depth[None, :]
    gate_row = expert * (2 * INNER)
    if not BY_DESCRIPTOR:
        gate_at = gate_up + (gate_row + column)[None, :] * HIDDEN + depth[:, None]
    gate = _zeros(TILE_ROWS, TILE_COLUMNS, WEIGHTS_FIRST)
    up = _zeros(TILE_ROWS, TILE_COLUMNS, WEIGHTS_FIRST)
    for begin in range(0, HIDDEN, DEPTH):
        left = depth < HIDDEN - begin
        if HIDDEN % DEPTH == 0:
            values = tl.load(source + begin)
        else:
            values = tl.load(source + begin, mask=left[None, :], other=0.0)
        if BY_DESCRIPTOR:  # reads 0 after the end of the weights and of a row
            gate_first = (gate_row + first).to(tl.int32)
            gates = gate_up.load([gate_first, begin]).T
            ups = gate_up.load([gate_first + INNER, begin]).T
        elif HIDDEN % DEPTH == 0 and INNER % TILE_COLUMNS == 0:
            gates, ups = tl.load(gate_at + begin), tl.load(gate_at + INNER * HIDDEN + begin)
        else:
            both = left[:, None] & inside[None, :]
            gates = tl.load(gate_at + begin, mask=both, other=0.0)
            ups = tl.load(gate_at + INNER * HIDDEN + begin, mask=both, other=0.0)
        gate = _add_product(values, gates, gate, WEIGHTS_FIRST)
        up = _add_product(values, ups, up, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        gate, up = tl.trans(gate), tl.trans(up)
    # Rounded to the storage dtype like separate operators.
    dtype = activated.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    target = activated + place.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, result.to(dtype), mask=held[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_kernel(
    activated, down, given, order, ends, owners, starts, num_tiles,
    EXPERTS: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(owners + tile).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):  # an unused tile, or picks of another rank's experts
        return
    end = tl.load(ends + expert)
    place = tl.load(starts + tile) + tl.arange(0, TILE_ROWS)
    held = place < end
    column = tl.program_id(0) // num_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = column < HIDDEN
    depth = tl.arange(0, DEPTH)
    at = tl.minimum(place, end - 1).to(tl.int64)  # unused places compute the last row
    source = activated + at[:, None] * INNER + depth[None, :]
    weight = down + expert * (HIDDEN * INNER) + column[None, :] * INNER + depth[:, None]
    total = _zeros(TILE_ROWS, TILE_COLUMNS, WEIGHTS_FIRST)
    for begin in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0 and HIDDEN % TILE_COLUMNS == 0:
            values, weights = tl.load(source + begin), tl.load(weight + begin)
        else:
            left = depth < INNER - begin
            values = tl.load(source + begin, mask=left[None, :], other=0.0)
            both = left[:, None] & inside[None, :]
            weights = tl.load(weight + begin, mask=both, other=0.0)
        total = _add_product(values, weights, total, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    pick = tl.load(order + place, mask=held, other=0).to(tl.int64)
    target = given + pick[:, None] * HIDDEN + column[None, :]
    stored = held[:, None] & inside[None, :]
    tl.store(target, total.to(given.dtype.element_ty), mask=stored)
