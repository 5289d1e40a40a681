"""Attention of ranks that hold different tokens of every sequence (decode context parallel).

Each rank computes queries, K and V of all heads of its group. It computes the attention of all
these heads over its own cached tokens, without a mask, and that of its own heads over the rows in
flight. Partial results then change hands: each rank gets its heads' results of all ranks.
"""

from torch import Tensor

from effuse.kernels.attention import (
    empty_partials,
    merge_partials,
    partial_attention,
    view_partials,
)
from effuse.kernels.attention_batch import AttentionBatch, CutBatch, cut_batch
from effuse.kernels.pages import of_heads
from effuse.models.group import ContextGroup
from effuse.models.tensors import ModelShard


class ContextAttention:
    """One rank's side of it, an `Attend`; all ranks of the group call it together."""

    def __init__(self, context: ContextGroup, shard: ModelShard) -> None:
        self._cut = context.cut
        self.group = context.group
        own, all_heads, held = shard.heads, shard.queries, len(shard.kv_heads)
        first = own.start - all_heads.start
        self._own = slice(first, first + len(own))
        first_kv = first * held // len(all_heads)
        self._own_kv = slice(first_kv, first_kv + max(1, len(own) * held // len(all_heads)))
        self._last: tuple[AttentionBatch, CutBatch] | None = None

    def begin(self, batch: AttentionBatch, slot_mapping: Tensor) -> Tensor:
        """Begins a forward over a batch of all ranks; the slots [T] int64 of this one.

        Not in the first layer, because kernels read lengths before the kernel before them has ended
        (`early_start`).
        """
        self._last = batch, cut_batch(batch, self._cut)
        return self._cut.slots(slot_mapping)

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
        """The output [T, heads of this rank, D] of all packed rows.

        q is [T, heads of the group, D], k and v are [T, its KV heads, D]; the caches are one
        layer's views of this rank's memory, with all of these KV heads.
        """
        assert self._last is not None and self._last[0] is batch, "the forward has begun"
        parts, (rows, heads, dim) = self._last[1], q.shape
        own_q, own_kv = q[:, self._own], self._own_kv
        own = empty_partials(rows, own_q.shape[1], dim, q)
        keys, values = k[:, own_kv], v[:, own_kv]
        caches = of_heads(k_cache, v_cache, own_kv)
        partial_attention(own_q, keys, values, *caches, parts.in_flight, scale=scale, into=own)
        if not parts.cached.max_context:  # on no rank
            return own.out.contiguous()
        found = empty_partials(rows, heads, dim, q)
        partial_attention(
            q, k, v, k_cache, v_cache, parts.cached, scale=scale, into=found, cached_only=True
        )
        packed = found.packed.view(self._cut.degree, -1)
        dealt = self.group.deal(packed).view(found.packed.shape)
        return merge_partials(view_partials(dealt, rows, dim), own)
