"""One decode step of all slots, completely on the device: plan, forward, sample, advance.

On CUDA it is two graphs, one for a bucket of rows and one for a bucket of candidates, because there
are fewer masks than rows. Without graphs the same calls run one by one. The host writes rows of the
slot table and reads records; see `device_stepper`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels import step_advance_triton, step_plan_triton, step_rows_triton
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.sampling import Candidates, RowSampling
from effuse.kernels.step_slots import Control, SlotLayout, SlotTable, StepRows
from effuse.models.transformer import LayerKV, Transformer

Adjust = Callable[[Candidates, RowSampling], Candidates]
Gather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Exchange = Callable[[Tensor, Tensor, Tensor, Tensor], None]


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
        step_plan_triton.launch(
            buffers.table,
            buffers.control,
            buffers.rows,
            num_rows,
            self.page_size,
            config.mask_token_id,
            config.shift_logits,
        )
        layout = buffers.table.layout
        attention = buffers.rows.attention(
            layout, num_rows, page_size=self.page_size, max_context=max_context
        )
        self._forward(num_rows, attention)

    @torch.inference_mode()
    def run_candidates(self, num_candidates: int) -> None:
        """Rest of the forward, sampling and advance for a bucket of candidates: fills `records`."""
        buffers = self.buffers
        candidates = self._candidates(
            num_candidates, step_rows_triton.launch_gather, step_rows_triton.launch_exchange
        )
        step_advance_triton.launch(
            buffers.table,
            buffers.control,
            buffers.rows.first_candidate,
            candidates,
            buffers.records,
        )

    def limit_candidates(self, limit: int) -> None:
        """The coming step takes at most `limit` candidates."""
        self.buffers.control[Control.MASK_LIMIT].fill_(limit)

    def _forward(self, num_rows: int, attention: AttentionBatch) -> None:
        buffers, rows = self.buffers, self.buffers.rows
        self.model.forward_unfinished(
            rows.token_ids[:num_rows],
            rows.positions[:num_rows],
            attention,
            self._kv,
            rows.slot_mapping[:num_rows],
            buffers.mixed[:num_rows],
            buffers.residual[:num_rows],
        )

    def _candidates(self, count: int, gather: Gather, exchange: Exchange) -> Candidates:
        """Of `count` hidden rows [R, H]; for shifting models the boundary vectors are used, and
        those of slots that store are replaced.
        """
        buffers, rows = self.buffers, self.buffers.rows
        shift = self.model.config.shift_logits
        kept = rows.kept_rows if shift else rows.kept_rows[:0]
        mixed, residual = gather(buffers.mixed, buffers.residual, rows.hidden_rows[:count], kept)
        hidden = self.model.finish(mixed, residual)
        if shift:
            exchange(hidden, rows.boundary_slots[:count], kept, buffers.boundary)
        sampling = rows.sampling.of_rows(slice(count))
        candidates = self.model.candidates(hidden[:count], sampling)
        return candidates if self._adjust is None else self._adjust(candidates, sampling)
