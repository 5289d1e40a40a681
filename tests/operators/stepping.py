"""The device's state machine as Triton kernels, in the interpreter: the random search of the torch
one. A program of its own, for `TRITON_INTERPRET=1 python -m operators.stepping SEEDS`.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings

from decoding.lockstep import PAGE_SIZE, Lockstep, Machine
from decoding.scripts import MASK_ID
from torch import Tensor

from effuse.kernels import step_advance_triton, step_plan_triton
from effuse.kernels.step_slots import SlotTable, StepRows
from operators.interpreter import use_interpreter

BLOCK_SIZES = (2, 4, 5, 8)


def plan(
    table: SlotTable, control: Tensor, rows: StepRows, num_rows: int, shift: bool, shares: bool
) -> None:
    step_plan_triton.launch(table, control, rows, num_rows, PAGE_SIZE, MASK_ID, shift, shares)


def check(seed: int) -> None:
    size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    shift = seed % 8 < len(BLOCK_SIZES)
    machine = Machine(plan, step_advance_triton.launch)
    Lockstep(machine, seed, size, shift, num_slots=2, num_requests=2).run()


def main() -> None:
    use_interpreter()
    warnings.simplefilter("error")
    begin, end = map(int, sys.argv[1].split("-"))
    for seed in range(begin, end):
        try:
            check(seed)
            failure = ""
        except AssertionError:
            failure = traceback.format_exc()
        print(json.dumps({"name": f"seed {seed}", "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
