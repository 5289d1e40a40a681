"""The device's step on the CPU, where no Triton kernel runs: torch operators instead."""

from __future__ import annotations

from dataclasses import replace

import torch
from operators.torch_plan import exchange_boundaries, gather_rows, plan_step
from operators.torch_steps import advance

from effuse.decode_worker.device_step import DeviceStep
from effuse.kernels.attention_batch import (
    AttentionBatch,
    ContextCut,
    cut_batch,
    make_attention_batch,
)


class TorchStep(DeviceStep):
    """A DeviceStep for models on the CPU; on a GPU it is one."""

    @torch.inference_mode()
    def run_rows(self, num_rows: int, max_context: int, shares: bool) -> None:
        if self.model.device.type != "cpu":
            super().run_rows(num_rows, max_context, shares)
            return
        rows, config = self.rows, self.model.config
        mask, shift = config.mask_token_id, config.shift_logits
        plan_step(self.table, self._control, rows, num_rows, self.page_size, mask, shift, shares)
        lengths, contexts = rows.cu_seqlens.diff().tolist(), rows.context_lens.tolist()
        pages, origins = rows.page_table.tolist(), rows.block_origins.tolist()
        if self.model.replicas is not None:  # which all compute as many rows, used or not
            lengths.append(num_rows - sum(lengths))
            contexts.append(0)
            pages.append(pages[0])
            origins.append(0)
        # All page lists have the widest length; entries beyond a sequence are not read.
        attention = make_attention_batch(
            lengths,
            contexts,
            pages,
            origins,
            block_size=self.layout.block_size,
            page_size=self.page_size,
            device=self.model.device,
        )
        if shares:
            attention = replace(attention, shared=self._beginnings())
        if used := sum(lengths):
            self._forward(used, attention)

    def _beginnings(self) -> AttentionBatch:
        rows, contexts = self.rows, self.rows.shared_context_lens
        batch = make_attention_batch(
            rows.shared_cu_seqlens.diff().tolist(),
            contexts.tolist(),
            rows.shared_page_table.tolist(),
            [0] * len(contexts),
            block_size=self.layout.block_size,
            page_size=self.page_size,
            device=self.model.device,
        )
        return cut_batch(batch, ContextCut(0, 1, self.page_size)).cached

    @torch.inference_mode()
    def run_candidates(self, num_candidates: int, filters: bool) -> None:
        if self.model.device.type != "cpu":
            super().run_candidates(num_candidates, filters)
            return
        candidates = self._candidates(num_candidates, filters, gather_rows, exchange_boundaries)
        first = self.rows.first_candidate
        advance(self.table, self._control, first, candidates, self.records)
