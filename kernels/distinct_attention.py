"""Block-parallel attention over pages of the distinct layout; `attention` is the way in.

CUDA runs the Triton kernel of `distinct_attention_triton`. The CPU takes the cached tokens out of
their pages and goes on as with the unified layout, so both layouts give the same bits there.
"""

from dataclasses import replace

import torch
from torch import Tensor

from effuse.kernels.attention import block_attention
from effuse.kernels.batch import AttentionBatch
from effuse.kernels.distinct_pages import load_tokens, piece_elements


def distinct_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    """`attention.block_attention` where k_cache is [pages, Hkv, D / x, page_size, x] and v_cache
    [pages, Hkv, D, page_size]."""
    _check(k, k_cache, v_cache, batch)
    if q.is_cuda:
        from effuse.kernels import distinct_attention_triton

        out = torch.empty_like(q) if out is None else out
        distinct_attention_triton.launch(
            q, k, v, k_cache, v_cache, batch, scale=scale, out=out, lse=lse
        )
        return out
    plan = batch.gather
    assert plan is not None, "the batch was not built for the CPU"
    # One page that holds all cached tokens in the plan's order.
    cached = load_tokens(k_cache, v_cache, plan.token_pages, plan.token_offsets)
    count = len(plan.token_pages)
    order = torch.arange(count)
    one_page = replace(plan, token_pages=torch.zeros_like(order), token_offsets=order)
    joined = replace(batch, page_size=count, gather=one_page)
    return block_attention(
        q, k, v, cached[0][None], cached[1][None], joined, scale=scale, out=out, lse=lse
    )


def _check(k: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    _, heads, dim = k.shape
    x, page = piece_elements(k_cache.dtype), batch.page_size
    expected = (heads, dim // x, page, x), (heads, dim, page)
    if (k_cache.shape[1:], v_cache.shape[1:]) != expected or len(k_cache) != len(v_cache):
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: expected "
            f"[pages, {heads}, {dim // x}, {page}, {x}] and [pages, {heads}, {dim}, {page}]"
        )
