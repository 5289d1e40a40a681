"""Moving K and V between rows and pages."""

from __future__ import annotations

import pytest
import torch
from operators import rows
from operators.paths import public

OPS = public(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_store_then_load(dtype: torch.dtype) -> None:
    rows.check_store(OPS, dtype)


def test_slot_minus_one_stores_nothing() -> None:
    rows.check_store_of_nothing(OPS, torch.float32)
