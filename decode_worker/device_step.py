"""One decode step of all slots, on the device from end to end: plan, forward, sample, advance.

On CUDA it is two graphs, one for the rows (by their bucket) and one for the candidates (by theirs),
because masks are fewer than rows; on the CPU, and where graphs are not wanted, the same calls run
one by one. The host writes rows of the slot table and reads records; see `device_stepper`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.advance import advance
from effuse.kernels.batch import AttentionBatch, make_attention_batch
from effuse.kernels.confidence import Candidates, RowSampling, sample_confidence
from effuse.kernels.plan_step import StepRows, plan_step
from effuse.kernels.slots import Control, SlotLayout, SlotTable
from effuse.models.transformer import LayerKV, Transformer

Adjust = Callable[[Candidates, RowSampling], Candidates]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuffers:
    """Everything of a step that stays on the device, at fixed addresses."""

    table: SlotTable
    control: Tensor  # [4] int32
    rows: StepRows
    hidden: Tensor  # [T, H] after the final norm
    boundary: Tensor  # [S, H] hidden row of each slot's last stored position (shifting models)
    records: Tensor  # [S, record_width] int32

    @classmethod
    def empty(cls, model: Transformer, layout: SlotLayout, num_rows: int) -> "StepBuffers":
        """Buffers for up to `num_rows` rows."""
        device, width = model.device, model.config.hidden_size
        shape = (layout.num_slots, layout.record_width)
        return cls(
            table=SlotTable.empty(layout, device),
            control=torch.zeros(4, dtype=torch.int32, device=device),
            rows=StepRows.empty(layout, num_rows, device),
            hidden=torch.zeros(num_rows, width, dtype=model.dtype, device=device),
            boundary=torch.zeros(layout.num_slots, width, dtype=model.dtype, device=device),
            records=torch.zeros(shape, dtype=torch.int32, device=device),
        )


class DeviceStep:
    """Runs steps over the paged memory `kv`. `adjust` may change candidates (benchmarks do)."""

    def __init__(
        self,
        model: Transformer,
        kv: Sequence[LayerKV],
        buffers: StepBuffers,
        *,
        page_size: int,
        adjust: Adjust | None = None,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self._kv = kv
        self.page_size = page_size
        self._adjust = adjust

    @torch.inference_mode()
    def run_rows(self, num_rows: int, max_context: int) -> None:
        """Plan and forward for a bucket of rows: fills `hidden`."""
        buffers, config = self.buffers, self.model.config
        plan_step(
            buffers.table,
            buffers.control,
            buffers.rows,
            num_rows=num_rows,
            page_size=self.page_size,
            mask_token_id=config.mask_token_id,
            shift=config.shift_logits,
        )
        attention = self._attention(num_rows, max_context)
        used = num_rows if attention.gather is None else sum(attention.gather.seq_lens)
        if not used:
            return
        rows = buffers.rows
        buffers.hidden[:used] = self.model.forward(
            rows.token_ids[:used],
            rows.positions[:used],
            attention,
            self._kv,
            rows.slot_mapping[:used],
            last_rows=None,
        )

    @torch.inference_mode()
    def run_candidates(self, num_candidates: int) -> None:
        """Head, sampling and advance for a bucket of candidates: fills `records`."""
        buffers, rows = self.buffers, self.buffers.rows
        sampling = _first(rows.sampling, num_candidates)
        wanted = buffers.hidden.index_select(0, rows.hidden_rows[:num_candidates])
        if self.model.config.shift_logits:
            wanted = self._with_boundaries(wanted, rows.boundary_slots[:num_candidates])
        logits = self.model.logits(wanted)
        candidates = sample_confidence(logits, sampling, self.model.config.mask_token_id)
        if self._adjust is not None:
            candidates = self._adjust(candidates, sampling)
        if self.model.config.shift_logits:
            self._keep_boundaries()
        advance(buffers.table, buffers.control, rows.first_candidate, candidates, buffers.records)

    def limit_candidates(self, limit: int) -> None:
        """The coming step takes no more than `limit` candidates."""
        self.buffers.control[Control.MASK_LIMIT].fill_(limit)

    def _attention(self, num_rows: int, max_context: int) -> AttentionBatch:
        layout, rows = self.buffers.table.layout, self.buffers.rows
        if self.model.device.type != "cpu":
            return rows.attention(
                layout, num_rows, page_size=self.page_size, max_context=max_context
            )
        lengths = rows.cu_seqlens.diff().tolist()
        # The page lists are as long as the widest; what a sequence does not reach is not read.
        return make_attention_batch(
            lengths,
            rows.context_lens.tolist(),
            rows.page_table.tolist(),
            rows.block_origins.tolist(),
            block_size=layout.block_size,
            page_size=self.page_size,
            device=self.model.device,
        )

    def _with_boundaries(self, wanted: Tensor, slots: Tensor) -> Tensor:
        vectors = self.buffers.boundary.index_select(0, slots.clamp(min=0))
        return torch.where((slots >= 0)[:, None], vectors, wanted)

    def _keep_boundaries(self) -> None:
        boundary, kept = self.buffers.boundary, self.buffers.rows.kept_rows
        vectors = self.buffers.hidden.index_select(0, kept.clamp(min=0))
        boundary.copy_(torch.where((kept >= 0)[:, None], vectors, boundary))


def _first(sampling: RowSampling, count: int) -> RowSampling:
    return RowSampling(
        temperature=sampling.temperature[:count],
        top_p=sampling.top_p[:count],
        top_k=sampling.top_k[:count],
        seed=sampling.seed[:count],
        answer_index=sampling.answer_index[:count],
        position=sampling.position[:count],
        denoise_count=sampling.denoise_count[:count],
        score=sampling.score[:count],
    )
