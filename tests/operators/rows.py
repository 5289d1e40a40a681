"""Checks of the operators that work row by row: norms, rotary embedding, SwiGLU, moving K and V."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effuse.kernels.rowwise import make_cos_sin_cache
from effuse.kernels.values import WeightedParts
from operators.paths import Operators
from operators.pool import layer_of
from operators.references import rms_norm_ref, rotary_ref, store_kv_ref, swiglu_ref
from operators.tolerance import assert_close

EPS = 1e-6
THETA = 10_000.0
# (tokens, width): powers of two and not, one row, one column, none.
SHAPES = [(1, 64), (7, 192), (33, 100), (5, 3584), (3, 1), (0, 64)]
# (tokens, query heads, KV heads, head dim, rotated dims)
HEADS = [
    *((1, 4, 2, 32, 32), (9, 7, 1, 64, 64), (5, 28, 4, 128, 128), (3, 3, 3, 16, 16)),
    *((5, 4, 2, 32, 16), (0, 4, 2, 32, 32)),
]


Gather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Exchange = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * scale


def check_norm(ops: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    # Large enough that squares in fp16 would overflow.
    x, weight = random(*shape, scale=300).to(dtype), random(shape[1]).to(dtype)
    result = ops.rms_norm(x.to(ops.device), weight.to(ops.device), EPS)
    assert_close(
        result, rms_norm_ref(x.double(), weight.double(), EPS), rms_norm_ref(x, weight, EPS)
    )


def check_norm_of_heads(ops: Operators, dtype: torch.dtype) -> None:
    """Heads of one part of a fused projection: rows at two strides."""
    fused, weight = random(6, 5, 32).to(dtype), random(32).to(dtype)
    heads = fused[:, 1:4]
    result = ops.rms_norm(fused.to(ops.device)[:, 1:4], weight.to(ops.device), EPS)
    assert_close(
        result,
        rms_norm_ref(heads.double(), weight.double(), EPS),
        rms_norm_ref(heads, weight, EPS),
    )


def check_norm_residual(ops: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = random(*shape).to(dtype), random(*shape, scale=4).flip(0).to(dtype)
    weight = random(shape[1]).to(dtype)
    normed, total = ops.rms_norm_residual(
        x.to(ops.device), residual.to(ops.device), weight.to(ops.device), EPS
    )
    added = x + residual
    assert torch.equal(total.cpu(), added)
    assert_close(
        normed,
        rms_norm_ref(added.double(), weight.double(), EPS),
        rms_norm_ref(added, weight, EPS),
    )
    _check_norm_of_parts(ops, random(2, *shape), residual, weight)
    for places in (None, _shuffled(3 * shape[0])):
        parts = WeightedParts(random(3 * shape[0], shape[1]).to(dtype), places, _shares(shape[0]))
        _check_norm_of_weighted(ops, parts, residual, weight)


def _check_norm_of_parts(ops: Operators, parts: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Parts of a sum in fp32, like the results of a split product."""
    normed, total = ops.rms_norm_residual(
        parts.to(ops.device), residual.to(ops.device), weight.to(ops.device), EPS
    )
    exact, plain = parts.sum(0).double() + residual, (parts.sum(0) + residual).to(residual.dtype)
    assert_close(total, exact, plain)
    rounded = total.cpu()
    assert_close(
        normed,
        rms_norm_ref(rounded.double(), weight.double(), EPS),
        rms_norm_ref(rounded, weight, EPS),
    )


def _check_norm_of_weighted(
    ops: Operators, given: WeightedParts, residual: Tensor, weight: Tensor
) -> None:
    """Parts as experts leave them, in the rows' order or elsewhere."""
    places = None if given.places is None else given.places.to(ops.device)
    moved = WeightedParts(given.parts.to(ops.device), places, given.weights.to(ops.device))
    normed, total = ops.rms_norm_residual(
        moved, residual.to(ops.device), weight.to(ops.device), EPS
    )
    rows, count = given.weights.shape
    order = torch.arange(rows * count) if given.places is None else given.places.long()
    picked = given.parts[order].view(rows, count, residual.shape[1]).double()
    exact = (picked * given.weights[:, :, None].double()).sum(1) + residual
    assert_close(total, exact, given.total() + residual)
    rounded = total.cpu()
    assert_close(
        normed,
        rms_norm_ref(rounded.double(), weight.double(), EPS),
        rms_norm_ref(rounded, weight, EPS),
    )


def check_lookup(
    look: Callable[[Tensor, Tensor, int], Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Ids before, within and behind the rows that are held, and all of them."""
    rows = random(12, 40).to(dtype)
    ids = torch.tensor([0, 19, 20, 31, 32, 25, 50])
    for held, first in ((rows, 20), (rows.repeat(5, 1), 0)):
        own = ids - first
        inside = (own >= 0) & (own < len(held))
        expected = torch.where(inside[:, None], held[own.clamp(0, len(held) - 1)], 0)
        assert torch.equal(look(ids.to(device), held.to(device), first).cpu(), expected)
    assert look(ids[:0].to(device), rows.to(device), 20).shape == (0, 40)


def check_total(
    total: Callable[[WeightedParts], Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Of rows of three parts; a part of weight 0 may be anything."""
    for places in (None, _shuffled(21)):
        given = WeightedParts(random(21, 40).to(dtype), places, _shares(7))
        given.weights[::2, 1] = 0
        exact = given.total()
        unused = torch.arange(1, 21, 6) if places is None else places[1::6].long()
        given.parts[unused] = torch.nan
        moved = None if places is None else places.to(device)
        found = total(WeightedParts(given.parts.to(device), moved, given.weights.to(device)))
        torch.testing.assert_close(found.cpu(), exact)


def _shuffled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()


def _shares(rows: int) -> Tensor:
    """[rows, 3] fp32, between 0 and 1."""
    return random(rows, 3).sigmoid()


def check_swiglu(ops: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = random(shape[0], 2 * shape[1], scale=3).to(dtype)
    result = ops.swiglu(gate_up.to(ops.device))
    assert_close(result, swiglu_ref(gate_up.double()), swiglu_ref(gate_up))


def check_rotary(
    ops: Operators, dtype: torch.dtype, shape: tuple[int, int, int, int, int], *, stores: bool
) -> None:
    """Rotation of slices of a fused projection; with ``stores``, also what lands in the pages."""
    tokens, q_heads, kv_heads, dim, rotated = shape
    fused = random(tokens, q_heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = torch.split(fused.to(ops.device), [q_heads, kv_heads, kv_heads], dim=1)
    positions = torch.arange(tokens) * 37 % 900
    table = make_cos_sin_cache(rotated, 900, THETA, ops.device)
    places = (table, positions.to(ops.device))
    if stores:
        k_cache, v_cache, slots = empty_pages(tokens, kv_heads, dim, dtype)
        expected = k_cache.clone(), v_cache.clone()
        k_cache, v_cache = k_cache.to(ops.device), v_cache.to(ops.device)
        new_q, new_k = ops.rotary_store_kv(q, k, v, *places, k_cache, v_cache, slots.to(ops.device))
        store_kv_ref(new_k.cpu(), v.cpu(), *expected, slots)
        assert_same(k_cache, expected[0])
        assert_same(v_cache, expected[1])
    else:
        new_q, new_k = ops.rotary(q, k, *places)
    for before, after in ((q, new_q), (k, new_k)):
        first = before.cpu()[..., :rotated]
        exact = rotary_ref(first.double(), positions, THETA)
        assert_close(after[..., :rotated], exact, rotary_plain(first, table.cpu()[positions]))
        assert torch.equal(after[..., rotated:], before[..., rotated:])


def check_store(ops: Operators, dtype: torch.dtype) -> None:
    k, v = random(11, 2, 32).to(dtype), random(11, 2, 32).flip(0).to(dtype)
    k_cache, v_cache, slots = empty_pages(11, 2, 32, dtype)
    expected = k_cache.clone(), v_cache.clone()
    store_kv_ref(k, v, *expected, slots)
    k_cache, v_cache = k_cache.to(ops.device), v_cache.to(ops.device)
    ops.store_kv(k.to(ops.device), v.to(ops.device), k_cache, v_cache, slots.to(ops.device))
    assert_same(k_cache, expected[0])
    assert_same(v_cache, expected[1])


def check_store_of_nothing(ops: Operators, dtype: torch.dtype) -> None:
    k = random(4, 2, 32).to(ops.device, dtype)
    k_cache, v_cache, _ = empty_pages(4, 2, 32, dtype)
    k_cache, v_cache = k_cache.to(ops.device), v_cache.to(ops.device)
    nothing = torch.full((4,), -1, device=ops.device)
    ops.store_kv(k, k, k_cache, v_cache, nothing)
    ops.store_kv(k[:0], k[:0], k_cache, v_cache, nothing[:0])
    assert k_cache.isnan().all() and v_cache.isnan().all()


def empty_pages(
    tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Two strided views of pages full of NaN, and a slot for two rows of three."""
    views = layer_of((tokens + 3, 8, heads, dim), dtype)
    slots = torch.randperm((tokens + 3) * 8, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[1::3] = -1
    return *views, slots


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def rotary_plain(x: Tensor, table: Tensor) -> Tensor:
    """The half rotation in the dtype of x, written out."""
    half = x.shape[-1] // 2
    cos, sin = (part.to(x.dtype)[:, None] for part in table.chunk(2, dim=-1))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check_last_rows(gather: Gather, exchange: Exchange, device: torch.device) -> None:
    """Against plain loops; slots 1 and 3 keep a row, candidates 0 and 4 are of slots 2 and 0."""
    mixed, residual, boundary = random(9, 40), random(9, 24), random(4, 24)
    wanted, kept = torch.tensor([3, 8, 0, 5, 5]), torch.tensor([-1, 2, -1, 7])
    slots = torch.tensor([2, -1, -1, -1, 0], dtype=torch.int32)
    found = gather(*(x.to(device) for x in (mixed, residual, wanted, kept)))
    rows = [*wanted.tolist(), *(max(row, 0) for row in kept.tolist())]
    for got, matrix in zip(found, (mixed, residual), strict=True):
        assert torch.equal(got.cpu(), torch.stack([matrix[row] for row in rows]))
    hidden, kept_on = found[1], boundary.to(device)
    exchange(hidden, slots.to(device), kept.to(device), kept_on)
    expected = [boundary[2], residual[8], residual[0], residual[5], boundary[0]]
    assert torch.equal(hidden[:5].cpu(), torch.stack(expected))
    expected = [boundary[0], residual[2], boundary[2], residual[7]]
    assert torch.equal(kept_on.cpu(), torch.stack(expected))
