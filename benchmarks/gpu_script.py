# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The acceptance script: random weights never pass a threshold, so the benchmark decides.

Each request gets exactly `pace` tokens a step, given one by one to its blocks with masks in order,
always to the first masks of a block. The model's own tokens, confidences and scores are computed
completely; only the confidences are then overwritten, with 1 for accepted tokens and 0 for others.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.sequence import HostCandidates
from effuse.kernels.step_advance_triton import START
from effuse.kernels.step_slots import Column, SlotTable
from effuse.kernels.values import Candidates, RowSampling

ORIGIN = tl.constexpr(int(Column.ORIGIN))
NUM_BLOCKS = tl.constexpr(int(Column.NUM_BLOCKS))


class Dealer:
    """The script on the device; a power of two of tokens each step."""

    def __init__(self, table: SlotTable, first_candidate: Tensor, pace: int) -> None:
        self._table = table
        self._first = first_candidate
        self._pace = pace

    def __call__(self, candidates: Candidates, sampling: RowSampling) -> Candidates:
        """The same candidates with scripted confidences."""
        layout = self._table.layout
        _deal_kernel[(layout.num_slots,)](
            self._table.rows,
            self._first,
            candidates.confidence,
            PACE=self._pace,
            RING=layout.ring,
            SIZE=layout.block_size,
            MASKED_AT=layout.masked_at,
            WIDTH=layout.width,
            num_warps=4,
        )
        return candidates


@triton.jit
def _deal_kernel(
    table,
    first_candidate,
    confidences,
    PACE: tl.constexpr,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED_AT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    slot = tl.program_id(0)
    first = tl.load(first_candidate + slot)
    if first < 0:
        return
    fields = table + slot * WIDTH
    block = tl.arange(0, RING)
    cell = tl.arange(0, SIZE)
    start = tl.load(fields + START) - tl.load(fields + ORIGIN)
    place = (start // SIZE + block) % RING
    exists = (block < tl.load(fields + NUM_BLOCKS))[:, None] & (cell < SIZE)[None, :]
    cells = fields + MASKED_AT + place[:, None] * SIZE + cell[None, :]
    masked = tl.load(cells, mask=exists, other=0)
    left = tl.sum(masked, 1)
    # One by one in rounds over the blocks that have a mask left for it.
    turn = tl.arange(0, PACE)
    takes = (left[None, :] > turn[:, None]).to(tl.int32)
    dealt = tl.reshape(tl.cumsum(tl.reshape(takes, [PACE * RING]), 0), [PACE, RING])
    share = tl.sum(tl.where(dealt <= PACE, takes, 0), 0)
    before = (tl.cumsum(left, 0) - left)[:, None]
    rank = tl.cumsum(masked, 1) - masked
    passes = (rank < share[:, None]).to(tl.float32)
    tl.store(confidences + first + before + rank, passes, mask=masked == 1)


def deal(plan: StepPlan, masks_left: list[int], pace: int) -> HostCandidates:
    """The script on the host, for one request: `masks_left` of each block in flight."""
    share = [0] * len(masks_left)
    given = 0
    for turn in range(pace):
        for index, left in enumerate(masks_left):
            if left > turn and given < pace:
                share[index] += 1
                given += 1
    passes = [
        float(rank < own)
        for own, left in zip(share, masks_left, strict=True)
        for rank in range(left)
    ]
    count = len(plan.candidates)
    return HostCandidates(
        np.zeros(count, np.int64), np.asarray(passes, np.float32), np.zeros(count, np.float32)
    )
