"""The kernels of the distinct layout on a GPU, in every dtype."""

from __future__ import annotations

import pytest
import torch
from operators import attention, distinct
from operators.attention import Case, Row
from operators.paths import public, triton_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LONG = (Row(128, 2048), Row(96, 1000, origin=1000), Row(32, 4097), Row(70, 0, origin=70))
RELEASED = {
    f"{name}_page_{page}": Case(LONG, q_heads, kv_heads, 128, page_size=page, block_size=32)
    for name, q_heads, kv_heads in (("dream", 28, 4), ("llada", 32, 32))
    for page in (16, 32, 64)
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", attention.CASES)
def test_attention_equals_explicit_mask(name: str, dtype: torch.dtype) -> None:
    distinct.check(attention.CASES[name], public(CUDA), dtype)
    distinct.check(attention.CASES[name], triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RELEASED)
def test_attention_of_released_shapes(name: str, dtype: torch.dtype) -> None:
    distinct.check(RELEASED[name], public(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_then_load(dtype: torch.dtype) -> None:
    distinct.check_store(public(CUDA), dtype)
    distinct.check_store_of_nothing(public(CUDA), dtype)
