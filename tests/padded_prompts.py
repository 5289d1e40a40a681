"""Forwards over short prompts on the padded rows of their graphs, but launched call by call."""

from __future__ import annotations

from collections.abc import Callable

from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.models.prompt_graphs import (
    MOST_SEQUENCES,
    Captured,
    Outputs,
    PromptGraphs,
    _Bucket,
)


class PaddedPrompts(PromptGraphs):
    """The same without a GPU, where padding must be a separate sequence."""

    def _capture(self, run: Callable[[], Outputs]) -> Captured:
        outputs = run()

        def replay() -> None:
            for output, found in zip(outputs, run(), strict=True):
                output.copy_(found)

        return replay, outputs

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
