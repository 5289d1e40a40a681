# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels that choose experts and sort the picks; call them through `experts`.

A pick is one of a row's K experts, numbered row * K + place. Sorted by expert, picks are
contiguous, and each tile covers as many as a program of the products has rows. A tile has one
expert, and the last tile of an expert may be partial. Sorting takes two launches with a program for
every few picks: the first counts, the second sorts its own picks and computes their places from all
counts. The order is always the same, and no state remains from the previous layer.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.experts_routing import Routing

# Picks that a program sorts; small numbers are spread over several programs.
FEW_PICKS, MANY_PICKS = 128, 512
PARTS_TOGETHER = 8  # whose counts are added up together


def launch_route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """(experts [T, K] int32, weights [T, K] fp32) of logits [T, E] fp32."""
    rows, width = len(logits), routing.num_picks
    experts = torch.empty((rows, width), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, logits if bias is None else bias, experts, weights, logits.stride(0),
            routing.scale,
            EXPERTS=routing.num_experts, TILE=triton.next_power_of_2(routing.num_experts),
            TOP_K=routing.top_k, SHARED=routing.num_shared, WIDTH=triton.next_power_of_2(width),
            GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
            SIGMOID=routing.scores == "sigmoid", HAS_BIAS=bias is not None,
            RENORMALISES=routing.renormalises, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return experts, weights


def launch_own(
    experts: Tensor, weights: Tensor, held: range, num_routed: int, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """`experts.own_routes` of experts and weights [T, K]."""
    own, shares = torch.empty_like(experts), torch.empty_like(weights)
    count = experts.numel()
    if count:
        _own_kernel[(triton.cdiv(count, MANY_PICKS),)](
            experts, weights, own, shares, count,
            K=experts.shape[1], FIRST=held.start, END=held.stop, ROUTED=num_routed, RANK=rank,
            RANKS=num_ranks, PART=MANY_PICKS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return own, shares


@dataclass(frozen=True, slots=True)
class SortedPicks:
    """Picks by expert, in ascending order within each, and the tiles over them. All int32."""

    order: Tensor  # [picks]
    ranks: Tensor  # [picks]: each pick's place in the order
    ends: Tensor  # [E]: where each expert's picks end in the order
    owners: Tensor  # [tiles]: each tile's expert, or -1
    starts: Tensor  # [tiles]: where each tile with an expert begins in the order


def launch_sort(experts: Tensor, num_experts: int, tile_rows: int) -> SortedPicks:
    """Sorts the picks of ``experts`` [T, K], and lays tiles of `rows` rows over them. Negative
    picks count as those of the last expert."""
    num_picks, device = experts.numel(), experts.device
    num_tiles = most_tiles(num_picks, num_experts, tile_rows)
    sizes = (num_picks, num_picks, num_experts, num_tiles, num_tiles)
    found = SortedPicks(*(torch.empty(n, dtype=torch.int32, device=device) for n in sizes))
    part = FEW_PICKS if num_picks <= 8 * FEW_PICKS else MANY_PICKS
    num_parts = triton.cdiv(num_picks, part)
    tile = triton.next_power_of_2(num_experts + 1)  # invalid picks count as the last expert
    counts = torch.empty((num_parts, num_experts), dtype=torch.int32, device=device)
    _count_kernel[(num_parts,)](
        experts, counts, num_picks,
        EXPERTS=num_experts, TILE=tile, PART=part, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _sort_kernel[(num_parts,)](
        experts, counts, found.order, found.ranks, found.ends, found.owners, found.starts,
        num_picks, num_tiles,
        EXPERTS=num_experts, TILE=tile, TILE_ROWS=tile_rows, PART=part, PARTS=PARTS_TOGETHER,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return found


def most_tiles(num_picks: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles for any choice of experts: all are full except for one of each expert."""
    return min(num_picks, num_picks // tile_rows + num_experts)


@triton.jit
def _route_kernel(
    logits, bias, experts, weights, row_stride, scale,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALISES: tl.constexpr,
):  # fmt: skip
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
    # A row with NaN chooses as if its experts were equal.
    choice = tl.where(choice == choice, choice, 0.0)
    choice = tl.where(mask, choice, float("-inf"))
    if GROUPS > 1:
        choice = _within_best_groups(choice, GROUPS, TOP_GROUPS, TILE)
    place = tl.arange(0, WIDTH)
    picked = EXPERTS + place - TOP_K  # correct for shared experts
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


@triton.jit(do_not_specialize=["count"])
def _own_kernel(
    experts, weights, own, shares, count,
    K: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, ROUTED: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    exists = at < count
    expert = tl.load(experts + at, mask=exists, other=0)
    is_shared = expert >= ROUTED
    first = tl.load(experts + at // K * K, mask=exists, other=0)
    is_own = tl.where(is_shared, first % RANKS == RANK, (expert >= FIRST) & (expert < END))
    local = tl.where(is_shared, expert - ROUTED + END - FIRST, expert - FIRST)
    share = tl.load(weights + at, mask=exists & is_own, other=0.0)
    tl.store(own + at, tl.where(is_own, local, -1), mask=exists)
    tl.store(shares + at, share, mask=exists)


@triton.jit
def _within_best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TILE: tl.constexpr):
    """`choice` [TILE] with -inf outside of the best groups, ranked by the sum of their two best."""
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
def _count_kernel(
    experts, counts, num_picks, EXPERTS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr
):
    part = tl.program_id(0)
    pick = part * PART + tl.arange(0, PART)
    owner = tl.load(experts + pick, mask=pick < num_picks, other=TILE - 1)
    owner = tl.where(owner < 0, EXPERTS - 1, owner)
    expert = tl.arange(0, TILE)
    tl.store(counts + part * EXPERTS + expert, tl.histogram(owner, TILE), mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["num_picks", "num_tiles"])
def _sort_kernel(
    experts, counts, order, ranks, ends, owners, starts, num_picks, num_tiles,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, TILE_ROWS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, TILE)
    exists = expert < EXPERTS
    picks = tl.zeros([TILE], tl.int32)  # of each expert
    earlier = tl.zeros([TILE], tl.int32)  # those in earlier parts
    for begin in range(0, num_parts, PARTS):
        row = begin + tl.arange(0, PARTS)[:, None]
        mask = (row < num_parts) & exists[None, :]
        count = tl.load(counts + row * EXPERTS + expert[None, :], mask=mask, other=0)
        picks += tl.sum(count, 0)
        earlier += tl.sum(tl.where(row < part, count, 0), 0)
    own = tl.load(counts + part * EXPERTS + expert, mask=exists, other=0)
    end = tl.cumsum(picks, 0)
    first = end - picks
    if part == 0:
        tl.store(ends + expert, end, mask=exists)
    # A pick's place in its sorted part, minus the smaller ones there, is its place among its own.
    place = tl.arange(0, PART)
    base = first + earlier - (tl.cumsum(own, 0) - own)
    owner = tl.load(
        experts + part * PART + place, mask=part * PART + place < num_picks, other=TILE - 1
    )
    owner = tl.where(owner < 0, EXPERTS - 1, owner)
    key = tl.sort(owner * PART + place)
    pick = part * PART + key % PART
    rank = tl.gather(base, key // PART, 0) + place
    tl.store(order + rank, pick, mask=pick < num_picks)
    tl.store(ranks + pick, rank, mask=pick < num_picks)
    # Each program lays some tiles of every expert, and marks some of the unused tiles.
    tiles = (picks + TILE_ROWS - 1) // TILE_ROWS
    last_tile = tl.cumsum(tiles, 0)
    for number in range(part, tl.max(tiles, 0), num_parts):
        tile = last_tile - tiles + number
        tl.store(owners + tile, expert, mask=number < tiles)
        tl.store(starts + tile, first + number * TILE_ROWS, mask=number < tiles)
    for begin in range(tl.sum(tiles, 0) + part * PART, num_tiles, num_parts * PART):
        tl.store(owners + begin + place, -1, mask=begin + place < num_tiles)
