"""Normalisation and the gated activation on the torch path."""

from __future__ import annotations

import pytest
import torch
from operators import rows
from operators.paths import public

OPS = public(torch.device("cpu"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.SHAPES, ids=str)
def test_norm_equals_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows.check_norm(OPS, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.SHAPES, ids=str)
def test_norm_with_residual_equals_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows.check_norm_residual(OPS, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_inside_a_projection(dtype: torch.dtype) -> None:
    rows.check_norm_of_heads(OPS, dtype)


def test_a_row_is_normalised_alike_in_every_batch() -> None:
    x, weight = rows.random(37, 192), rows.random(192)
    together = OPS.rms_norm(x, weight, rows.EPS)
    for row in range(0, 37, 5):
        assert torch.equal(OPS.rms_norm(x[row : row + 1], weight, rows.EPS)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.SHAPES, ids=str)
def test_swiglu_equals_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows.check_swiglu(OPS, dtype, shape)


def test_swiglu_does_not_write_to_its_input() -> None:
    gate_up = rows.random(4, 64)
    before = gate_up.clone()
    OPS.swiglu(gate_up)
    assert torch.equal(gate_up, before)
