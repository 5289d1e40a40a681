"""Prompts on padded rows as a CUDA graph runs them, in Triton's interpreter, compared with the
usual way.

A program of its own: `TRITON_INTERPRET=1 python -m operators.prompt_rows ARCHITECTURE`. Prints one
line for each forward: the largest difference, and whether only the prompts' slots were written.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from checkpoints import TinySizes, architecture_of, write_tiny_checkpoint
from decoding.engines import layout_of, load_tiny
from padded_prompts import PaddedPrompts
from torch import Tensor

from effuse.kernels import attention_triton
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kvtransfer.layout import PageMemory
from effuse.models.prompt_graphs import PromptGraphs
from effuse.models.runner import ModelRunner, Part
from effuse.models.transformer import Transformer
from operators.interpreter import use_interpreter

SIZES = TinySizes(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
PAGE, BLOCK, NUM_PAGES, NOTHING = 8, 4, 12, -7.0
LENGTHS = ((7,), (20, 3, 29), (64,))


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch,
    *, scale: float,
) -> Tensor:  # fmt: skip
    if batch.gather is not None:  # the usual way
        return block_attention(q, k, v, k_cache, v_cache, batch, scale=scale)
    out = torch.full_like(q, torch.nan)
    attention_triton.launch(q, k, v, k_cache, v_cache, batch, scale=scale, out=out)
    return out


def first_block(part: Part) -> Part:
    ids = part.token_ids[:BLOCK]
    return replace(part, token_ids=ids, num_stored=BLOCK, keep_boundary=False)


def behind_it(part: Part) -> Part:
    """Prompts that begin with a cached block."""
    ids = part.token_ids[BLOCK:]
    return replace(part, token_ids=ids, start=BLOCK, num_stored=len(ids))


def run(
    model: Transformer, lengths: tuple[int, ...], *, padded: bool
) -> tuple[Tensor, list[Tensor]]:
    """All K and V, and the boundaries."""
    config = model.config
    pool = PageMemory(layout_of(model, PAGE), NUM_PAGES)
    memory, kv = pool.tensor.fill_(NOTHING), pool.layer_views()
    graphs = None
    if padded:
        graphs = PaddedPrompts(
            model, kv, page_size=PAGE, block_size=BLOCK, max_context=NUM_PAGES * PAGE
        )
    runner = ModelRunner(model, kv, page_size=PAGE, block_size=BLOCK, graphs=graphs)
    free = [5, 2, 9, 0, 11, 7, 1, 3, 10, 8, 6, 4]
    parts = [
        Part(
            token_ids=[3 + (7 * index + 5 * i) % 200 for i in range(length)],
            start=0,
            pages=[free.pop() for _ in range(-(-length // PAGE))],
            num_stored=length,
            block_origin=config.block_origin(length),
            keep_boundary=True,
        )
        for index, length in enumerate(lengths)
    ]
    if config.prompt_attention == "causal_blocks":
        runner.run([first_block(part) for part in parts if len(part.token_ids) > BLOCK])
        parts = [behind_it(part) if len(part.token_ids) > BLOCK else part for part in parts]
    results = runner.run(parts)
    return memory, [result.boundary for result in results if result.boundary is not None]


def main() -> None:
    use_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(
            Path(folder) / "model",
            architecture_of(sys.argv[1]),
            seed=3,
            sizes=SIZES,
            block_size=BLOCK,
        )
        model = load_tiny(path)
    for lengths in LENGTHS:
        expected, boundaries = run(model, lengths, padded=False)
        with (
            patch.object(model, "_attention", attention),
            patch.object(PaddedPrompts, "_attention", PromptGraphs._attention),
        ):
            memory, kept = run(model, lengths, padded=True)
        pairs = [(memory, expected), *zip(kept, boundaries, strict=True)]
        farthest = max(float((one - other).abs().max()) for one, other in pairs)
        untouched = torch.equal(memory == NOTHING, expected == NOTHING)
        print(json.dumps({"farthest": farthest, "untouched": untouched}))


if __name__ == "__main__":
    main()
