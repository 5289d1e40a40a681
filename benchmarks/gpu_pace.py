"""An acceptance script for whole requests: 2, 3 or 4 tokens a step, 3 on average.

Random weights never pass a threshold, so the script decides. A request's tokens in a step are drawn
from its seed and its progress, so that requests drift apart like real ones. They are given one by
one to its blocks with masks in order, always to the first masks of a block. The model's own
candidates are computed completely; only their confidences are overwritten, with 1 and 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effuse.kernels.step_slots import NUM_COLUMNS, BlockColumn, Column, SlotTable
from effuse.kernels.values import Candidates, RowSampling

LEAST, MOST = 2, 4
MEAN = (LEAST + MOST) / 2


class Pacer:
    """The script in torch operators, for the CPU and for captured graphs."""

    def __init__(self, table: SlotTable, first_candidate: Tensor) -> None:
        """first_candidate: [S] int32, each slot's first entry in the candidates, -1 for none."""
        self._table = table
        self._first = first_candidate
        device = table.rows.device
        self._block = torch.arange(table.layout.ring, device=device)
        self._turn = torch.arange(MOST, device=device)[None, :, None]
        self._end = torch.zeros(1, device=device)

    def __call__(self, candidates: Candidates, sampling: RowSampling) -> Candidates:
        """The same candidates with scripted confidences."""
        place, masked = self._in_flight()
        left = masked.sum(2)
        share = self._shares(left, self._pace(place))
        rank = masked.cumsum(2) - masked
        before = left.cumsum(1) - left
        entry = (self._first[:, None] + before)[:, :, None] + rank
        is_asked = (masked == 1) & (self._first >= 0)[:, None, None]
        # Unused ones go to an entry after the last.
        entry = entry.where(is_asked, len(candidates.confidence))
        passes = (rank < share[:, :, None]).float()
        longer = torch.cat([candidates.confidence, self._end])
        longer.scatter_(0, entry.flatten().long(), passes.flatten())
        candidates.confidence.copy_(longer[:-1])
        return candidates

    def _in_flight(self) -> tuple[Tensor, Tensor]:
        """Places in the ring of the blocks in flight [S, ring], and their masks [S, ring, B]."""
        layout, rows = self._table.layout, self._table.rows
        first = (rows[:, Column.START] - rows[:, Column.ORIGIN]) // layout.block_size
        place = ((first[:, None] + self._block) % layout.ring).long()
        exists = self._block < rows[:, Column.NUM_BLOCKS, None]
        cells = rows[:, layout.masked_at : layout.stops_at]
        cells = cells.view(-1, layout.ring, layout.block_size)
        masked = cells.gather(1, place[:, :, None].expand(-1, -1, layout.block_size))
        return place, masked * exists[:, :, None]

    def _pace(self, place: Tensor) -> Tensor:
        """Tokens that each slot gets in this step [S]."""
        layout, rows = self._table.layout, self._table.rows
        begin = NUM_COLUMNS + BlockColumn.COUNT * layout.ring
        counts = rows[:, begin : begin + layout.ring].gather(1, place)
        exists = self._block < rows[:, Column.NUM_BLOCKS, None]
        progress = (counts * exists).sum(1) + 131 * rows[:, Column.START].long()
        drawn = (progress * 7919 + rows[:, Column.SEED_LOW].long() * 104729) * 2654435761
        return LEAST + ((drawn & 0xFFFFFFFF) >> 12) % (MOST - LEAST + 1)

    def _shares(self, left: Tensor, pace: Tensor) -> Tensor:
        """Tokens that each block gets [S, ring]: in rounds over the blocks that have masks."""
        takes = left[:, None, :] > self._turn
        dealt = takes.flatten(1).cumsum(1).view(takes.shape)
        return (takes & (dealt <= pace[:, None, None])).sum(1)
