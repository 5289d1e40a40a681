"""A transformer over paged memory whose page ids are scattered and whose free slots hold NaN."""

from __future__ import annotations

from pathlib import Path

import torch
from padded_prompts import PaddedPrompts
from torch import Tensor

from effuse.kernels.attention import Attend, block_attention
from effuse.kernels.attention_batch import make_attention_batch
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.models.group import RankPlace
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model

NUM_PAGES = 64


class PagedModel:
    """One checkpoint with its own pool memory, in fp32 on the CPU."""

    def __init__(
        self,
        path: Path,
        *,
        page_size: int,
        block_size: int,
        attend: Attend = block_attention,
        adapter: Path | None = None,
        place: RankPlace | None = None,
    ) -> None:
        self.model: Transformer = load_model(
            path, block_size=block_size, attend=attend, adapter=adapter, place=place or RankPlace()
        )
        config, context = self.model.config, place and place.context
        num_heads = len(self.model.shard.kv_heads)
        sizes = len(self.model.shard.layers), num_heads, config.head_dim, page_size
        memory = PageMemory(KVLayout("unified", *sizes, "float32"), NUM_PAGES)
        # Tables have pages of all ranks together.
        self.page_size = page_size * (context.cut.degree if context else 1)
        self.block_size = block_size
        self.memory = memory.tensor.fill_(float("nan"))
        self.kv = memory.layer_views()
        self._free = torch.randperm(
            NUM_PAGES, generator=torch.Generator().manual_seed(page_size)
        ).tolist()

    def runner(self, *, padded: bool = False) -> ModelRunner:
        """A runner over this memory; with `padded`, on rows as graphs have them."""
        graphs = None
        if padded:
            graphs = PaddedPrompts(
                self.model,
                self.kv,
                page_size=self.page_size,
                block_size=self.block_size,
                max_context=NUM_PAGES * self.page_size,
            )
        return ModelRunner(
            self.model,
            self.kv,
            page_size=self.page_size,
            block_size=self.block_size,
            graphs=graphs,
        )

    def pages(self, num_tokens: int) -> list[int]:
        """Page ids without another owner, enough for `num_tokens`."""
        return [self._free.pop() for _ in range(-(-num_tokens // self.page_size))]

    def give_back(self, pages: list[int]) -> None:
        """Pages that the next caller may have."""
        self._free += pages

    @torch.inference_mode()
    def forward(
        self,
        token_ids: list[int],
        start: int,
        pages: list[int],
        num_stored: int,
        origin: int,
        last_rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows of one sequence's rows at positions from `start`."""
        positions = torch.arange(start, start + len(token_ids))
        slots = (
            torch.tensor(pages)[
                positions.clamp(max=len(pages) * self.page_size - 1) // self.page_size
            ]
            * self.page_size
            + positions % self.page_size
        )
        slots[num_stored:] = -1
        attention = make_attention_batch(
            [len(token_ids)],
            [start],
            [pages],
            [origin],
            block_size=self.block_size,
            page_size=self.page_size,
            device=torch.device("cpu"),
        )
        return self.model.forward(
            torch.tensor(token_ids), positions, attention, self.kv, slots, last_rows=last_rows
        )

    def stored(self, layer: int, pages: list[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V [num_tokens, Hkv, D] as they lie in the pages."""
        k, v = (view[torch.tensor(pages)].flatten(0, 1)[:num_tokens] for view in self.kv[layer])
        return k, v
