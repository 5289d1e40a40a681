"""The plan of a device's step in torch operators, on the CPU: the definition that its Triton kernel
matches. It lays out the rows of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effuse.kernels.step_slots import (
    NUM_COLUMNS,
    BlockColumn,
    Column,
    Control,
    SlotTable,
    Status,
    StepRows,
)
from effuse.kernels.values import RowSampling

ENTROPY_BOUNDED, SEQUENTIAL, STATIC = 3, 2, 1


class Views:
    """The parts of a slot table's rows."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.layout = table.layout
        self.rows = table.rows
        self.pages = table.pages
        self.storable = table.storable

    def column(self, column: Column) -> Tensor:
        """[S]"""
        return self.rows[:, column]

    def real(self, column: Column) -> Tensor:
        """[S] fp32 view of a column that holds bits."""
        return self.rows[:, column].view(torch.float32)

    def blocks(self, column: BlockColumn) -> Tensor:
        """[S, ring]"""
        begin = NUM_COLUMNS + column * self.layout.ring
        return self.rows[:, begin : begin + self.layout.ring]

    @property
    def tokens(self) -> Tensor:
        """[S, ring, block_size]"""
        return self._cells(self.layout.tokens_at)

    @property
    def masked(self) -> Tensor:
        """[S, ring, block_size], 1 for a mask"""
        return self._cells(self.layout.masked_at)

    @property
    def stops(self) -> Tensor:
        """[S, max_stops], -1 where unused"""
        return self.rows[:, self.layout.stops_at : self.layout.storable_at]

    def _cells(self, begin: int) -> Tensor:
        ring, size = self.layout.ring, self.layout.block_size
        return self.rows[:, begin : begin + ring * size].view(-1, ring, size)


def plan_step(
    table: SlotTable,
    control: Tensor,
    rows: StepRows,
    num_rows: int,
    page_size: int,
    mask_token_id: int,
    shift: bool,
    shares: bool,
) -> None:
    """As `step_plan_triton.launch`."""
    views = Views(table)
    first = _first_place(table, control)
    slots = _take_part(views, control, num_rows)
    _fill_sequences(views, rows, slots)
    if shares:
        _share_beginnings(views, rows, slots, first, page_size)
    _fill_rows(views, rows, slots, num_rows, page_size, mask_token_id, shift)


def _first_place(table: SlotTable, control: Tensor) -> int:
    """Of the first slot, in packed order."""
    order: list[int] = table.sharing[: table.layout.num_slots].tolist()
    return order.index(int(control[Control.FIRST_SLOT]))


def _take_part(table: Views, control: Tensor, num_rows: int) -> Tensor:
    """Slots that take part [N] int64, in row order; stores the next step's first slot."""
    layout = table.layout
    first = _first_place(table.table, control)
    places = (first + torch.arange(layout.num_slots)) % layout.num_slots
    order = table.table.sharing[places].long()
    settled = table.column(Column.NUM_SETTLED) * layout.block_size
    can_store = table.column(Column.START) + settled <= table.storable
    runs = ((table.column(Column.STATUS) == Status.RUNNING) & can_store)[order]
    num_tokens = (table.column(Column.NUM_BLOCKS)[order] * layout.block_size).where(runs, 0)
    num_masks = table.column(Column.NUM_MASKS)[order].where(runs, 0)
    fits = (num_tokens.cumsum(0) <= num_rows) & (num_masks.cumsum(0) <= control[Control.MASK_LIMIT])
    left_out = order[runs & ~fits]
    control[Control.NEXT_FIRST_SLOT] = left_out[0] if len(left_out) else order[0]
    return order[runs & fits]


def _fill_sequences(table: Views, rows: StepRows, slots: Tensor) -> None:
    layout, count = table.layout, len(slots)
    num_tokens = table.column(Column.NUM_BLOCKS)[slots] * layout.block_size
    rows.cu_seqlens.fill_(int(num_tokens.sum()))
    rows.cu_seqlens[0] = 0
    rows.cu_seqlens[1 : count + 1] = num_tokens.cumsum(0)
    for buffer in (rows.context_lens, rows.block_origins, rows.page_table):
        buffer.zero_()
    rows.context_lens[:count] = table.column(Column.START)[slots]
    rows.block_origins[:count] = table.column(Column.ORIGIN)[slots]
    rows.page_table[:count] = table.pages[slots]
    num_masks = table.column(Column.NUM_MASKS)[slots]
    rows.first_candidate.fill_(-1)
    rows.first_candidate[slots] = (num_masks.cumsum(0) - num_masks).int()
    num_stored = table.column(Column.NUM_SETTLED)[slots] * layout.block_size
    last_stored = rows.cu_seqlens[:count] + num_stored - 1
    rows.kept_rows.fill_(-1)
    rows.kept_rows[slots] = last_stored.where(num_stored > 0, -1).long()


def _share_beginnings(
    table: Views, rows: StepRows, slots: Tensor, first: int, page_size: int
) -> None:
    """Moves the pages of beginnings from sequences to runs, one slot after the other."""
    num_slots = table.layout.num_slots
    order, run_of = table.table.sharing[: 2 * num_slots].view(2, -1).tolist()
    leaders, pages = table.table.sharing[2 * num_slots :].view(2, -1).tolist()
    rows.shared_context_lens.copy_(torch.tensor(pages * 2) * page_size)
    for run, (leader, count) in enumerate(zip(leaders * 2, pages * 2, strict=True)):
        rows.shared_page_table[run, :count] = table.pages[leader, :count]
    num_rows = [0] * len(pages * 2)
    lengths = rows.cu_seqlens.diff()
    for sequence, slot in enumerate(slots.tolist()):
        place = order.index(slot)
        run, count = run_of[place], pages[run_of[place]]
        num_rows[run + len(pages) * (place < first)] += int(lengths[sequence])
        rows.context_lens[sequence] -= count * page_size
        rows.block_origins[sequence] -= count * page_size
        rows.page_table[sequence] = rows.page_table[sequence].roll(-count)
    rows.shared_cu_seqlens[1:] = torch.tensor(num_rows).cumsum(0)


def _fill_rows(
    table: Views,
    rows: StepRows,
    slots: Tensor,
    num_rows: int,
    page_size: int,
    mask_token_id: int,
    shift: bool,
) -> None:
    layout, size = table.layout, table.layout.block_size
    counts = table.column(Column.NUM_BLOCKS)[slots] * size
    slot = slots.repeat_interleave(counts)
    used = len(slot)
    offset = torch.arange(used) - rows.cu_seqlens[: len(slots)].long().repeat_interleave(counts)
    start = table.column(Column.START)[slot].long()
    first_block = (start - table.column(Column.ORIGIN)[slot]) // size
    ring, cell = (first_block + offset // size) % layout.ring, offset % size
    masked = table.masked[slot, ring, cell] == 1
    position = start + offset
    is_stored = offset < table.column(Column.NUM_SETTLED)[slot] * size
    page = table.pages[slot, (position // page_size).where(is_stored, 0)].long()
    place = page * page_size + position % page_size
    _fill(rows.token_ids, table.tokens[slot, ring, cell].long().where(~masked, mask_token_id))
    _fill(rows.positions, position)
    _fill(rows.slot_mapping, place.where(is_stored, -1), beyond=-1)
    wanted = masked.nonzero().squeeze(1)
    asking = slot[wanted]
    is_first = (offset[wanted] == 0) & shift
    _fill(rows.hidden_rows, (wanted - int(shift)).where(~is_first, wanted))
    _fill(rows.boundary_slots, asking.where(is_first, -1).int(), beyond=-1)
    counts_of_blocks = table.blocks(BlockColumn.COUNT)[asking, ring[wanted]]
    _fill_sampling(table, rows.sampling, asking, position[wanted], counts_of_blocks)


def _fill_sampling(
    table: Views, sampling: RowSampling, asking: Tensor, position: Tensor, counts: Tensor
) -> None:
    low, high = table.column(Column.SEED_LOW)[asking], table.column(Column.SEED_HIGH)[asking]
    _fill(sampling.temperature, table.real(Column.TEMPERATURE)[asking])
    _fill(sampling.top_p, table.real(Column.TOP_P)[asking], beyond=1)
    _fill(sampling.top_k, table.column(Column.TOP_K)[asking])
    _fill(sampling.seed, (high.long() << 32) | (low.long() & 0xFFFFFFFF))
    _fill(sampling.answer_index, table.column(Column.ANSWER_INDEX)[asking])
    _fill(sampling.position, position.int())
    _fill(sampling.denoise_count, counts)
    _fill(sampling.score, table.column(Column.SCORE)[asking].to(torch.int8))


def _fill(buffer: Tensor, values: Tensor, beyond: int = 0) -> None:
    buffer.fill_(beyond)
    buffer[: len(values)] = values


def gather_rows(
    mixed: Tensor, residual: Tensor, wanted: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """As `step_plan_triton.launch_gather`."""
    rows = torch.cat([wanted, kept.clamp(min=0)])
    return mixed.index_select(0, rows), residual.index_select(0, rows)


def exchange_boundaries(
    hidden: Tensor, boundary_slots: Tensor, kept: Tensor, boundary: Tensor
) -> None:
    """As `step_plan_triton.launch_exchange`."""
    count = len(boundary_slots)
    vectors = boundary.index_select(0, boundary_slots.clamp(min=0))
    takes, keeps = (boundary_slots >= 0)[:, None], (kept >= 0)[:, None]
    boundary.copy_(torch.where(keeps, hidden[count:], boundary))
    hidden[:count] = torch.where(takes, vectors, hidden[:count])
