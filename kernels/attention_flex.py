"""Attention by torch's FlexAttention over gathered keys: a reference for results and speed.

The unified layout only. Cached tokens are copied out of their pages in front of each sequence's own
rows, and visibility becomes a block mask whose blocks are counted, not evaluated. The flag is
`--attention flex`; `attention` is the operator for serving.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from effuse.kernels.attention_batch import AttentionBatch

MASK_BLOCK = 128
# Uncompiled calls build whole matrices of scores, which are small enough on a CPU. By default they
# still trace each new shape, which takes longer than all else there.
torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Values that a forward's layers share: the sources of rows and keys, and the mask.

    Rows and keys are padded to the longest sequence's. A sequence's keys are its cached tokens,
    then its rows.
    """

    rows: Tensor  # [S, max_rows] int64, packed row; any row for padding
    has_row: Tensor  # [S, max_rows], False for padding
    row_places: Tensor  # [T] int64, place of each packed row in [S * max_rows]
    pages: Tensor  # [S * n] int64, pages of cached tokens, then as many as rows may need
    key_places: Tensor  # [S, max_rows] int64, place of each row's key in [S * n * page_size]
    not_cached: Tensor  # [S, n * page_size], True behind the cached tokens
    mask: BlockMask


class FlexAttention:
    """`attention.block_attention` by FlexAttention; keeps the plan of the batch of its last call.

    The query heads of a KV head are rows of one matrix, as in the Triton kernel.
    """

    def __init__(self) -> None:
        self._last: tuple[AttentionBatch, FlexPlan] | None = None

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
        """Attention output [T, Hq, D]; shapes as in `attention.block_attention`."""
        if k_cache.dim() != 4:
            raise ValueError(
                "FlexAttention reads the unified KV layout, [pages, page_size, Hkv, D]; got K of "
                f"{tuple(k_cache.shape)}"
            )
        if not batch.max_seqlen:
            return torch.empty_like(q)
        groups = q.shape[1] // k.shape[1]
        if self._last is None or self._last[0] is not batch:
            self._last = batch, make_plan(batch, len(q), groups)
        plan = self._last[1]
        keys = gather_keys(k, k_cache, plan)
        # Memory after the cached tokens may hold NaN, and zero times NaN is NaN.
        values = gather_keys(v, v_cache, plan, blank=True)
        out = attend(padded_queries(q, plan, groups), keys, values, plan.mask, scale=scale)
        return packed_rows(out, plan, groups)


def make_plan(batch: AttentionBatch, num_rows: int, groups: int) -> FlexPlan:
    """The plan of ``num_rows`` packed rows with ``groups`` rows of the mask for each; no sync."""
    cu, contexts = batch.cu_seqlens.long(), batch.context_lens.long()
    device, num_seqs, page_size = cu.device, len(contexts), batch.page_size
    lengths = cu.diff()
    row = torch.arange(batch.max_seqlen, device=device)
    rows = (cu[:-1, None] + row).clamp(max=num_rows - 1)
    packed = torch.arange(num_rows, device=device)
    sequence = torch.searchsorted(cu[1:], packed, right=True).clamp(max=num_seqs - 1)
    offset = (packed - cu[sequence]).clamp(max=batch.max_seqlen - 1)
    # Rows come after the cached tokens, so add as many pages as rows may need.
    cached, own = (-(-count // page_size) for count in (batch.max_context, batch.max_seqlen))
    pages = functional.pad(batch.page_table[:, :cached].long(), (0, own))
    room = pages.shape[1] * page_size
    first = torch.arange(num_seqs, device=device)[:, None] * room
    return FlexPlan(
        rows=rows,
        has_row=row < lengths[:, None],
        row_places=sequence * batch.max_seqlen + offset,
        pages=pages.flatten(),
        key_places=first + contexts[:, None] + row,
        not_cached=torch.arange(room, device=device) >= contexts[:, None],
        mask=_block_mask(batch, lengths, contexts, room, groups),
    )


def gather_keys(rows: Tensor, cache: Tensor, plan: FlexPlan, *, blank: bool = False) -> Tensor:
    """K or V [S, keys, Hkv, D] of all sequences: cached tokens, then rows. All other places are
    zero if ``blank``, otherwise undefined."""
    keys = cache.index_select(0, plan.pages).view(*plan.not_cached.shape, *rows.shape[1:])
    if blank:
        keys.masked_fill_(plan.not_cached[..., None, None], 0.0)
    own = rows.index_select(0, plan.rows.flatten())
    if blank:
        own.masked_fill_(~plan.has_row.flatten()[:, None, None], 0.0)
    keys.flatten(0, 1).index_copy_(0, plan.key_places.flatten(), own)
    return keys


def padded_queries(q: Tensor, plan: FlexPlan, groups: int) -> Tensor:
    """[S, heads / groups, max_rows * groups, D] of packed q [T, heads, D]."""
    padded = q.index_select(0, plan.rows.flatten())
    num_seqs, max_rows = plan.rows.shape
    heads, dim = q.shape[1:]
    by_head = padded.view(num_seqs, max_rows, heads // groups, groups, dim).transpose(1, 2)
    return by_head.reshape(num_seqs, heads // groups, max_rows * groups, dim)


def packed_rows(out: Tensor, plan: FlexPlan, groups: int) -> Tensor:
    """[T, heads, D] of the output for `padded_queries`."""
    num_seqs, heads, rows, dim = out.shape
    by_row = out.view(num_seqs, heads, rows // groups, groups, dim).transpose(1, 2)
    return by_row.reshape(-1, heads * groups, dim).index_select(0, plan.row_places)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, *, scale: float) -> Tensor:
    """FlexAttention of q [S, H, rows, D] over k and v [S, keys, Hkv, D]; compiled on CUDA."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    gqa = q.shape[1] != keys.shape[1]
    attention: Callable[..., object] = flex_attention
    if q.is_cuda:
        attention = _compiled()
    out = attention(q, keys, values, block_mask=mask, scale=scale, enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Callable[..., object]:
    """One compilation for all lengths, at the first call on CUDA."""
    compiled: Callable[..., object] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _block_mask(
    batch: AttentionBatch, lengths: Tensor, contexts: Tensor, num_keys: int, groups: int
) -> BlockMask:
    """Keys of a row end where its block ends, so blocks of the mask are full, then partial."""
    origins, block_size = batch.block_origins.long(), batch.block_size

    def keys_end(sequence: Tensor, row: Tensor) -> Tensor:
        context, origin = contexts[sequence], origins[sequence]
        distance = context + row - origin
        block_end = origin + (distance // block_size + 1) * block_size
        end = torch.where(distance < 0, origin, block_end)
        return torch.minimum(end, context + lengths[sequence])

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < keys_end(sequence, query // groups)

    num_rows = batch.max_seqlen * groups
    blocks = torch.arange(-(-num_rows // MASK_BLOCK), device=contexts.device)
    sequences = torch.arange(len(contexts), device=contexts.device)[:, None]
    first = (blocks * MASK_BLOCK // groups)[None, :]
    last = ((blocks * MASK_BLOCK + MASK_BLOCK - 1) // groups)[None, :]
    last = torch.minimum(last, lengths[:, None] - 1).clamp(min=0)
    has_rows = first < lengths[:, None]
    full = torch.where(has_rows, keys_end(sequences, first) // MASK_BLOCK, 0)
    partial = torch.where(has_rows, -(-keys_end(sequences, last) // MASK_BLOCK), 0) - full
    order = torch.arange(-(-num_keys // MASK_BLOCK), device=contexts.device)
    all_blocks = order.expand(*full.shape, -1)
    return BlockMask.from_kv_blocks(
        partial.int()[:, None],
        ((full[..., None] + order).clamp(max=len(order) - 1)).int()[:, None],
        full.int()[:, None],
        all_blocks.int()[:, None],
        BLOCK_SIZE=(MASK_BLOCK, MASK_BLOCK),
        mask_mod=sees,
        seq_lengths=(num_rows, num_keys),
    )
