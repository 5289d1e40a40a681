"""The attention kernel for Hopper under the checks of the others: every case at its head dims."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operators import attention
from operators.attention import Row
from operators.paths import triton_kernels

from effuse.kernels import attention_hopper

CUDA = torch.device("cuda")
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
DTYPES = [torch.float16, torch.bfloat16]
CASES = {name: case for name, case in attention.CASES.items() if case.page_size % 16 == 0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_equals_explicit_mask(name: str, head_dim: int, dtype: torch.dtype) -> None:
    case = replace(CASES[name], head_dim=head_dim)
    call = attention.build(case, CUDA, dtype)
    tensors = (call.k, call.v, call.k_cache, call.v_cache, call.out)
    assert attention_hopper.is_supported(call.q, tensors, case.page_size)
    attention.check(case, triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_merged_parts_of_a_context_equal_explicit_mask(
    name: str, degree: int, dtype: torch.dtype
) -> None:
    case = replace(CASES[name], head_dim=128)
    attention.check_cut_context(case, triton_kernels(CUDA), dtype, degree)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize("most_rows", [64, 96, 160, 300])
def test_heads_that_share_no_keys_equal_explicit_mask(
    most_rows: int, splits: int | None, page_size: int
) -> None:
    """Every launch shape, over more tiles than there are stages, odd and even numbers of them."""
    contexts = (0, 1, 63, 64, 65, 320, 577, 1024)
    rows = tuple(Row(most_rows - 9 * i, context) for i, context in enumerate(contexts[:-1]))
    rows += (Row(1, contexts[-1]),)
    case = attention.Case(
        rows,
        q_heads=3,
        kv_heads=3,
        head_dim=128,
        page_size=page_size,
        block_size=32,
        splits=splits,
    )
    attention.check(case, triton_kernels(CUDA), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["ragged", "heads_7_to_1", "split_context", "one_head_each"])
def test_alone_and_from_other_pages_is_bitwise_equal(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], head_dim=128)
    attention.check_alone_and_shuffled(case, triton_kernels(CUDA), dtype)


def test_many_runs_of_many_tiles_agree() -> None:
    """A race between the warpgroups would show as results that differ."""
    rows = tuple(Row(32 + 16 * (i % 5), 640 + 37 * i) for i in range(40))
    case = attention.Case(rows, q_heads=28, kv_heads=4, head_dim=128, page_size=32, block_size=32)
    call = attention.build(case, CUDA, torch.bfloat16)
    ops = triton_kernels(CUDA)
    ops.attention(call)
    first = call.out.clone()
    for _ in range(200):
        call.out.fill_(float("nan"))
        ops.attention(call)
        assert torch.equal(call.out, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_parts_at_fixed_positions_equal_explicit_mask(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], head_dim=128, batch_invariant=True, splits=None)
    attention.check(case, triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bitwise_equal_wherever_the_cache_ends(dtype: torch.dtype) -> None:
    """By one program for all parts, and by one for each."""
    ops = triton_kernels(CUDA)
    attention.check_cut(ops, dtype, attention.LONG_CUTS, splits=(1, 3, 7, None))


@pytest.mark.parametrize("q_heads", [28, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_is_bitwise_equal_among_others(dtype: torch.dtype, q_heads: int) -> None:
    """Alone its parts have programs of their own, among many it has one."""
    contexts = (0, 33, 480, 512, 700, 1500, 2048, 5000, 1024, 64, 2048, 2048)
    rows = tuple(Row(16 + 7 * i, context) for i, context in enumerate(contexts))
    case = attention.Case(
        rows,
        q_heads=q_heads,
        kv_heads=4,
        head_dim=128,
        page_size=32,
        block_size=32,
        batch_invariant=True,
    )
    attention.check_alone_and_shuffled(case, triton_kernels(CUDA), dtype)
    attention.check(case, triton_kernels(CUDA), dtype)
