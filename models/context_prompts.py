"""Forwards over prompts whose rows are split over ranks (context-parallel prefill).

Each rank computes some rows of every prompt, with all weights, and holds the pages of its turns. In
each layer ranks gather the K and V of all rows. Each stores the tokens of its own pages. The rows
attend in a workspace: pages with one layer's K and V of all tokens that they may see. Those of
earlier forwards are gathered from the pages of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from effuse.kernels.attention import block_attention, empty_partials, partial_attention
from effuse.kernels.attention_batch import (
    AttentionBatch,
    ContextCut,
    cut_batch,
    make_attention_batch,
)
from effuse.kernels.pages import store_kv
from effuse.models.config import ModelConfig
from effuse.models.group import ContextGroup
from effuse.models.packing import Integers, PackedParts
from effuse.models.part import Part

ToDevice = Callable[[Sequence[Integers]], Sequence[Tensor]]


def runs_of_ranks(num_rows: int, block_size: int | None, degree: int) -> list[list[range]]:
    """The rows of each rank, in runs that follow each other.

    Of block-causal rows each rank has two runs of whole blocks, one of each half, so that all ranks
    see equally many keys. Without a block size every row sees all rows, and a run is enough. The
    last rows are rank 0's, which is the leader: it needs the boundary.
    """
    count, unit = (degree, 1) if block_size is None else (2 * degree, block_size)
    units = -(-num_rows // unit)
    ends = [min(units * at // count * unit, num_rows) for at in range(count + 1)]
    runs = [range(*ends[at : at + 2]) for at in range(count)]
    if block_size is None:
        return [[run] for run in reversed(runs)]
    return [[runs[rank], runs[-1 - rank]] for rank in range(degree)]


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Sequences that attend together, and the pages in which they find their keys."""

    rows: slice  # of this rank
    batch: AttentionBatch | None  # of these rows, with tables of the workspace; None without rows
    own_pages: Tensor  # [P] pages with their earlier tokens, the same on each rank
    slots: Tensor  # [N * R] of the gathered rows in the workspace, -1 for those of others
    num_pages: int  # N * P gathered ones, then those of rows alone


class CutRows(NamedTuple):
    """The R rows of this rank in a forward, [R] int64; the last ones may be padding, which is in
    no prompt."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # all -1: rows are stored once they are gathered
    wanted: Tensor  # [K] rows whose hidden rows are results; those of rank 0 are right


class PromptAttention:
    """One rank's side of it, an `Attend`; all ranks of the group call it together."""

    def __init__(self, context: ContextGroup, config: ModelConfig) -> None:
        self.cut = context.cut
        self.group = context.group
        self._block_size = config.block_size
        self._is_causal = config.prompt_attention == "causal_blocks"
        self.most_tokens = 0  # of a workspace, if one sequence has no more; 0 is no limit
        self._slots: Tensor | None = None  # [N * R] of all ranks' rows in this rank's pages
        self._spaces: Sequence[_Workspace] = ()

    def begin(
        self, parts: Sequence[Part], packed: PackedParts, device: torch.device, bring: ToDevice
    ) -> CutRows:
        """Begins a forward over parts without candidates, which are the same on all ranks.

        bring: copies arrays to the device. Raises ValueError for a part that begins within a block.
        """
        runs = [self._runs(part) for part in parts]
        order, firsts = self._order(parts, runs)
        own = order[self.cut.rank]
        at, is_row = np.maximum(own, 0), own >= 0
        wanted = np.zeros_like(packed.wanted_rows)
        if self.cut.rank == 0:
            wanted = np.searchsorted(own[is_row], packed.wanted_rows)
        everyone = order.reshape(-1)
        places = np.where(everyone < 0, -1, packed.slots[everyone])
        *own_rows, self._slots = bring(
            [
                np.where(is_row, packed.token_ids[at], 0),
                np.where(is_row, packed.positions[at], 0),
                np.full_like(own, -1),
                wanted,
                self.cut.slots(torch.from_numpy(places)).numpy(),
            ]
        )
        self._spaces = list(self._planned(parts, runs, everyone, firsts, device, bring))
        return CutRows(*own_rows)

    def store(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gathers K and V [R, heads, D] of all ranks' rows, stores those of this rank's pages, and
        returns all [N * R, heads, D]."""
        assert self._slots is not None, "the forward has begun"
        gathered = self.group.collect(torch.stack([k, v], dim=1)).flatten(0, 1)
        keys, values = gathered.unbind(1)
        store_kv(keys, values, k_cache, v_cache, self._slots)
        return keys, values

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
    ) -> Tensor:
        """The output [R, heads, D] of this rank's rows; q, k, v: [R, heads or KV heads, D]; batch:
        of all rows, of which workspaces have their parts."""
        gathered = self.store(k, v, k_cache, v_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for space in self._spaces:
            keys, values = self._filled(space, *gathered, k_cache, v_cache)
            if space.batch is None:
                continue
            rows, attend = space.rows, block_attention if self._is_causal else _all_cached
            attend(
                *(q[rows], k[rows], v[rows], keys, values, space.batch), scale=scale, out=out[rows]
            )
        return out

    def _filled(
        self, space: _Workspace, keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Views of a workspace's pages, filled."""
        _, heads, dim = keys.shape
        pages = keys.new_empty(space.num_pages, heads, 2, self.cut.turn, dim)
        if count := len(space.own_pages):
            own = [one.transpose(1, 2)[space.own_pages] for one in (k_cache, v_cache)]
            self.group.collect(torch.stack(own, dim=2), into=pages[: self.cut.degree * count])
        views = pages[:, :, 0].transpose(1, 2), pages[:, :, 1].transpose(1, 2)
        store_kv(keys, values, *views, space.slots)
        return views

    # The plan of a forward.

    def _runs(self, part: Part) -> list[list[range]]:
        if not self._is_causal:
            return runs_of_ranks(len(part.token_ids), None, self.cut.degree)
        if (part.start - part.block_origin) % self._block_size:
            raise ValueError(f"a part begins at {part.start}, within a block of {self._block_size}")
        return runs_of_ranks(len(part.token_ids), self._block_size, self.cut.degree)

    def _order(
        self, parts: Sequence[Part], runs: Sequence[list[list[range]]]
    ) -> tuple[Integers, list[int]]:
        """The rows of each rank [N, R], -1 for padding; and the first row of each part."""
        firsts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
        rows = [
            np.concatenate(
                [
                    first + np.arange(run.start, run.stop)
                    for first, of_part in zip(firsts, runs, strict=False)
                    for run in of_part[rank]
                ]
            )
            for rank in range(self.cut.degree)
        ]
        order = np.full((len(rows), max(map(len, rows))), -1, np.int64)
        for of_rank, own in zip(order, rows, strict=True):
            of_rank[: len(own)] = own
        return order, firsts

    def _planned(
        self,
        parts: Sequence[Part],
        runs: Sequence[list[list[range]]],
        everyone: Integers,
        firsts: Sequence[int],
        device: torch.device,
        bring: ToDevice,
    ) -> Iterator[_Workspace]:
        """Workspaces of as many parts as fit, in their order."""
        begin, done = 0, 0
        while begin < len(parts):
            end = self._end(parts, begin)
            span = slice(begin, end)
            tables, own_pages, num_pages = self._tables(parts[span])
            slots = np.full(len(everyone), -1, np.int64)
            for part, table, first in zip(parts[span], tables, firsts[span], strict=True):
                row = everyone - first
                is_here = (row >= 0) & (row < len(part.token_ids)) & (everyone >= 0)
                page, offset = np.divmod(part.start + row[is_here], self.cut.turn)
                slots[is_here] = np.asarray(table)[page] * self.cut.turn + offset
            seqs = [
                (part, table, run)
                for part, table, of_ranks in zip(parts[span], tables, runs[span], strict=True)
                for run in of_ranks[self.cut.rank]
                if run
            ]
            count = sum(len(run) for _, _, run in seqs)
            num_padding = 0 if end < len(parts) else len(everyone) // self.cut.degree - done - count
            rows = slice(done, done + count + num_padding)
            batch = self._batch(seqs, num_padding, device) if rows.stop > done else None
            pages, places = bring([own_pages, slots])
            yield _Workspace(rows, batch, pages, places, num_pages)
            begin, done = end, rows.stop

    def _end(self, parts: Sequence[Part], begin: int) -> int:
        """The end of the parts from `begin` on that attend together."""
        tokens = 0
        for at in range(begin, len(parts)):
            tokens += parts[at].start + len(parts[at].token_ids)
            if at > begin and tokens > self.most_tokens > 0:
                return at
        return len(parts)

    def _tables(self, parts: Sequence[Part]) -> tuple[list[list[int]], Integers, int]:
        """The page of a workspace for each page of each part; the own pages to gather; and the
        number of pages in all. A page that ranks hold together has a page of each of them."""
        turn, degree = self.cut.turn, self.cut.degree
        spans = [-(-part.start // (turn * degree)) for part in parts]
        gathered = sum(spans)
        own_pages: list[int] = []
        tables, following, first = [], degree * gathered, 0
        for part, count in zip(parts, spans, strict=True):
            own_pages += part.pages[:count]
            table = [rank * gathered + first + at for at in range(count) for rank in range(degree)]
            num_new = -(-(part.start + len(part.token_ids)) // turn) - len(table)
            table += range(following, following + num_new)
            following, first = following + max(num_new, 0), first + count
            tables.append(table)
        return tables, np.array(own_pages, np.int64), following

    def _batch(
        self, seqs: Sequence[tuple[Part, list[int], range]], num_padding: int, device: torch.device
    ) -> AttentionBatch:
        """Each run as a sequence; padding is one without a context."""
        lengths = [len(run) for _, _, run in seqs]
        seen = [part.start + run.start for part, _, run in seqs]
        origins = [part.block_origin for part, _, _ in seqs]
        if not self._is_causal:  # they see all rows in the workspace
            seen = [part.start + len(part.token_ids) for part, _, _ in seqs]
            origins = [at + length for at, length in zip(seen, lengths, strict=True)]
        tables = [table for _, table, _ in seqs]
        if num_padding:
            lengths, seen, origins, tables = (
                [*lengths, num_padding],
                [*seen, 0],
                [*origins, 0],
                [*tables, []],
            )
        batch = make_attention_batch(
            *(lengths, seen, tables, origins),
            block_size=self._block_size,
            page_size=self.cut.turn,
            device=device,
        )
        if self._is_causal:
            return batch
        return cut_batch(batch, ContextCut(0, 1, self.cut.turn)).cached


def prompt_attention(context: ContextGroup | None, config: ModelConfig) -> PromptAttention | None:
    """A rank's side, if the ranks of its context compute different rows."""
    if context is None or context.weights is None:
        return None
    return PromptAttention(context, config)


def _all_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """`block_attention` of rows that see all tokens in the pages, their own among them."""
    found = empty_partials(len(q), q.shape[1], q.shape[2], q)
    partial_attention(q, k, v, k_cache, v_cache, batch, scale=scale, into=found, cached_only=True)
    out.copy_(found.out)
