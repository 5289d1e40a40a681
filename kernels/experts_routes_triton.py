# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels that choose experts, and sort what was chosen; `experts` is the way in.

A pick is one of a row's K experts, numbered row * K + place. Picks are sorted by expert into tiles
of as many places each as a program of the products takes rows. A tile has one expert, and the last
one of an expert is filled up with -1. Every expert's program reads all picks, which are few: the
order is always the same, and nothing is left over from the layer before.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.experts_routing import Routing

# Picks that a program of sorting looks at together: few are not worth more threads, and many steps
# after one another take longer than everything else here.
FEW_PICKS, MANY_PICKS = 1024, 4096


def launch_route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """(experts [T, K] int32, weights [T, K] fp32) of logits [T, E] fp32."""
    rows, width = len(logits), routing.num_picks
    experts = torch.empty((rows, width), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits,
            logits if bias is None else bias,
            experts,
            weights,
            logits.stride(0),
            routing.scale,
            EXPERTS=routing.num_experts,
            TILE=triton.next_power_of_2(routing.num_experts),
            TOP_K=routing.top_k,
            SHARED=routing.num_shared,
            WIDTH=triton.next_power_of_2(width),
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            SIGMOID=routing.scores == "sigmoid",
            HAS_BIAS=bias is not None,
            RENORMALISES=routing.renormalises,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return experts, weights


@dataclass(frozen=True, slots=True)
class SortedPicks:
    """Picks by expert, in their own order within one. All int32."""

    places: Tensor  # [tiles, tile_rows]: picks, or -1
    owners: Tensor  # [tiles]: each tile's expert, or -1
    counts: Tensor  # [E]: picks of each expert


def launch_sort(experts: Tensor, num_experts: int, tile_rows: int) -> SortedPicks:
    """Sorts the picks of ``experts`` [T, K] into tiles; without gaps where a tile is one row."""
    num_picks, device = experts.numel(), experts.device
    num_tiles = most_tiles(num_picks, num_experts, tile_rows)
    places = torch.empty((num_tiles, tile_rows), dtype=torch.int32, device=device)
    owners = torch.empty(num_tiles, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    step, num_warps = (FEW_PICKS, 4) if num_picks <= FEW_PICKS else (MANY_PICKS, 8)
    _count_kernel[(num_experts,)](
        experts, counts, num_picks, STEP=step, num_warps=num_warps, enable_fp_fusion=True
    )
    _sort_kernel[(num_experts,)](
        experts,
        counts,
        places,
        owners,
        num_picks,
        num_tiles,
        EXPERTS=num_experts,
        TILE=triton.next_power_of_2(num_experts),
        TILE_ROWS=tile_rows,
        STEP=step,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
    return SortedPicks(places, owners, counts)


def most_tiles(num_picks: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that any choice of experts fits in: but for one of each expert they are full."""
    return min(num_picks, num_picks // tile_rows + num_experts)


@triton.jit
def _route_kernel(
    logits,
    bias,
    experts,
    weights,
    row_stride,
    scale,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE)
    mask = expert < EXPERTS
    logit = tl.load(logits + row * row_stride + expert, mask=mask, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=mask, other=0.0)
    # A row that is not a number chooses like one whose experts are equal.
    choice = tl.where(choice == choice, choice, 0.0)
    choice = tl.where(mask, choice, float("-inf"))
    if GROUPS > 1:
        choice = _within_best_groups(choice, GROUPS, TOP_GROUPS, TILE)
    place = tl.arange(0, WIDTH)
    picked = EXPERTS + place - TOP_K  # right for the shared ones
    weight = tl.zeros([WIDTH], tl.float32)
    for turn in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        own = tl.sum(tl.where(expert == best, score, 0.0), 0)
        picked = tl.where(place == turn, best, picked)
        weight = tl.where(place == turn, own, weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALISES:
        weight = weight / tl.sum(weight, 0)
    weight = tl.where(place < TOP_K, weight * scale, 1.0)
    at = row * (TOP_K + SHARED) + place
    tl.store(experts + at, picked, mask=place < TOP_K + SHARED)
    tl.store(weights + at, weight, mask=place < TOP_K + SHARED)


@triton.jit
def _within_best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TILE: tl.constexpr):
    """`choice` [TILE] with -inf outside of the best groups, by the sum of their two best."""
    grouped = tl.reshape(choice, [GROUPS, TILE // GROUPS])
    member = tl.arange(0, TILE // GROUPS)[None, :]
    first = tl.argmax(grouped, 1)[:, None]
    second = tl.max(tl.where(member == first, float("-inf"), grouped), 1)
    worth = tl.max(grouped, 1) + second
    group = tl.arange(0, GROUPS)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(worth, 0)
        kept = tl.where(group == best, 1, kept)
        worth = tl.where(group == best, float("-inf"), worth)
    return tl.reshape(tl.where(kept[:, None] == 1, grouped, float("-inf")), [TILE])


@triton.jit(do_not_specialize=["num_picks"])
def _count_kernel(experts, counts, num_picks, STEP: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros([STEP], tl.int32)
    for begin in range(0, num_picks, STEP):
        pick = begin + tl.arange(0, STEP)
        owner = tl.load(experts + pick, mask=pick < num_picks, other=-1)
        count += (owner == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_picks", "num_tiles"])
def _sort_kernel(
    experts,
    counts,
    places,
    owners,
    num_picks,
    num_tiles,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    expert = tl.program_id(0)
    other = tl.arange(0, TILE)
    tiles = tl.load(counts + other, mask=other < EXPERTS, other=0)
    tiles = (tiles + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(other < expert, tiles, 0), 0)
    after = first + tl.sum(tl.where(other == expert, tiles, 0), 0)
    end = tl.where(expert == EXPERTS - 1, num_tiles, after)  # the last one marks what is left
    for begin in range(first, end, STEP):
        tile = begin + tl.arange(0, STEP)
        tl.store(owners + tile, tl.where(tile < after, expert, -1), mask=tile < end)
    rank = first * TILE_ROWS
    for begin in range(0, num_picks, STEP):
        pick = begin + tl.arange(0, STEP)
        mine = tl.load(experts + pick, mask=pick < num_picks, other=-1) == expert
        own = mine.to(tl.int32)
        tl.store(places + rank + tl.cumsum(own, 0) - own, pick, mask=mine)
        rank += tl.sum(own, 0)
    rest = rank + tl.arange(0, TILE_ROWS)
    tl.store(places + rest, tl.full([TILE_ROWS], -1, tl.int32), mask=rest < after * TILE_ROWS)
