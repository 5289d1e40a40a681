"""Forwards over short prompts on the padded rows of their graphs, but launched call by call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.models.prompt_graphs import MOST_SEQUENCES, PromptGraphs, _Bucket


class _Launches:
    """The launches that a graph would replay."""

    def __init__(self, graphs: PaddedPrompts, bucket: _Bucket) -> None:
        self._graphs = graphs
        self._bucket = bucket
        self.hidden: Tensor = graphs._forward(bucket)

    def replay(self) -> None:
        self.hidden.copy_(self._graphs._forward(self._bucket))


class PaddedPrompts(PromptGraphs):
    """The same without a GPU, where padding must be a separate sequence."""

    def _capture(self, bucket: _Bucket) -> Any:
        self._inputs.clear()
        launches = _Launches(self, bucket)
        return launches, launches.hidden

    def _attention(self, bucket: _Bucket) -> AttentionBatch:
        inputs = self._inputs
        lengths = inputs.cu_seqlens.diff().tolist()
        lengths.append(bucket.rows - sum(lengths))
        contexts = inputs.context_lens.tolist() if bucket.max_context else [0] * MOST_SEQUENCES
        return make_attention_batch(
            lengths,
            [*contexts, 0],
            [*inputs.page_table.tolist(), ()],
            [*inputs.block_origins.tolist(), bucket.rows],
            block_size=self._block_size,
            page_size=self._page_size,
            device=self._model.device,
        )
