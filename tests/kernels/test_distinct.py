"""The distinct layout on the torch path: the reference, and the same bits as the unified layout."""

from __future__ import annotations

import pytest
import torch
from operators import attention, distinct
from operators.paths import public

from effuse.kernels.attention import block_attention
from effuse.kernels.pages import distinct_views, piece_elements, zero_distinct_tail

OPS = public(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", attention.CASES)
def test_equals_explicit_mask(name: str, dtype: torch.dtype) -> None:
    distinct.check(attention.CASES[name], OPS, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", attention.CASES)
def test_both_layouts_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    distinct.check_equals_unified(attention.CASES[name], OPS, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_store_then_load(dtype: torch.dtype) -> None:
    distinct.check_store(OPS, dtype)
    distinct.check_store_of_nothing(OPS, dtype)


def test_a_piece_of_k_is_16_bytes() -> None:
    sizes = [piece_elements(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert sizes == [4, 8, 8]


def test_elements_lie_where_the_layout_says() -> None:
    """K of token 3, dimension 9 is in piece 2; V of it in the row of dimension 9."""
    memory = torch.zeros(2, 2, 3, 8, 16)
    k_cache, v_cache = distinct_views(memory[:, 0], memory[:, 1])
    assert (k_cache.shape, v_cache.shape) == ((2, 3, 4, 8, 4), (2, 3, 16, 8))
    k_cache[1, 2, 2, 3, 1] = 5.0
    v_cache[1, 2, 9, 3] = 7.0
    assert memory[1, 0, 2].view(-1)[2 * 32 + 3 * 4 + 1] == 5
    assert memory[1, 1, 2].view(-1)[9 * 8 + 3] == 7
    assert int(memory.count_nonzero()) == 2


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_zero_tail_leaves_the_head(kept: int) -> None:
    memory = torch.ones(2, 2, 3, 8, 16)
    views = distinct_views(memory[:, 0], memory[:, 1])
    zero_distinct_tail(*views, kept)
    assert views[0][..., :kept, :].all() and not views[0][..., kept:, :].any()
    assert views[1][..., :kept].all() and not views[1][..., kept:].any()


def test_caches_of_another_shape_are_refused() -> None:
    call = distinct.as_distinct(
        attention.build(attention.CASES["ragged"], torch.device("cpu"), torch.float32)
    )
    with pytest.raises(
        ValueError, match=r"expected \[pages, 2, 8, 16, 4\] and \[pages, 2, 32, 16\]"
    ):
        block_attention(
            call.q, call.k, call.v, call.k_cache[:, :1], call.v_cache, call.batch, scale=1.0
        )
