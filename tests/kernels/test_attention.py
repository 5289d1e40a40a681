"""Block attention on the torch path: against the explicit mask, and inputs that must not
change it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operators import attention
from operators.attention import CASES, Case, Row
from operators.paths import public
from operators.references import visibility_mask

from effuse.kernels import attention_triton
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_hopper import ALONE_TALL, GROUPED, SHORT, shape_of

OPS = public(torch.device("cpu"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_explicit_mask(name: str, dtype: torch.dtype) -> None:
    attention.check(CASES[name], OPS, dtype)


@pytest.mark.parametrize(("name", "degree"), [*((name, 2) for name in CASES), ("ragged", 4)])
def test_merged_parts_of_a_context_equal_explicit_mask(name: str, degree: int) -> None:
    attention.check_cut_context(CASES[name], OPS, torch.float32, degree)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["ragged", "only_empty_sequences"])
def test_merged_parts_of_narrow_types(name: str, dtype: torch.dtype) -> None:
    attention.check_cut_context(CASES[name], OPS, dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beginnings_read_together_equal_explicit_mask(dtype: torch.dtype) -> None:
    attention.check_shared(OPS, dtype)


@pytest.mark.parametrize("name", ["ragged", "long_context", "heads_7_to_1", "token_major_pool"])
def test_result_does_not_depend_on_batch_mates_or_page_order(name: str) -> None:
    attention.check_alone_and_shuffled(CASES[name], OPS, torch.float32)


def test_later_blocks_do_not_change_earlier_rows() -> None:
    case = Case((Row(48, 20, origin=4),))
    call = attention.build(case, OPS.device, torch.float32)
    OPS.attention(call)
    first = Case((Row(16, 20, origin=4),))
    cut = replace(
        call,
        q=call.q[:16],
        k=call.k[:16],
        v=call.v[:16],
        batch=attention.batch_of(first, call.batch.page_table.tolist(), OPS.device),
        out=torch.empty_like(call.out[:16]),
    )
    OPS.attention(cut)
    assert torch.equal(cut.out, call.out[:16])


def test_head_dim_may_be_strided() -> None:
    """As values are in the distinct layout, [pages, Hkv, D, page_size]."""
    call = attention.build(CASES["ragged"], OPS.device, torch.float32)
    OPS.attention(call)
    transposed = call.v_cache.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert transposed.stride(-1) != 1
    again = replace(call, v_cache=transposed, out=torch.empty_like(call.out))
    OPS.attention(again)
    assert torch.equal(again.out, call.out)


def test_mask_in_words_equals_mask_entry_by_entry() -> None:
    for row in (Row(20, 0, 7), Row(20, 5, 3), Row(9, 30, 33), Row(4, 2, 0), Row(0, 3, 0)):
        mask = visibility_mask(row.rows, row.context, row.origin, 4)
        assert torch.equal(mask, attention.explicit_mask(row, 4))


def test_result_is_allocated_when_no_place_is_given() -> None:
    call = attention.build(CASES["ragged"], OPS.device, torch.float32)
    result = block_attention(
        call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch, scale=call.scale
    )
    OPS.attention(call)
    assert torch.equal(result, call.out)


def test_shapes_that_do_not_agree_are_named() -> None:
    call = attention.build(CASES["ragged"], OPS.device, torch.float32)
    caches = (call.k_cache, call.v_cache, call.batch)
    with pytest.raises(ValueError, match=r"q \(64, 3, 32\).*multiple of Hkv"):
        block_attention(call.q[:, :3], call.k, call.v, *caches, scale=1.0)
    with pytest.raises(ValueError, match=r"expected \[pages, 16, 2, 32\]"):
        block_attention(
            call.q, call.k, call.v, call.k_cache[:, :8], call.v_cache, call.batch, scale=1.0
        )


@pytest.mark.parametrize("head_dim", [8, 48])
def test_head_dims_that_no_kernel_takes_are_refused(head_dim: int) -> None:
    call = attention.build(Case((Row(3, 0),), head_dim=head_dim), OPS.device, torch.float32)
    arguments = (call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch)
    with pytest.raises(ValueError, match=f"power of two of at least 16, got {head_dim}"):
        attention_triton.launch(*arguments, scale=1.0, out=call.out)


def test_only_decode_steps_of_small_blocks_have_tiles_of_half_the_rows() -> None:
    """At most 64 rows of a sequence, counted with the heads of a group."""
    for groups in (4, 8):
        assert shape_of(groups, 64, 8) is SHORT
        assert shape_of(groups, 2048, 8) is GROUPED, "a prompt"
        assert shape_of(groups, 64, 64) is GROUPED, "larger blocks, or rows of a beginning"
    assert shape_of(4, 64, 8, batch_invariant=True) is ALONE_TALL
    assert shape_of(1, 64, 64) is SHORT and shape_of(1, 65, 64) is ALONE_TALL
