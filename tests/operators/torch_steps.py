"""The end of a device's step in torch operators, on the CPU: the definition that its Triton kernel
matches. `advance` applies candidates like the decode worker's pure machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.step_slots import (
    NUM_RECORD_COLUMNS,
    BlockColumn,
    Column,
    Control,
    RecordColumn,
    SlotTable,
    Status,
)
from effuse.kernels.values import Candidates
from operators.torch_plan import Views

ENTROPY_BOUNDED, SEQUENTIAL, STATIC = 3, 2, 1


def advance(
    slots: SlotTable,
    control: Tensor,
    first_candidate: Tensor,
    candidates: Candidates,
    records: Tensor,
) -> None:
    """As `step_advance_triton.launch`."""
    table = Views(slots)
    control[Control.FIRST_SLOT] = control[Control.NEXT_FIRST_SLOT]
    flight = _Flight.of(table)
    proposed = _proposals(flight, first_candidate, candidates)
    stepped = first_candidate >= 0
    goes = stepped & ~(flight.masked & ~proposed.finite).any((1, 2))
    chosen = _choose(table, flight, proposed) & goes[:, None, None]
    written = chosen.sum((1, 2))
    _write(table, flight, proposed, chosen, goes)
    _settle(table, flight, stepped, goes)
    _store(table, flight)
    _record(table, flight, records)
    for column, values in (
        (RecordColumn.STEPPED, stepped),
        (RecordColumn.NUM_WRITTEN, written),
    ):
        records[:, column] = values.int()


@dataclass(slots=True)
class _Flight:
    """The blocks in flight in their order, [S, ring] or [S, ring, block_size]."""

    place: Tensor  # int64, place in the ring
    index: Tensor  # [ring]
    exists: Tensor  # bool
    position: Tensor  # of each cell
    birth: Tensor
    left: Tensor
    full: Tensor
    count: Tensor
    tokens: Tensor
    masked: Tensor  # bool

    @classmethod
    def of(cls, table: Views) -> _Flight:
        layout = table.layout
        start = table.column(Column.START)
        first = (start - table.column(Column.ORIGIN)) // layout.block_size
        index = torch.arange(layout.ring, dtype=torch.int32)
        place = ((first[:, None] + index) % layout.ring).long()
        cells = place[:, :, None].expand(-1, -1, layout.block_size)
        exists = index < table.column(Column.NUM_BLOCKS)[:, None]
        offset = torch.arange(layout.ring * layout.block_size, dtype=torch.int32)
        blocks = {name: table.blocks(name).gather(1, place) for name in BlockColumn}
        return cls(
            place=place,
            index=index,
            exists=exists,
            position=(start[:, None] + offset).view(cells.shape),
            birth=blocks[BlockColumn.BIRTH],
            left=blocks[BlockColumn.LEFT].where(exists, 0),
            full=blocks[BlockColumn.FULL],
            count=blocks[BlockColumn.COUNT],
            tokens=table.tokens.gather(1, cells),
            masked=(table.masked.gather(1, cells) == 1) & exists[:, :, None],
        )

    @property
    def progress(self) -> Tensor:
        """[S, ring] fp32, the share of its masks that a block has written."""
        return (self.birth - self.left).float() / self.birth.clamp(min=1).float()


@dataclass(frozen=True, slots=True)
class _Proposals:
    """Candidates at their cells, [S, ring, block_size]."""

    token: Tensor  # int32
    confidence: Tensor
    score: Tensor
    finite: Tensor  # bool


def _proposals(flight: _Flight, first: Tensor, candidates: Candidates) -> _Proposals:
    masked = flight.masked.flatten(1)
    place = (first[:, None] + masked.cumsum(1) - 1).where(masked & (first >= 0)[:, None], 0)
    if len(candidates.token) == 0:
        candidates = Candidates(*(c.new_zeros(1) for c in _columns(candidates)))
    token, confidence, score = (
        column[place].view(flight.masked.shape) for column in _columns(candidates)
    )
    return _Proposals(token.int(), confidence, score, confidence.isfinite() & score.isfinite())


def _columns(candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
    return candidates.token, candidates.confidence, candidates.score


def _choose(table: Views, flight: _Flight, proposed: _Proposals) -> Tensor:
    """Cells that are written [S, ring, block_size] bool, according to each slot's rule."""

    def column(name: Column) -> Tensor:
        return table.column(name)[:, None, None]

    masked = flight.masked
    above = masked & (proposed.confidence > table.real(Column.CONFIDENCE)[:, None, None])
    num_above = above.sum(2, keepdim=True)
    by_score = _rank(proposed.score, masked)
    by_position = masked.cumsum(2) - masked.int()
    best = masked & (by_score == 0) & (flight.full[:, :, None] == 1)
    d2f = above.where(num_above > 0, best)
    share = _share(table, flight)[:, :, None]
    top = masked & (by_score < share)
    rule = column(Column.REMASKING)
    leftmost = masked & (by_position < share)
    dynamic = above.where(num_above >= share, top)
    diffused = leftmost.where(rule == SEQUENTIAL, top.where(rule == STATIC, dynamic))
    bound = table.real(Column.ENTROPY)[:, None, None]
    sure = masked & (by_score < _within_entropy(proposed.score, by_score, masked, bound))
    diffused = sure.where(rule == ENTROPY_BOUNDED, diffused)
    return d2f.where(column(Column.ALGORITHM) == 0, diffused)


def _rank(score: Tensor, masked: Tensor) -> Tensor:
    """Rank of each mask among its block's by score, ties by position; int32."""
    size = score.shape[2]
    higher = score[:, :, None, :] > score[:, :, :, None]
    earlier = torch.ones(size, size, dtype=torch.bool).tril(-1)
    tied = (score[:, :, None, :] == score[:, :, :, None]) & earlier
    return ((higher | tied) & masked[:, :, None, :]).sum(3)


def _within_entropy(score: Tensor, rank: Tensor, masked: Tensor, bound: Tensor) -> Tensor:
    """How many of each block's masks, surest first, have entropies that add up to less than
    ``bound`` [S, 1, 1]; at least one. [S, ring, 1], summed in fp64 by rank.
    """
    entropy = (-score.double()).where(masked, 0.0)
    ordered = torch.zeros_like(entropy)
    for place in range(score.shape[2]):
        ordered[:, :, place] = entropy.where(masked & (rank == place), 0.0).sum(2)
    exists = torch.arange(score.shape[2]) < masked.sum(2, keepdim=True)
    below = exists & (ordered.cumsum(2) < bound.double())
    return below.sum(2, keepdim=True).clamp(min=1)


def _share(table: Views, flight: _Flight) -> Tensor:
    """Masks that the coming step of block diffusion fills [S, ring]; the remainder goes first."""
    steps = table.column(Column.STEPS).clamp(min=1)[:, None]
    step = torch.minimum(flight.count, steps - 1)
    size = table.layout.block_size  # a prompt's tail in the block does not reduce it
    even = size // steps + (step < size % steps).int()
    return torch.minimum(even.clamp(min=1), flight.left)


def _write(
    table: Views, flight: _Flight, proposed: _Proposals, chosen: Tensor, goes: Tensor
) -> None:
    flight.count += ((flight.left > 0) & goes[:, None]).int()
    flight.tokens = proposed.token.where(chosen, flight.tokens)
    flight.masked = flight.masked & ~chosen
    flight.left = flight.left - chosen.sum(2).int()
    stops = (proposed.token[..., None] == table.stops[:, None, None, :]).any(3)
    seen = table.column(Column.STOP_SEEN)
    seen |= (stops & chosen).any(2).any(1).int()


def _settle(table: Views, flight: _Flight, stepped: Tensor, goes: Tensor) -> None:
    """Settles in order, ends, and opens the next step of continuing slots."""
    size = table.layout.block_size
    start, num_blocks = table.column(Column.START), table.column(Column.NUM_BLOCKS)
    settled = table.column(Column.NUM_SETTLED)
    stored = settled.where(goes, 0)
    pending = flight.index.where(flight.left > 0, num_blocks[:, None])
    done = pending.min(1).values.where(goes, settled)
    final_len = start + done * size
    end = table.column(Column.ANSWER_END)
    first_new = torch.maximum(start + stored * size, table.column(Column.PROMPT_LEN))
    is_new = flight.position >= first_new[:, None, None]
    is_new &= flight.position < torch.minimum(final_len, end)[:, None, None]
    stops = (flight.tokens[..., None] == table.stops[:, None, None, :]).any(3)
    is_stopped = goes & (stops & is_new).any(2).any(1)
    is_ended = goes & ~is_stopped & (final_len >= end)
    status = table.column(Column.STATUS)
    status[stepped & ~goes] = Status.FAILED
    status[is_stopped] = Status.STOPPED
    status[is_ended] = Status.ENDED
    opens = goes & ~is_stopped & ~is_ended
    appended = _append(table, flight, done, opens)
    _activate(table, flight, stored, appended, opens)
    start += stored * size
    settled.copy_(done - stored)
    num_blocks += appended - stored
    table.column(Column.NUM_MASKS).copy_(flight.left.sum(1))


def _append(table: Views, flight: _Flight, done: Tensor, opens: Tensor) -> Tensor:
    """Appends a block of masks if the rule asks for one; returns [S] int32, the number appended."""
    size = table.layout.block_size
    num_blocks = table.column(Column.NUM_BLOCKS)
    end = table.column(Column.START) + num_blocks * size
    may = opens & (end < table.column(Column.LAST_BLOCK_END))
    may &= table.column(Column.STOP_SEEN) == 0
    last = (num_blocks - 1).clamp(min=0).long()[:, None]
    is_far = flight.progress.gather(1, last)[:, 0] >= table.real(Column.ADD)
    num_active = num_blocks - done
    is_d2f = table.column(Column.ALGORITHM) == 0
    wants = (num_active == 0) | (is_d2f & (num_active < table.column(Column.WINDOW)) & is_far)
    is_new = (flight.index == num_blocks[:, None]) & (may & wants)[:, None]
    born = is_new[:, :, None] & (flight.position >= table.column(Column.PROMPT_LEN)[:, None, None])
    masks = born.sum(2).int()
    flight.masked = flight.masked | born
    flight.birth = masks.where(is_new, flight.birth)
    flight.left = masks.where(is_new, flight.left)
    flight.full = flight.full.where(~is_new, 0)
    flight.count = flight.count.where(~is_new, 0)
    flight.exists = flight.exists | is_new
    return (may & wants).int()


def _activate(
    table: Views, flight: _Flight, stored: Tensor, appended: Tensor, opens: Tensor
) -> None:
    """Marks blocks as full if enough of their predecessor is written, or all of them."""
    is_far = flight.progress >= table.real(Column.FULL)[:, None]
    after_far = is_far.roll(1, dims=1)
    is_first = flight.index == stored[:, None]
    is_diffusion = (table.column(Column.ALGORITHM) != 0)[:, None]
    fills = flight.exists & opens[:, None] & (after_far | is_first | is_diffusion)
    flight.full = flight.full.masked_fill(fills & (flight.index >= stored[:, None]), 1)


def _store(table: Views, flight: _Flight) -> None:
    """Puts the blocks back into the ring."""
    for column, values in (
        (BlockColumn.BIRTH, flight.birth),
        (BlockColumn.LEFT, flight.left),
        (BlockColumn.FULL, flight.full),
        (BlockColumn.COUNT, flight.count),
    ):
        table.blocks(column).scatter_(1, flight.place, values)
    cells = flight.place[:, :, None].expand_as(flight.tokens)
    table.tokens.scatter_(1, cells, flight.tokens)
    table.masked.scatter_(1, cells, flight.masked.int())


def _record(table: Views, flight: _Flight, records: Tensor) -> None:
    """The current state, with blocks counted from the new START."""
    ring = table.layout.ring
    records[:, :NUM_RECORD_COLUMNS] = 0
    for name in (
        "STATUS", "GENERATION", "START", "NUM_BLOCKS", "NUM_SETTLED", "NUM_MASKS", "STOP_SEEN",
    ):  # fmt: skip
        records[:, Column[name]] = table.column(Column[name])
    moved = (flight.position[:, 0, 0] - table.column(Column.START)) // table.layout.block_size
    order = ((flight.index - moved[:, None]) % ring).long()
    cells = order[:, :, None].expand_as(flight.tokens)
    shown = flight.tokens.where(~flight.masked, -1).gather(1, cells)
    records[:, NUM_RECORD_COLUMNS:] = shown.flatten(1)
