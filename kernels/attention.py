"""Block-parallel attention: packed in-flight rows over paged, cached tokens and over each other.

One launcher for prefill chunks and denoising blocks of many sequences; CPU runs torch operators,
CUDA runs the Triton kernel of `attention_kernel`. Storing K and V is `kv_pages`, not here.
"""

import torch
from torch import Tensor
from torch.nn import functional

from effuse.kernels.batch import AttentionBatch, GatherPlan


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention output [T, Hq, D] of all packed rows, in the dtype of ``q``.

    q is [T, Hq, D], k and v are [T, Hkv, D] with Hq a multiple of Hkv; k_cache and v_cache are one
    layer's logical views [pages, page_size, Hkv, D] of any strides. Cached slots that no page table
    reaches are never read. On the CPU the rows of one diffusion block are computed by themselves
    over the keys they see, so a row's result is bitwise the same whatever other sequences, and
    whatever later blocks of its own sequence, share the forward.
    """
    _check(q, k, v, k_cache, v_cache, batch)
    if out is None:
        out = torch.empty_like(q)
    assert batch.gather is not None, "the batch was not built for the CPU"
    _attention_torch(q, k, v, k_cache, v_cache, batch.gather, scale, out)
    return out


def block_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    mask: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Plain reference for one sequence under an explicit mask, in the dtype of its inputs.

    q [T, Hq, D]; k, v [T, Hkv, D]; k_context, v_context [C, Hkv, D]; mask [T, C + T] bool, True
    where the row sees the key. Every row must see a key.
    """
    groups = q.shape[1] // k.shape[1]
    keys = torch.cat([k_context, k]).repeat_interleave(groups, dim=1)
    values = torch.cat([v_context, v]).repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values)


def visibility_mask(length: int, context: int, block_origin: int, block_size: int) -> Tensor:
    """The mask [length, context + length] that `AttentionBatch` describes in words."""
    position = torch.arange(context, context + length)
    block = ((position - block_origin) // block_size).clamp(min=-1)
    in_flight = block[:, None] >= block[None, :]
    return torch.cat([torch.ones(length, context, dtype=torch.bool), in_flight], dim=1)


def _attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: GatherPlan,
    scale: float,
    out: Tensor,
) -> None:
    cached_k = _gather_cached(k_cache, plan)
    cached_v = _gather_cached(v_cache, plan)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    for sequence in plan.sequences:
        rows = slice(sequence.row_begin, sequence.row_end)
        cached = slice(sequence.cached_begin, sequence.cached_end)
        keys = torch.cat([cached_k[:, cached], k[:, rows]], dim=1)[None]
        values = torch.cat([cached_v[:, cached], v[:, rows]], dim=1)[None]
        for part in sequence.segments:
            result = functional.scaled_dot_product_attention(
                q[part.row_begin : part.row_end].transpose(0, 1)[None],
                keys[:, :, : part.num_keys],
                values[:, :, : part.num_keys],
                scale=scale,
                enable_gqa=True,
            )
            out[part.row_begin : part.row_end] = result[0].transpose(0, 1)


def _gather_cached(cache: Tensor, plan: GatherPlan) -> Tensor:
    """Cached tokens of all sequences in plan order, [Hkv, sum(context_lens), D]."""
    _, _, heads, dim = cache.shape
    page_stride, token_stride, head_stride, unit = cache.stride()
    rows_aligned = all(x % dim == 0 for x in (page_stride, token_stride, head_stride))
    if unit != 1 or not rows_aligned:
        return cache[plan.token_pages, plan.token_offsets].transpose(0, 1).contiguous()
    # The memory seen as rows of D elements, so that one index_select copies whole rows.
    span = sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)) + 1
    rows = cache.as_strided((span // dim, dim), (dim, 1))
    index = plan.token_pages * (page_stride // dim) + plan.token_offsets * (token_stride // dim)
    head_rows = torch.arange(heads) * (head_stride // dim)
    flat = (head_rows[:, None] + index[None, :]).view(-1)
    return rows.index_select(0, flat).view(heads, -1, dim)


def _check(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
) -> None:
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or q_heads % kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not agree: "
            "expected [T, Hq, D], [T, Hkv, D], [T, Hkv, D] with Hq a multiple of Hkv"
        )
    expected = (batch.page_size, kv_heads, dim)
    if k_cache.shape[1:] != expected or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: expected "
            f"[pages, {batch.page_size}, {kv_heads}, {dim}]"
        )
