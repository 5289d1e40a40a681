"""One decode step of all slots, completely on the device: plan, forward, sample, advance.

On CUDA it is two graphs, one for a bucket of rows and one for a bucket of candidates, because there
are fewer masks than rows. On the CPU, and without graphs, the same calls run one by one. The host
writes rows of the slot table and reads records; see `device_stepper`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.kernels.sampling import Candidates, RowSampling
from effuse.kernels.step_advance import advance
from effuse.kernels.step_plan import plan_step
from effuse.kernels.step_rows import StepRows, exchange_boundaries, gather_rows
from effuse.kernels.step_slots import Control, SlotLayout, SlotTable
from effuse.models.transformer import LayerKV, Transformer

Adjust = Callable[[Candidates, RowSampling], Candidates]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuffers:
    """All parts of a step that stay on the device, at fixed addresses."""

    table: SlotTable
    control: Tensor  # [4] int32
    rows: StepRows
    mixed: Tensor  # [T, Q] the last attention's output
    residual: Tensor  # [T, H] that goes with it
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
            mixed=torch.zeros(num_rows, model.q_dim, dtype=model.dtype, device=device),
            residual=torch.zeros(num_rows, width, dtype=model.dtype, device=device),
            boundary=torch.zeros(layout.num_slots, width, dtype=model.dtype, device=device),
            records=torch.zeros(shape, dtype=torch.int32, device=device),
        )


class DeviceStep:
    """Runs steps over the paged memory `kv`. `adjust` may change candidates, as benchmarks do."""

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
        """Plan, and the forward up to its last attention, for a bucket of rows."""
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
        self.model.forward_unfinished(
            rows.token_ids[:used],
            rows.positions[:used],
            attention,
            self._kv,
            rows.slot_mapping[:used],
            buffers.mixed[:used],
            buffers.residual[:used],
        )

    @torch.inference_mode()
    def run_candidates(self, num_candidates: int) -> None:
        """Rest of the forward, sampling and advance for a bucket of candidates: fills `records`."""
        buffers, rows = self.buffers, self.buffers.rows
        sampling = rows.sampling.of_rows(slice(num_candidates))
        candidates = self.model.candidates(self._hidden(num_candidates), sampling)
        if self._adjust is not None:
            candidates = self._adjust(candidates, sampling)
        advance(buffers.table, buffers.control, rows.first_candidate, candidates, buffers.records)

    def limit_candidates(self, limit: int) -> None:
        """The coming step takes at most `limit` candidates."""
        self.buffers.control[Control.MASK_LIMIT].fill_(limit)

    def _attention(self, num_rows: int, max_context: int) -> AttentionBatch:
        layout, rows = self.buffers.table.layout, self.buffers.rows
        if self.model.device.type != "cpu":
            return rows.attention(
                layout, num_rows, page_size=self.page_size, max_context=max_context
            )
        lengths = rows.cu_seqlens.diff().tolist()
        # All page lists have the widest length; entries beyond a sequence are not read.
        return make_attention_batch(
            lengths,
            rows.context_lens.tolist(),
            rows.page_table.tolist(),
            rows.block_origins.tolist(),
            block_size=layout.block_size,
            page_size=self.page_size,
            device=self.model.device,
        )

    def _hidden(self, num_candidates: int) -> Tensor:
        """Hidden rows [R, H] of the candidates; for shifting models the boundary vectors are used,
        and those of slots that store are replaced.
        """
        buffers, rows = self.buffers, self.buffers.rows
        wanted = rows.hidden_rows[:num_candidates]
        shift = self.model.config.shift_logits
        kept = rows.kept_rows if shift else rows.kept_rows[:0]
        hidden = self.model.finish(*gather_rows(buffers.mixed, buffers.residual, wanted, kept))
        if shift:
            slots = rows.boundary_slots[:num_candidates]
            exchange_boundaries(hidden, slots, kept, buffers.boundary)
        return hidden[:num_candidates]
