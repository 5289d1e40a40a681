"""One tolerance policy for all operators, dtypes and devices.

The largest error against fp64 may be twice that of plain torch in the same dtype, plus the rounding
of the largest value: the possible effect of another order of summation, and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(result: Tensor, exact: Tensor, plain: Tensor) -> None:
    """``exact`` is the fp64 reference, ``plain`` the reference in the dtype of ``result``."""
    assert result.shape == exact.shape, (result.shape, exact.shape)
    assert result.dtype == plain.dtype, (result.dtype, plain.dtype)
    floor = torch.finfo(result.dtype).eps
    result, exact, plain = (x.detach().cpu().double() for x in (result, exact, plain))
    assert torch.isfinite(result).all(), f"{int((~torch.isfinite(result)).sum())} not finite"
    if result.numel() == 0:
        return
    error = float((result - exact).abs().max())
    allowed = 2 * float((plain - exact).abs().max()) + floor * float(exact.abs().max())
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
