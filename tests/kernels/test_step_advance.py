"""The device's state machine against the pure one, over random requests, step by step."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from decoding.lockstep import PAGE_SIZE, Lockstep, Machine, Seen
from decoding.scripts import MASK_ID
from operators import child
from operators.torch_plan import plan_step
from operators.torch_steps import advance
from torch import Tensor

from effuse.kernels.step_slots import SlotTable, StepRows


def plan(
    table: SlotTable, control: Tensor, rows: StepRows, num_rows: int, shift: bool, shares: bool
) -> None:
    plan_step(table, control, rows, num_rows, PAGE_SIZE, MASK_ID, shift, shares)


TORCH = Machine(plan, advance)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("block_size", [2, 4, 5, 8])
def test_the_torch_machine_is_the_pure_one(block_size: int, shift: bool) -> None:
    for seed in range(3):
        Lockstep(TORCH, seed, block_size, shift).run()


def test_the_search_meets_what_it_is_for() -> None:
    total = [0] * len(astuple(Seen()))
    for seed in range(20, 25):
        seen = Lockstep(TORCH, seed, 4, seed % 2 == 0).run()
        total = [a + b for a, b in zip(total, astuple(seen), strict=True)]
    assert min(total) >= 1, Seen(*total)


def test_the_triton_machine_is_the_pure_one() -> None:
    lines = child.json_lines("operators.stepping", "0-4", TRITON_INTERPRET="1")
    assert len(lines) == 4
    for line in lines:
        assert not line["failure"], f"{line['name']}: {line['failure']}"


def test_a_whole_step_of_kernels_gives_the_engines_tokens() -> None:
    """Dream: with the shift and the boundary vector."""
    (line,) = child.json_lines("operators.device_steps", "dream", TRITON_INTERPRET="1")
    assert line["tokens"] == line["expected"]
    assert line["expected"]
