"""Compiles the step's own kernels for sm_90, as `operators.compiled` does those of the models."""

from __future__ import annotations

import torch

from effuse.kernels import step_advance_triton, step_plan_triton
from effuse.kernels.step_slots import SlotLayout, SlotTable, StepRows
from effuse.kernels.values import Candidates
from operators.device_code import Kernel, kernels_of

META = torch.device("meta")
ROWS = 2048


def compiled(block_size: int, window: int) -> list[Kernel]:
    layout = SlotLayout(64, block_size, max_window=window, max_stops=16, max_pages=128)
    table = SlotTable(layout, META)
    rows = StepRows(layout, ROWS, META)
    control = torch.zeros(4, dtype=torch.int32, device=META)
    records = torch.zeros(64, layout.record_width, dtype=torch.int32, device=META)
    real = torch.zeros(ROWS, device=META)
    candidates = Candidates(real.long(), real, real)
    plan = (table, control, rows, ROWS, 32, 151666, True)
    advance = (table, control, rows.first_candidate, candidates, records)
    hidden, slots = torch.zeros(ROWS, 3584, device=META), rows.boundary_slots
    gather = (hidden, hidden, rows.hidden_rows, rows.kept_rows)
    exchange = (hidden, slots[: ROWS - 64], rows.kept_rows, hidden[:64])
    return [
        *kernels_of([step_plan_triton], lambda: step_plan_triton.launch_gather(*gather)),
        *kernels_of([step_plan_triton], lambda: step_plan_triton.launch_exchange(*exchange)),
        *kernels_of([step_plan_triton], lambda: step_plan_triton.launch(*plan, False)),
        *kernels_of([step_plan_triton], lambda: step_plan_triton.launch(*plan, True)),
        *kernels_of([step_advance_triton], lambda: step_advance_triton.launch(*advance)),
    ]
