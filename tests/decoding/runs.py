"""Runs of slots that share the pages of a beginning: random ones for `lockstep.py`, and the check
of the rows that a plan lays out for them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from effuse.kernels.step_slots import MOST_SHARED, NUM_RUNS, SlotTable, StepRows


class Runs:
    """An order of slots, two runs whose sequences have a beginning in common, and the others."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.order = list(range(num_slots))
        self.run_of = [MOST_SHARED] * num_slots  # by slot
        self.leaders, self.num_pages = [0] * NUM_RUNS, [0] * NUM_RUNS  # by run
        self.shares = False

    def draw(self, draw: random.Random, starts: Sequence[int | None], table: SlotTable) -> bool:
        """Other ones, for slots with these first positions in flight; whether steps share them."""
        draw.shuffle(self.order)
        runs = sorted(draw.choices((0, 1, MOST_SHARED), k=len(starts)))
        for slot, run in zip(self.order, runs, strict=True):
            self.run_of[slot] = run
        for run in (0, 1):
            own = {
                slot: start
                for slot, start in enumerate(starts)
                if start is not None and self.run_of[slot] == run
            }
            self.leaders[run] = min(own, default=0)
            self.num_pages[run] = draw.randint(0, min(own.values(), default=0) // self.page_size)
        columns = [*self.order, *runs, *self.leaders, *self.num_pages]
        table.sharing.copy_(torch.tensor(columns))
        self.shares = draw.random() < 0.5
        return self.shares

    def pages_of(self, slot: int) -> int:
        """Pages that its sequence reads with others."""
        return self.num_pages[self.run_of[slot]] * self.shares

    def is_split(self, rows: StepRows) -> bool:
        """Whether the step begins within a run."""
        shown = rows.shared_cu_seqlens.diff().view(2, NUM_RUNS)
        return bool((shown > 0).all(0).any())

    def check(self, rows: StepRows, table: SlotTable, begin: int, taken: Sequence[int]) -> None:
        """Each run has the rows of its sequences, before and after the end of the order, and the
        pages of its beginning."""
        shown = rows.shared_cu_seqlens.diff().view(2, NUM_RUNS)
        lengths = dict(zip(taken, rows.cu_seqlens.diff().tolist(), strict=False))
        for turn, slots in enumerate((self.order[begin:], self.order[:begin])):
            for run, pages in enumerate(self.num_pages):
                own = [slot for slot in slots if self.run_of[slot] == run]
                assert shown[turn, run] == sum(lengths.get(slot, 0) for slot in own)
                place = run + turn * NUM_RUNS
                assert rows.shared_context_lens[place] == pages * self.page_size
                leader = table.pages[self.leaders[run], :pages]
                assert torch.equal(rows.shared_page_table[place, :pages], leader)
