"""The gated activation on the torch path."""

from __future__ import annotations

import pytest
import torch
from operators import rows
from operators.paths import public

OPS = public(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", rows.SHAPES, ids=str)
def test_equals_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows.check_swiglu(OPS, dtype, shape)


def test_input_is_not_written_to() -> None:
    gate_up = rows.random(4, 64)
    before = gate_up.clone()
    OPS.swiglu(gate_up)
    assert torch.equal(gate_up, before)
