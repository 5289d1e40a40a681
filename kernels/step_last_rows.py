"""The rows that leave a step's last layer: gathered before it, exchanged with boundaries after it.

A step needs hidden rows of its candidates and, for models that shift their logits, of each slot's
last stored position. That one is kept as the slot's boundary, from which the first position in
flight is predicted. Which rows those are is `plan_step`'s matter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(
    mixed: Tensor, residual: Tensor, wanted: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows `wanted` [R] and then `kept` [S] (-1: any row) of mixed [T, Q] and residual [T, H]."""
    if mixed.is_cuda:
        from effuse.kernels import step_last_rows_triton

        return step_last_rows_triton.launch_gather(mixed, residual, wanted, kept)
    rows = torch.cat([wanted, kept.clamp(min=0)])
    return mixed.index_select(0, rows), residual.index_select(0, rows)


def exchange_boundaries(
    hidden: Tensor, boundary_slots: Tensor, kept: Tensor, boundary: Tensor
) -> None:
    """Between hidden [R + S, H] of `gather_rows` and boundary [S, H], in place.

    Row i takes the boundary of slot `boundary_slots` [R] where that is not -1; slot s takes row
    R + s where `kept` [S] is not -1. No slot does both: one that stores has its first candidate
    behind what it stores.
    """
    if hidden.is_cuda:
        from effuse.kernels import step_last_rows_triton

        step_last_rows_triton.launch_exchange(hidden, boundary_slots, kept, boundary)
        return
    count = len(boundary_slots)
    vectors = boundary.index_select(0, boundary_slots.clamp(min=0))
    takes, keeps = (boundary_slots >= 0)[:, None], (kept >= 0)[:, None]
    boundary.copy_(torch.where(keeps, hidden[count:], boundary))
    hidden[:count] = torch.where(takes, vectors, hidden[:count])
