"""The attention and page checks again, with the cache in the distinct layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from operators.attention import Case, build, reference
from operators.paths import Attention, Operators
from operators.pool import layer_of
from operators.references import store_distinct_ref
from operators.rows import assert_same, random
from operators.tolerance import assert_close


def check(case: Case, ops: Operators, dtype: torch.dtype) -> None:
    """Output of a case; NaN lies in every slot that is not cached."""
    call = build(case, ops.device, dtype)
    ops.attention(as_distinct(call))
    exact, plain = reference(case, call, torch.float64), reference(case, call, dtype)
    assert_close(call.out, exact, plain)


def check_equals_unified(case: Case, ops: Operators, dtype: torch.dtype) -> None:
    """Both layouts give the same bits."""
    call = build(case, ops.device, dtype)
    ops.attention(call)
    other = replace(as_distinct(call), out=torch.full_like(call.out, float("nan")))
    ops.attention(other)
    assert torch.equal(other.out, call.out)


def as_distinct(call: Attention) -> Attention:
    """The call with its cache moved to distinct pages of a pool of three layers."""
    pages, page_size, heads, _ = call.k_cache.shape
    device = call.k_cache.device
    k_cache, v_cache = layer_of(call.k_cache.shape, call.k_cache.dtype, device, kind="distinct")
    by_dim = call.k_cache.permute(0, 2, 3, 1)
    by_piece = by_dim.reshape(pages, heads, k_cache.shape[2], k_cache.shape[4], page_size)
    k_cache.copy_(by_piece.movedim(3, 4))
    v_cache.copy_(call.v_cache.permute(0, 2, 3, 1))
    return replace(call, k_cache=k_cache, v_cache=v_cache)


def check_store(ops: Operators, dtype: torch.dtype, tokens: int = 40) -> None:
    """Rows stored at scattered and at consecutive slots."""
    k, v = random(tokens, 2, 32).to(dtype), random(tokens, 2, 32).flip(0).to(dtype)
    scattered = torch.randperm(9 * 8, generator=torch.Generator().manual_seed(5))[:tokens]
    scattered[1::3] = -1
    for slots in (scattered, torch.arange(tokens) + 13, torch.arange(tokens) + 16):
        k_cache, v_cache = empty_pages(dtype, torch.device("cpu"))
        store_distinct_ref(k, v, k_cache, v_cache, slots)
        found = empty_pages(dtype, ops.device)
        ops.store_kv(k.to(ops.device), v.to(ops.device), *found, slots.to(ops.device))
        assert_same(found[0], k_cache)
        assert_same(found[1], v_cache)


def check_store_of_nothing(ops: Operators, dtype: torch.dtype) -> None:
    k = random(4, 2, 32).to(ops.device, dtype)
    k_cache, v_cache = empty_pages(dtype, ops.device)
    nothing = torch.full((4,), -1, device=ops.device)
    ops.store_kv(k, k, k_cache, v_cache, nothing)
    ops.store_kv(k[:0], k[:0], k_cache, v_cache, nothing[:0])
    assert k_cache.isnan().all() and v_cache.isnan().all()


def empty_pages(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Views of nine pages of eight tokens, two heads of 32, full of NaN."""
    return layer_of((9, 8, 2, 32), dtype, device, kind="distinct")
