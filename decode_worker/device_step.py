"""One decode step of all slots, completely on the device: plan, forward, sample, advance.

On CUDA it is two graphs, one for a bucket of rows and one for a bucket of candidates, because there
are fewer masks than rows. The host writes rows of the slot table and reads records; see
`device_stepper`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effuse.kernels import step_advance_triton, step_plan_triton
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.step_slots import Control, SlotLayout, SlotTable, StepRows
from effuse.kernels.values import Candidates, RowSampling
from effuse.models.transformer import LayerKV, Transformer

Adjust = Callable[[Candidates, RowSampling], Candidates]
Gather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Exchange = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class DeviceStep:
    """Runs steps over the paged memory `kv`; all of its tensors stay at fixed addresses."""

    adjust: Adjust | None = None  # may change candidates, as benchmarks do

    def __init__(
        self,
        model: Transformer,
        kv: Sequence[LayerKV],
        layout: SlotLayout,
        num_rows: int,
        *,
        page_size: int,
    ) -> None:
        """With room for `num_rows` rows T in a step of the layout's slots S."""
        device, width = model.device, model.config.hidden_size
        self.model = model
        self.page_size = page_size
        self.layout = layout
        self.table = SlotTable(layout, device)
        self.rows = StepRows(layout, num_rows, device)
        # Hidden row of each slot's last stored position [S, H] (shifting models).
        self.boundary = torch.zeros(layout.num_slots, width, dtype=model.dtype, device=device)
        shape = (layout.num_slots, layout.record_width)
        self.records = torch.zeros(shape, dtype=torch.int32, device=device)
        self._kv = kv
        self._control = torch.zeros(4, dtype=torch.int32, device=device)
        # The last attention's output [T, Q], and the residual [T, H] that goes with it.
        self._mixed = torch.zeros(num_rows, model.q_dim, dtype=model.dtype, device=device)
        self._residual = torch.zeros(num_rows, width, dtype=model.dtype, device=device)

    @torch.inference_mode()
    def run_rows(self, num_rows: int, max_context: int, shares: bool) -> None:
        """Plan, and the forward up to its last attention, for a bucket of rows. shares: whether
        common prefixes of slots are read once."""
        config, size = self.model.config, self.page_size
        mask, shift = config.mask_token_id, config.shift_logits
        step_plan_triton.launch(
            self.table, self._control, self.rows, num_rows, size, mask, shift, shares
        )
        attention = self.rows.attention(
            self.layout, num_rows, page_size=size, max_context=max_context, shares=shares
        )
        self._forward(num_rows, attention)

    @torch.inference_mode()
    def run_candidates(self, num_candidates: int, filters: bool) -> None:
        """Rest of the forward, sampling and advance for a bucket of candidates: fills `records`.
        filters: whether any of them may have a top-p or top-k."""
        candidates = self._candidates(
            num_candidates,
            filters,
            step_plan_triton.launch_gather,
            step_plan_triton.launch_exchange,
        )
        first = self.rows.first_candidate
        step_advance_triton.launch(self.table, self._control, first, candidates, self.records)

    def all_records(self) -> Tensor:
        """The records of this device [S, record_width], of replicas all of theirs [N, S, ...]."""
        replicas = self.model.replicas
        return self.records if replicas is None else replicas.group.collect(self.records)

    def limit_candidates(self, limit: int) -> None:
        """The coming step takes at most `limit` candidates."""
        self._control[Control.MASK_LIMIT].fill_(limit)

    def _forward(self, num_rows: int, attention: AttentionBatch) -> None:
        rows = self.rows
        self.model.forward_unfinished(
            rows.token_ids[:num_rows],
            rows.positions[:num_rows],
            attention,
            self._kv,
            rows.slot_mapping[:num_rows],
            self._mixed[:num_rows],
            self._residual[:num_rows],
        )

    def _candidates(
        self, count: int, filters: bool, gather: Gather, exchange: Exchange
    ) -> Candidates:
        """Of `count` hidden rows [R, H]; for shifting models the boundary vectors are used, and
        those of slots that store are replaced."""
        rows, shift = self.rows, self.model.config.shift_logits
        kept = rows.kept_rows if shift else rows.kept_rows[:0]
        mixed, residual = gather(self._mixed, self._residual, rows.hidden_rows[:count], kept)
        hidden = self.model.finish(mixed, residual)
        if shift:
            exchange(hidden, rows.boundary_slots[:count], kept, self.boundary)
        sampling = rows.sampling.of_rows(slice(count))
        candidates = self.model.candidates(hidden[:count], sampling, filters=filters)
        return candidates if self.adjust is None else self.adjust(candidates, sampling)
