"""The inputs of attention for one forward: the same for every layer, built once.

Holds lengths, page tables and block origins, and on the CPU the gather order and the mask-free
segments derived from them. It knows nothing of layers, heads or the memory that pages live in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """CPU only: the gather order of cached tokens, and the rows cut into segments.

    A segment is a run of rows of one sequence in one diffusion block: all of them see the same
    prefix of the sequence's keys (cached tokens, then rows), so that no segment needs a mask.
    """

    token_pages: Tensor  # [sum(context_lens)] int64, sequence after sequence, by position
    token_offsets: Tensor  # [sum(context_lens)] int64
    seq_lens: list[int]
    context_lens: list[int]
    key_lens: list[int]  # context + rows of each sequence
    segment_lens: list[int]  # rows of each segment, all sequences after one another
    segment_keys: tuple[tuple[int, ...], ...]  # by sequence: keys that each of its segments sees


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Shapes and visibility of one forward over the packed rows of S sequences.

    Row i of sequence s has position ``context_lens[s] + i``. It sees every cached token of s, and
    row j of s if ``block(i) >= block(j)`` with ``block(p) = max(floor((p - block_origins[s]) /
    block_size), -1)``. All positions before the origin form one bidirectional block.

    A beginning that runs of sequences have in common may be apart: each sequence of `shared` has
    the rows of one run and the pages of its beginning, and then this batch has the pages after it.
    """

    cu_seqlens: Tensor  # [S+1] int32, rows of sequence s are cu[s]:cu[s+1]
    context_lens: Tensor  # [S] int32
    page_table: Tensor  # [S, max_pages] int32, unused entries are 0
    block_origins: Tensor  # [S] int32
    block_size: int
    page_size: int
    max_seqlen: int
    max_context: int
    gather: GatherPlan | None  # present only on the CPU
    shared: "AttentionBatch | None" = None


@dataclass(frozen=True, slots=True)
class ContextCut:
    """One rank's share of the cached tokens of every sequence, which ranks hold in turns: token p
    is on rank p // turn % degree. A page of a table has a turn of each rank."""

    rank: int
    degree: int
    turn: int  # tokens that a rank has one after another: those of a page in its memory

    def length(self, num_tokens: int) -> int:
        """How many of a sequence's first tokens are here."""
        whole, rest = divmod(num_tokens, self.degree * self.turn)
        return whole * self.turn + min(max(rest - self.rank * self.turn, 0), self.turn)

    def lengths(self, num_tokens: Tensor) -> Tensor:
        """`length` of each number [S]."""
        round_ = self.degree * self.turn
        last = (num_tokens % round_ - self.rank * self.turn).clamp(0, self.turn)
        return num_tokens // round_ * self.turn + last

    def slots(self, slots: Tensor) -> Tensor:
        """Slots [T] int64 of the pages of a table as slots of this rank's memory; -1 for tokens of
        other ranks, and for -1."""
        round_ = self.degree * self.turn
        offset = slots % round_
        is_here = (slots >= 0) & (offset // self.turn == self.rank)
        return torch.where(is_here, slots // round_ * self.turn + offset % self.turn, -1)


@dataclass(frozen=True, slots=True)
class CutBatch:
    """The two parts of a batch whose cached tokens are cut over ranks."""

    cached: AttentionBatch  # this rank's cached tokens, seen by all rows
    in_flight: AttentionBatch  # the rows by themselves, with the same visibility


def cut_batch(batch: AttentionBatch, cut: ContextCut) -> CutBatch:
    """The parts of a batch; tables and the page size of `batch` are those of all ranks together."""
    cached, in_flight = batch.gather, batch.gather
    if cached is not None and in_flight is not None:
        cached, in_flight = _cached_plan(cached, cut), _in_flight_plan(in_flight)
    most = ContextCut(0, cut.degree, cut.turn).length(batch.max_context)
    return CutBatch(
        cached=replace(
            batch,
            context_lens=cut.lengths(batch.context_lens),
            page_size=cut.turn,
            max_context=most,
            gather=cached,
        ),
        in_flight=replace(
            batch,
            context_lens=torch.zeros_like(batch.context_lens),
            # A row's distance from the origin stays the same.
            block_origins=batch.block_origins - batch.context_lens,
            page_size=cut.turn,
            max_context=0,
            gather=in_flight,
        ),
    )


def _cached_plan(plan: GatherPlan, cut: ContextCut) -> GatherPlan:
    is_here = plan.token_offsets // cut.turn == cut.rank
    lengths = [cut.length(count) for count in plan.context_lens]
    seen = zip(lengths, plan.segment_keys, strict=True)
    return replace(
        plan,
        token_pages=plan.token_pages[is_here],
        token_offsets=plan.token_offsets[is_here] % cut.turn,
        context_lens=lengths,
        key_lens=lengths,
        segment_keys=tuple((length,) * len(ends) for length, ends in seen),
    )


def _in_flight_plan(plan: GatherPlan) -> GatherPlan:
    none = plan.token_pages[:0]
    seen = zip(plan.context_lens, plan.segment_keys, strict=True)
    return replace(
        plan,
        token_pages=none,
        token_offsets=none,
        context_lens=[0] * len(plan.context_lens),
        key_lens=plan.seq_lens,
        segment_keys=tuple(tuple(end - begin for end in ends) for begin, ends in seen),
    )


def make_attention_batch(
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    page_table: Sequence[Sequence[int]],
    block_origins: Sequence[int],
    *,
    block_size: int,
    page_size: int,
    device: torch.device,
    stored_lens: Sequence[int] | None = None,
) -> AttentionBatch:
    """Build the batch from one entry per sequence; sequences without rows or context are legal.

    ``stored_lens`` (rows of each sequence that this forward stores) only widens the check that the
    page table covers what is read and written. Raises ValueError that names the bad sequence.
    """
    _check(seq_lens, context_lens, page_table, block_origins, block_size, page_size, stored_lens)
    num_seqs = len(seq_lens)
    width = max((len(pages) for pages in page_table), default=0)
    cu_seqlens = [0]
    for length in seq_lens:
        cu_seqlens.append(cu_seqlens[-1] + length)
    padded = [entry for pages in page_table for entry in (*pages, *[0] * (width - len(pages)))]
    cu, contexts, origins, pages_flat = _on_device(
        (cu_seqlens, context_lens, block_origins, padded), device
    )
    table = pages_flat.view(num_seqs, width)
    gather = None
    if device.type == "cpu":
        gather = _gather_plan(seq_lens, context_lens, table, block_origins, block_size, page_size)
    return AttentionBatch(
        cu_seqlens=cu,
        context_lens=contexts,
        page_table=table,
        block_origins=origins,
        block_size=block_size,
        page_size=page_size,
        max_seqlen=max(seq_lens, default=0),
        max_context=max(context_lens, default=0),
        gather=gather,
    )


def block_end(position: int, block_origin: int, block_size: int) -> int:
    """First position after the block that holds ``position``."""
    if position < block_origin:
        return block_origin
    return position + block_size - (position - block_origin) % block_size


def _on_device(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Columns as int32, copied to the device together; each begins at a multiple of 16 bytes.

    Triton compiles a kernel again for pointers with another alignment.
    """
    packed: list[int] = []
    begins: list[int] = []
    for column in columns:
        packed += [0] * (-len(packed) % 4)
        begins.append(len(packed))
        packed += column
    joined = torch.tensor(packed, dtype=torch.int32)
    if device.type != "cpu":
        joined = joined.pin_memory().to(device, non_blocking=True)
    pairs = zip(begins, columns, strict=True)
    return [joined[begin : begin + len(column)] for begin, column in pairs]


def _gather_plan(
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    table: Tensor,
    block_origins: Sequence[int],
    block_size: int,
    page_size: int,
) -> GatherPlan:
    ends = [
        _segment_ends(*sequence, block_size)
        for sequence in zip(seq_lens, context_lens, block_origins, strict=True)
    ]
    segment_lens = [
        end - begin
        for context, seen in zip(context_lens, ends, strict=True)
        for begin, end in pairwise((context, *seen))
    ]
    token_pages, token_offsets = _gather_order(table, context_lens, page_size)
    return GatherPlan(
        token_pages=token_pages,
        token_offsets=token_offsets,
        seq_lens=list(seq_lens),
        context_lens=list(context_lens),
        key_lens=list(map(add, seq_lens, context_lens)),
        segment_lens=segment_lens,
        segment_keys=tuple(ends),
    )


def _segment_ends(length: int, context: int, origin: int, block_size: int) -> tuple[int, ...]:
    """Positions at which the segments of rows context .. context + length - 1 end, ascending."""
    ends = []
    position, stop = context, context + length
    while position < stop:
        position = min(block_end(position, origin, block_size), stop)
        ends.append(position)
    return tuple(ends)


def _gather_order(
    table: Tensor, context_lens: Sequence[int], page_size: int
) -> tuple[Tensor, Tensor]:
    position = torch.arange(max(context_lens, default=0))
    is_cached = position < torch.tensor(context_lens, dtype=torch.int64)[:, None]
    page = table[:, position // page_size].long()
    offset = (position % page_size).expand(page.shape)
    return page[is_cached], offset[is_cached]


def _check(
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    page_table: Sequence[Sequence[int]],
    block_origins: Sequence[int],
    block_size: int,
    page_size: int,
    stored_lens: Sequence[int] | None,
) -> None:
    if block_size < 1 or page_size < 1:
        raise ValueError(f"block_size {block_size} and page_size {page_size} must be at least 1")
    stored = stored_lens if stored_lens is not None else [0] * len(seq_lens)
    counts = [len(x) for x in (seq_lens, context_lens, page_table, block_origins, stored)]
    if len(set(counts)) != 1:
        raise ValueError(f"expected one entry per sequence in every list, got lengths {counts}")
    rows = zip(seq_lens, context_lens, page_table, stored, strict=True)
    for index, (length, context, pages, num_stored) in enumerate(rows):
        if length < 0 or context < 0 or not 0 <= num_stored <= length:
            raise ValueError(
                f"sequence {index}: rows {length}, cached {context}, stored {num_stored}: expected "
                "none negative, and stored at most rows"
            )
        if len(pages) * page_size < context + num_stored:
            raise ValueError(
                f"sequence {index}: {len(pages)} pages of {page_size} tokens do not cover "
                f"{context} cached and {num_stored} stored tokens"
            )
