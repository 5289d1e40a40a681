"""The last rows of a step on the torch path."""

from __future__ import annotations

import torch
from operators import rows
from operators.torch_plan import exchange_boundaries, gather_rows


def test_rows_are_gathered_and_boundaries_exchanged() -> None:
    rows.check_last_rows(gather_rows, exchange_boundaries, torch.device("cpu"))
