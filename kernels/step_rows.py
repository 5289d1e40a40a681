"""The rows of a denoise step, between `plan_step` and the forward: buffers that every step fills
again, and the rows that leave its last layer.

A step needs hidden rows of its candidates and, for models that shift their logits, of each slot's
last stored position. The latter is kept as the slot's boundary, from which the first position in
flight is predicted. `plan_step` selects these rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.sampling import RowSampling
from effuse.kernels.step_slots import SlotLayout


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step's rows, in buffers of T rows and S slots that every step fills again."""

    cu_seqlens: Tensor  # [S+1] int32
    context_lens: Tensor  # [S] int32
    page_table: Tensor  # [S, max_pages] int32
    block_origins: Tensor  # [S] int32
    first_candidate: Tensor  # [S] int32 by slot, -1 if it takes no part
    kept_rows: Tensor  # [S] int64 by slot: its last stored row, -1 if it stores none
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, -1 if nothing is stored
    hidden_rows: Tensor  # [T] int64 by candidate: the row that predicts it
    boundary_slots: Tensor  # [T] int32 by candidate: the slot whose boundary predicts it; or -1
    sampling: RowSampling  # [T] by candidate

    @classmethod
    def empty(cls, layout: SlotLayout, num_rows: int, device: torch.device) -> StepRows:
        """Buffers for up to `num_rows` rows."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slots, long, real = layout.num_slots, torch.int64, torch.float32
        return cls(
            cu_seqlens=zeros(slots + 1),
            context_lens=zeros(slots),
            page_table=zeros(slots, layout.max_pages),
            block_origins=zeros(slots),
            first_candidate=zeros(slots),
            kept_rows=zeros(slots, dtype=long),
            token_ids=zeros(num_rows, dtype=long),
            positions=zeros(num_rows, dtype=long),
            slot_mapping=zeros(num_rows, dtype=long),
            hidden_rows=zeros(num_rows, dtype=long),
            boundary_slots=zeros(num_rows),
            sampling=RowSampling(
                temperature=zeros(num_rows, dtype=real),
                top_p=zeros(num_rows, dtype=real),
                top_k=zeros(num_rows),
                seed=zeros(num_rows, dtype=long),
                answer_index=zeros(num_rows),
                position=zeros(num_rows),
                denoise_count=zeros(num_rows),
                score=zeros(num_rows, dtype=torch.int8),
            ),
        )

    def attention(
        self, layout: SlotLayout, num_rows: int, *, page_size: int, max_context: int
    ) -> AttentionBatch:
        """The batch over these buffers for a bucket of `num_rows`; no slot has fewer rows than a
        block.

        `max_context` bounds the cached tokens of every slot that takes part.
        """
        num_seqs = sequences_in(layout, num_rows)
        return AttentionBatch(
            cu_seqlens=self.cu_seqlens[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            page_table=self.page_table[:num_seqs],
            block_origins=self.block_origins[:num_seqs],
            block_size=layout.block_size,
            page_size=page_size,
            max_seqlen=min(num_rows, layout.ring * layout.block_size),
            max_context=max_context,
            gather=None,
        )


def sequences_in(layout: SlotLayout, num_rows: int) -> int:
    """Most slots that a bucket of `num_rows` can hold."""
    return max(1, min(layout.num_slots, num_rows // layout.block_size))


def gather_rows(
    mixed: Tensor, residual: Tensor, wanted: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows `wanted` [R] and then `kept` [S] (-1: any row) of mixed [T, Q] and residual [T, H]."""
    if mixed.is_cuda:
        from effuse.kernels import step_rows_triton

        return step_rows_triton.launch_gather(mixed, residual, wanted, kept)
    rows = torch.cat([wanted, kept.clamp(min=0)])
    return mixed.index_select(0, rows), residual.index_select(0, rows)


def exchange_boundaries(
    hidden: Tensor, boundary_slots: Tensor, kept: Tensor, boundary: Tensor
) -> None:
    """Exchanges rows between hidden [R + S, H] of `gather_rows` and boundary [S, H], in place.

    Row i takes the boundary of slot `boundary_slots` [R] unless that is -1; slot s takes row R + s
    unless `kept` [S] is -1. No slot does both, because a slot that stores has its first candidate
    after the stored rows.
    """
    if hidden.is_cuda:
        from effuse.kernels import step_rows_triton

        step_rows_triton.launch_exchange(hidden, boundary_slots, kept, boundary)
        return
    count = len(boundary_slots)
    vectors = boundary.index_select(0, boundary_slots.clamp(min=0))
    takes, keeps = (boundary_slots >= 0)[:, None], (kept >= 0)[:, None]
    boundary.copy_(torch.where(keeps, hidden[count:], boundary))
    hidden[:count] = torch.where(takes, vectors, hidden[:count])
