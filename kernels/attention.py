"""Block-parallel attention: packed in-flight rows attend to paged, cached tokens and to each other.

One launcher for prefill chunks and denoising blocks of many sequences: a CPU runs torch operators,
and CUDA runs the kernels behind `attention_triton`. On the CPU both KV layouts give the same bits.
`pages` stores K and V.

If ranks hold different tokens of a sequence, each computes partial results over its own, with the
log-sum-exp of their scores, and `merge_partials` joins them (Milakov and Gimelshein, 2018). If
sequences have a beginning in common, all their rows read it together (cascade attention; Ye and
others, 2024), and its results are merged with those of the rest in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from effuse.kernels.attention_batch import AttentionBatch, GatherPlan
from effuse.kernels.pages import is_distinct, load_tokens, piece_elements

_LOG2_E = 1.4426950408889634


class Attend(Protocol):
    """Attention over packed rows, as in `block_attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
    ) -> Tensor:
        """[T, Hq, D]"""
        ...


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
    batch_invariant: bool = False,
) -> Tensor:
    """Attention output [T, Hq, D] of all packed rows, in the dtype of ``q``.

    q is [T, Hq, D], k and v are [T, Hkv, D] with Hq a multiple of Hkv; k_cache and v_cache are one
    layer's logical views [pages, page_size, Hkv, D] of any strides, or views of the distinct layout
    (`pages`). Cached slots that no page table reaches are never read. On the CPU the rows of one
    diffusion block are computed separately, over the keys they see. So a row's result is bitwise
    the same, whatever other sequences or later blocks of its own sequence share the forward, unless
    a shared beginning is apart. With `batch_invariant` that holds on a GPU too, because keys are
    only split at fixed positions.
    """
    assert batch.shared is None or not batch_invariant, "keys are only split at fixed positions"
    _check(q, k, v, k_cache, v_cache, batch)
    if out is None:
        out = torch.empty_like(q)
    if q.is_cuda:
        from effuse.kernels import attention_triton

        attention_triton.launch(
            q, k, v, k_cache, v_cache, batch,
            scale=scale, out=out, batch_invariant=batch_invariant,
        )  # fmt: skip
        return out
    if batch.shared is not None:
        return out.copy_(_cascade(q, k, v, k_cache, v_cache, batch, batch.shared, scale))
    results: list[Tensor] = []
    for query, key, value in _segments(q, k, v, *_gathered(k_cache, v_cache, batch)):
        result = functional.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=True
        )
        results.append(result[0].transpose(0, 1))
    return torch.cat(results, out=out) if results else out


@dataclass(frozen=True, slots=True)
class Partials:
    """Attention over some of the keys, by head, in one tensor that ranks can exchange."""

    packed: Tensor  # [heads, width] in the model's dtype; each head's `out`, then its `lse`
    out: Tensor  # [T, heads, D] view, normalised over these keys; zeros if there are none
    lse: Tensor  # [T, heads] fp32 view: base-2 log-sum-exp of the scores; -inf if there are none


def empty_partials(num_rows: int, num_heads: int, head_dim: int, like: Tensor) -> Partials:
    """Partials that are to be filled, with the dtype and device of ``like``."""
    width = num_rows * (head_dim + 4 // like.itemsize)
    # Kernels need heads at multiples of 16 elements; without rows, torch needs one to view as fp32.
    packed = like.new_empty(num_heads, max(1, -(-width // 16)) * 16)
    return view_partials(packed, num_rows, head_dim)


def view_partials(packed: Tensor, num_rows: int, head_dim: int) -> Partials:
    """The partials in a tensor [heads, width] of `empty_partials`, or in several side by side."""
    ends = num_rows * head_dim, num_rows * (head_dim + 4 // packed.itemsize)
    out = packed[:, : ends[0]].view(len(packed), num_rows, head_dim).transpose(0, 1)
    lse = packed[:, ends[0] : ends[1]].view(torch.float32).transpose(0, 1)
    return Partials(packed, out, lse)


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    into: Partials,
    cached_only: bool = False,
) -> None:
    """Fills `into` with `block_attention` of all packed rows over the keys of the batch.

    With `cached_only` rows see the cached tokens of their sequence, none of the in-flight rows, and
    perhaps no key. Rows of no sequence are undefined.
    """
    _check(q, k, v, k_cache, v_cache, batch)
    if q.is_cuda:
        from effuse.kernels import attention_triton

        attention_triton.launch(
            q, k, v, k_cache, v_cache, batch,
            scale=scale, out=into.out, lse=into.lse, cached_only=cached_only,
        )  # fmt: skip
        return
    k_cache, v_cache, plan = _gathered(k_cache, v_cache, batch)
    if cached_only:
        k, v, plan = k[:0], v[:0], replace(plan, seq_lens=[0] * len(plan.seq_lens))
    segments = _segments(q, k, v, k_cache, v_cache, plan)
    for (query, key, value), out, lse in zip(
        segments,
        torch.split(into.out, plan.segment_lens),
        torch.split(into.lse, plan.segment_lens),
        strict=True,
    ):
        heads, rows, dim = query.shape[1:]
        grouped = query.reshape(len(key[0]), -1, dim)
        scores = grouped @ key[0].transpose(1, 2) * scale
        logs = scores.logsumexp(-1, keepdim=True)
        weights = (scores - logs).exp() if key.shape[2] else scores
        out.copy_((weights @ value[0]).view(heads, rows, dim).transpose(0, 1))
        lse.copy_(logs.view(heads, rows).T * _LOG2_E)


def _cascade(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    shared: AttentionBatch,
    scale: float,
) -> Tensor:
    """The attention [T, Hq, D] over shared beginnings and over the rest, merged."""
    rows, heads, dim = q.shape
    found, own = (empty_partials(rows, heads, dim, q) for _ in range(2))
    inputs = q, k, v, k_cache, v_cache
    partial_attention(*inputs, shared, scale=scale, into=found, cached_only=True)
    partial_attention(*inputs, batch, scale=scale, into=own)
    return merge_partials(found, own)


def merge_partials(dealt: Partials, own: Partials) -> Tensor:
    """The attention [T, heads, D] over the keys of all partials, in a fixed order of operations.

    dealt: N partials, one after the other, of `own`'s heads. Every row has a key in `own`.
    """
    rows, heads, dim = own.out.shape
    if own.out.is_cuda:
        from effuse.kernels import attention_ranks_triton

        return attention_ranks_triton.launch_merge(dealt.out, dealt.lse, own.out, own.lse)
    parts = dealt.out.shape[1] // heads
    outs = torch.cat([dealt.out.reshape(rows, parts, heads, dim), own.out[:, None]], dim=1)
    logs = torch.cat([dealt.lse.reshape(rows, parts, heads), own.lse[:, None]], dim=1)
    weights = torch.exp2(logs - logs.amax(1, keepdim=True))
    total = torch.zeros_like(weights[:, 0])
    result = torch.zeros_like(outs[:, 0], dtype=torch.float32)
    for out, weight in zip(outs.unbind(1), weights.unbind(1), strict=True):
        total += weight
        result += out * weight[..., None]
    return (result / total[..., None]).to(own.out.dtype)


def _gathered(
    k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch
) -> tuple[Tensor, Tensor, GatherPlan]:
    """Unified views and their plan: of distinct pages one that holds all cached tokens in order."""
    plan = batch.gather
    assert plan is not None, "the batch was not built for the CPU"
    if not is_distinct(k_cache):
        return k_cache, v_cache, plan
    keys, values = load_tokens(k_cache, v_cache, plan.token_pages, plan.token_offsets)
    order = torch.arange(len(plan.token_pages))
    one_page = replace(plan, token_pages=torch.zeros_like(order), token_offsets=order)
    return keys[None], values[None], one_page


def _segments(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: GatherPlan
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(queries [1, Hq, rows, D], keys and values [1, Hkv, seen, D]) of each segment."""
    index = _row_index(k_cache, plan)
    keys = _keys_by_sequence(k_cache, k, index, plan)
    if v_cache.stride() != k_cache.stride():
        index = _row_index(v_cache, plan)
    values = _keys_by_sequence(v_cache, v, index, plan)
    queries = iter(torch.split(q.transpose(0, 1)[None], plan.segment_lens, dim=2))
    for key, value, segment_keys in zip(keys, values, plan.segment_keys, strict=True):
        for count in segment_keys:
            yield next(queries), key.narrow(2, 0, count), value.narrow(2, 0, count)


def _keys_by_sequence(
    cache: Tensor, in_flight: Tensor, index: Tensor | None, plan: GatherPlan
) -> tuple[Tensor, ...]:
    """Each sequence's cached tokens, then its rows: [1, Hkv, context + rows, D]."""
    if index is None:
        cached = cache[plan.token_pages, plan.token_offsets].transpose(0, 1)
    else:
        cached = _as_rows(cache).index_select(0, index).view(cache.shape[2], -1, cache.shape[3])
    pieces = zip(
        torch.split(cached, plan.context_lens, dim=1),
        torch.split(in_flight.transpose(0, 1), plan.seq_lens, dim=1),
        strict=True,
    )
    joined = torch.cat([piece for pair in pieces for piece in pair], dim=1)
    return torch.split(joined[None], plan.key_lens, dim=2)


def _row_index(cache: Tensor, plan: GatherPlan) -> Tensor | None:
    """Indices of the planned tokens in `_as_rows`, head by head; None if the strides do not allow
    it.

    One index_select of whole rows is several times faster than indexing by page and offset.
    """
    _, _, heads, dim = cache.shape
    page_stride, token_stride, head_stride, unit = cache.stride()
    if unit != 1 or page_stride % dim or token_stride % dim or head_stride % dim:
        return None
    index = plan.token_pages * (page_stride // dim) + plan.token_offsets * (token_stride // dim)
    head_rows = torch.arange(heads) * (head_stride // dim)
    return (head_rows[:, None] + index).view(-1)


def _as_rows(cache: Tensor) -> Tensor:
    """The memory of a cache view as rows of head_dim elements."""
    dim = cache.shape[3]
    span = sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)) + 1
    return cache.as_strided((span // dim, dim), (dim, 1))


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
    expected: tuple[tuple[int, ...], tuple[int, ...]]
    if is_distinct(k_cache):
        x = piece_elements(k_cache.dtype)
        expected = (kv_heads, dim // x, batch.page_size, x), (kv_heads, dim, batch.page_size)
    else:
        expected = (batch.page_size, kv_heads, dim), (batch.page_size, kv_heads, dim)
    if (k_cache.shape[1:], v_cache.shape[1:]) != expected or len(k_cache) != len(v_cache):
        wanted = " and ".join(f"[pages, {', '.join(map(str, shape))}]" for shape in expected)
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: expected {wanted}"
        )
