"""The one transformer behind all families: pre-norm, grouped queries, rotary, SwiGLU or experts.

A forward over packed rows of many sequences with paged K and V; families only differ in their
optional tensors. `weights.py` loads them; `runner.py` has batching, sampling and the logits shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from effuse.kernels.attention import Attend, block_attention
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.experts import Routes, expert_mlp, own_routes, route, router_logits
from effuse.kernels.rowwise import (
    halves,
    linear,
    lookup,
    make_cos_sin_cache,
    rms_norm,
    rotary_store_kv,
    swiglu,
    total_of,
)
from effuse.kernels.sampling import of_shares, sample_confidence, share_record
from effuse.kernels.values import Candidates, RowSampling, WeightedParts
from effuse.models.config import ModelConfig
from effuse.models.context import ContextAttention
from effuse.models.context_prompts import prompt_attention
from effuse.models.group import ALONE, ContextGroup, Group, PipelineStage, Replicas, RowCounts
from effuse.models.shares import draw_shares
from effuse.models.tensors import ModelShard, whole

# For up to this many rows, a GPU computes the MLP's last product in two halves of its sum; with
# `batch_invariant` for any number.
_MOST_ROWS_HALVED = 256

LayerKV = tuple[Tensor, Tensor]
Stored = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Q = num_heads * head_dim, K = num_kv_heads * head_dim, H hidden, I inner.

    With a router the layer has experts instead of an MLP: E routed ones, then shared ones, S in
    total.
    """

    attn_norm: Tensor  # [H]
    qkv: Tensor  # [Q + 2K, H]
    qkv_bias: Tensor | None  # [Q + 2K]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    attn_out: Tensor  # [H, Q]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H], the gate first; of experts [E + S, 2I, H]
    down: Tensor  # [H, I]; of experts [E + S, H, I]
    router: Tensor | None = None  # [E, H]
    router_bias: Tensor | None = None  # [E] fp32


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors, on one device and in one dtype, except biases of routers. A tied head is the
    embedding itself. What another stage of a pipeline has is empty here, [0, H].
    """

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    head: Tensor  # [V, H]


class Transformer:
    """Weights with a forward; there is no state between calls.

    In a group of ranks it is this rank's `shard`: hidden rows are those of the whole model on every
    rank, heads and K and V its own. One of several `replicas` has rows of its own, and each of its
    forwards takes all of them. Ranks of a `context` hold different tokens of every sequence, and a
    `stage` of a pipeline some of the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attend: Attend = block_attention,
        shard: ModelShard | None = None,
        group: Group = ALONE,
        replicas: Replicas | None = None,
        *,
        batch_invariant: bool = False,
        context: ContextGroup | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        """With `batch_invariant` a row's bits do not depend on other rows on a GPU either, and
        attention is `block_attention`, whatever `attend` is. The same holds with a `context`, whose
        rows round by which of their keys are cached."""
        self.config = config
        self.shard = whole(config) if shard is None else shard
        self.group = group
        self.replicas = replicas
        self.stage = stage
        self.has_head = stage is None or stage.is_last
        self.weights = weights
        self.batch_invariant = batch_invariant
        self._linear = partial(linear, batch_invariant=batch_invariant)
        self.prompts = prompt_attention(context, config)
        self.context: ContextAttention | None = None
        if context is not None and self.prompts is None:
            self.context = ContextAttention(context, self.shard)
        if batch_invariant:
            attend = partial(block_attention, batch_invariant=True)
        self._attention = self.context or self.prompts or attend
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        is_exact = attend is block_attention and self.device.type == "cpu"
        # Whether stored K and V do not depend on other rows, apart from a context's merges.
        self.stores_alike = batch_invariant or (is_exact and self.dtype == torch.float32)
        self.is_deterministic = self.stores_alike and context is None
        # Whether rows of several sequences may read the pages of a common beginning together.
        self.can_share = attend is block_attention and not batch_invariant and context is None
        self._scale = 1 / math.sqrt(config.head_dim)
        self.q_dim = len(self.shard.heads) * config.head_dim
        self._queries_dim = len(self.shard.queries) * config.head_dim
        self._kv_dim = len(self.shard.kv_heads) * config.head_dim
        num_positions, rotated = config.rotary_shape
        self._cos_sin = make_cos_sin_cache(rotated, num_positions, config.rope_theta, self.device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBatch,
        kv: Sequence[LayerKV],
        slot_mapping: Tensor,
        *,
        last_rows: Tensor | None,
        stored: Stored | None = None,
        counts: RowCounts | None = None,
    ) -> Tensor:
        """Hidden rows after the final norm, in the model's dtype.

        token_ids, positions and slot_mapping are [T] int64; kv holds each layer's two views [pages,
        page_size, Hkv, D]; the K and V of rows whose slot is not -1 are stored there. `last_rows`
        [R] int64 selects the result [R, H], and the last layer only computes these rows (without
        any, only its K and V). None means all: [T, H]. `stored` is called with each layer's number
        here once its K and V are stored or queued. `counts` are the rows of all replicas, by
        default as many as here. A stage before the last one passes its rows on, and returns none.
        """
        of_all = None if counts is None else counts.rows
        rows = _Rows(positions, attention, self._begin(attention, slot_mapping), of_all)
        wanted = None if counts is None else counts.wanted
        normed, residual = self._but_last(token_ids, kv, rows, stored or _ignore)
        layer, number = self.weights.layers[-1], len(self.weights.layers) - 1
        if self.has_head and last_rows is not None and len(last_rows) == 0:
            self._store_only(layer, normed, kv[-1], rows)
            (stored or _ignore)(number)
            self._experts_only(layer, wanted or ())
            return normed[:0]
        mixed = self._attend(layer, normed, kv[-1], rows)
        (stored or _ignore)(number)
        if not self.has_head:
            return self.pass_on(mixed, residual)
        if last_rows is not None:
            mixed, residual = mixed[last_rows], residual[last_rows]
        return self.finish(mixed, residual, wanted)

    def experts_only(self, counts: RowCounts) -> None:
        """A replica's share of a forward in which it has no rows."""
        *layers, last = self.weights.layers
        for layer in layers:
            self._experts_only(layer, counts.rows)
        self._experts_only(last, counts.wanted)

    def forward_unfinished(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBatch,
        kv: Sequence[LayerKV],
        slot_mapping: Tensor,
        mixed: Tensor,
        residual: Tensor,
        *,
        stored: Stored | None = None,
        received: Tensor | None = None,
    ) -> None:
        """`forward` up to the last attention: fills `mixed` [T, Q] and `residual` [T, H], for
        `finish` of chosen rows or `pass_on`. `received` [T, H] are those of the stage before."""
        rows = _Rows(positions, attention, self._begin(attention, slot_mapping), None, received)
        normed, before = self._but_last(token_ids, kv, rows, stored or _ignore)
        mixed.copy_(self._attend(self.weights.layers[-1], normed, kv[-1], rows))
        (stored or _ignore)(len(self.weights.layers) - 1)
        residual.copy_(before)

    def finish(
        self, mixed: Tensor, residual: Tensor, counts: tuple[int, ...] | None = None
    ) -> Tensor:
        """Hidden rows [R, H] after the final norm, from the output of `forward_unfinished`; counts:
        R of each replica."""
        update, residual = self._mlp(self.weights.layers[-1], mixed, residual, counts)
        return self._add_norm(update, residual, self.weights.norm)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden rows [R, H], both in the model's dtype."""
        own = self._linear(hidden, self.weights.head)
        return self.group.gather(own, self.shard.vocabularies)

    def draws_shares(self, *, filters: bool) -> bool:
        """Whether the ranks of a group draw from their shares of the vocabulary; with filters each
        needs whole rows. A deterministic model always takes them, because both ways round in
        another order, and other requests choose the way."""
        if self.shard.size == 1 or self.is_deterministic or filters:
            return False
        return not any(size % 4 for size in self.shard.vocabularies[:-1])

    def candidates(
        self, hidden: Tensor, sampling: RowSampling, *, filters: bool = True
    ) -> Candidates:
        """A candidate for each of hidden rows [R, H], see `sample_confidence`; filters: whether any
        row may have a top-p or top-k.

        Every rank of a group gets all candidates. Ranks exchange a record of each row, or with
        filters its logits, and then each draws some of the rows.
        """
        config, shard = self.config, self.shard
        draw = partial(
            sample_confidence, mask_token_id=config.mask_token_id, top_k_first=config.top_k_first
        )
        own = self._linear(hidden, self.weights.head)
        if shard.size == 1:
            return draw(own, sampling)
        if self.draws_shares(filters=filters):
            record = share_record(own, sampling, config.mask_token_id, shard.vocabulary.start)
            return of_shares(self.group.collect(record), sampling, config.mask_token_id)
        return draw_shares(own, sampling, draw, shard, self.group)

    def hold(self, graph: torch.cuda.CUDAGraph) -> None:
        """Gives a graph of this model's forwards to the group whose exchanges are in it."""
        meeting = self.group if self.replicas is None else self.replicas.group
        meeting.hold(graph)

    def _begin(self, attention: AttentionBatch, slots: Tensor) -> Tensor:
        """The slots of this rank in a forward over these."""
        return slots if self.context is None else self.context.begin(attention, slots)

    def _but_last(
        self, token_ids: Tensor, kv: Sequence[LayerKV], rows: _Rows, stored: Stored
    ) -> tuple[Tensor, Tensor]:
        """(normed input of the last layer; residual), both [T, H]."""
        layers = self.weights.layers
        normed, residual = self._enter(token_ids, layers[0].attn_norm, rows)
        for number, (layer, following) in enumerate(pairwise(layers)):
            mixed = self._attend(layer, normed, kv[number], rows)
            stored(number)
            update, residual = self._mlp(layer, mixed, residual, rows.counts)
            normed, residual = self._add_norm(update, residual, following.attn_norm)
        return normed, residual

    def _enter(self, token_ids: Tensor, weight: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """(normed input of the first layer here; residual), both [T, H]."""
        if self.stage is None or self.stage.is_first:
            return self._embed(token_ids, weight)
        if (received := rows.received) is None:
            received = self.stage.receive(weight.new_empty(len(token_ids), len(weight)))
        return rms_norm(received, weight, self.config.rms_norm_eps), received

    def pass_on(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Sends the rows [T, H] of `forward_unfinished` to the next stage; returns none of them."""
        assert self.stage is not None, "a stage before the last one passes rows on"
        layer = self.weights.layers[-1]
        update, residual = self._mlp(layer, mixed, residual, None)
        self.stage.send(self._add_norm(update, residual, layer.mlp_norm)[1])  # any norm would do
        return residual[:0]

    def _embed(self, token_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(normed embeddings, embeddings) [T, H] of token_ids [T]. A CPU that holds all of them
        raises IndexError for an id that is none."""
        rows = self.weights.embedding
        if self.shard.size == 1:
            found = torch.nn.functional.embedding(token_ids, rows)
            return rms_norm(found, weight, self.config.rms_norm_eps), found
        found = lookup(token_ids, rows, self.shard.vocabulary.start)
        return self._add_norm(found, torch.zeros_like(found), weight)

    def _attend(self, layer: LayerWeights, x: Tensor, layer_kv: LayerKV, rows: _Rows) -> Tensor:
        """Attention output before its projection, [T, Q]; stores K and V."""
        config, num_rows = self.config, len(x)
        qkv = self._linear(x, layer.qkv, layer.qkv_bias)
        q, k, v = torch.split(qkv, [self._queries_dim, self._kv_dim, self._kv_dim], dim=-1)
        q = q.view(num_rows, len(self.shard.queries), config.head_dim)
        k, v = self._heads(k), self._heads(v)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = self._rotate_and_store(q, k, v, layer_kv, rows)
        mixed = self._attention(q, k, v, *layer_kv, rows.attention, scale=self._scale)
        return mixed.view(num_rows, self.q_dim)

    def _store_only(self, layer: LayerWeights, x: Tensor, layer_kv: LayerKV, rows: _Rows) -> None:
        bias = None if layer.qkv_bias is None else layer.qkv_bias[self._queries_dim :]
        k, v = map(
            self._heads, self._linear(x, layer.qkv[self._queries_dim :], bias).chunk(2, dim=-1)
        )
        if layer.k_norm is not None:
            k = rms_norm(k, layer.k_norm, self.config.rms_norm_eps)
        k, _ = self._rotate_and_store(k, k, v, layer_kv, rows)  # without q to rotate
        if self.prompts is not None:
            self.prompts.store(k, v, *layer_kv)

    def _rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: LayerKV, rows: _Rows
    ) -> tuple[Tensor, Tensor]:
        return rotary_store_kv(q, k, v, self._cos_sin, rows.positions, *layer_kv, rows.slot_mapping)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), len(self.shard.kv_heads), self.config.head_dim)

    def _mlp(
        self,
        layer: LayerWeights,
        mixed: Tensor,
        residual: Tensor,
        counts: tuple[int, ...] | None,
    ) -> tuple[Tensor | WeightedParts, Tensor]:
        """(this rank's MLP output, residual with the attention's output added), both [rows, H].

        The output may be in parts, [2, rows, H] fp32 or the experts' results, which the next norm
        adds up, like the outputs of all ranks.
        """
        projected = self._linear(mixed, layer.attn_out)
        normed, residual = self._add_norm(projected, residual, layer.mlp_norm)
        if layer.router is not None:
            return self._experts(layer, layer.router, normed, counts), residual
        activated = swiglu(self._linear(normed, layer.gate_up))
        can_halve = activated.is_cuda and self.dtype != torch.float32 and self.shard.size == 1
        if can_halve and (self.batch_invariant or len(mixed) <= _MOST_ROWS_HALVED):
            return halves(activated, layer.down, batch_invariant=self.batch_invariant), residual
        return self._linear(activated, layer.down), residual

    def _experts(
        self, layer: LayerWeights, router: Tensor, x: Tensor, counts: tuple[int, ...] | None
    ) -> Tensor | WeightedParts:
        """This rank's share of the experts' results for x [rows, H]; of replicas all of them."""
        replicas = self.replicas
        rows = x if replicas is None else replicas.gather_rows(x, counts)
        routes = self._route(rows, router, layer.router_bias)
        given = expert_mlp(
            rows, layer.gate_up, layer.down, routes, batch_invariant=self.batch_invariant
        )
        return given if replicas is None else replicas.reduce_rows(total_of(given), len(x))

    def _route(self, x: Tensor, router: Tensor, bias: Tensor | None) -> Routes:
        """The experts of each row of x [rows, H], by the numbers of this rank."""
        assert self.config.experts is not None, "weights with a router come with its rule"
        routing, place = self.config.experts.routing, self.replicas or self.shard
        logits = router_logits(x, router, batch_invariant=self.batch_invariant)
        routes = route(logits, bias, routing)
        if self.shard.experts is None:
            return routes
        held = self.shard.experts
        return own_routes(routes, held, routing.num_experts, place.rank, place.size)

    def _experts_only(self, layer: LayerWeights, counts: tuple[int, ...]) -> None:
        """A replica without rows computes its experts for those of the others, if there are any."""
        if layer.router is not None and any(counts):
            none = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            self._experts(layer, layer.router, none, counts)

    def _add_norm(
        self, x: Tensor | WeightedParts, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum) [rows, H] of the residual and of all ranks' x."""
        return self.group.sum_norm(x, residual, weight, self.config.rms_norm_eps)


def _ignore(_: int) -> None:
    """Ignores the number of a stored layer, for callers that do not need it."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Inputs that every layer reads for the packed rows."""

    positions: Tensor
    attention: AttentionBatch
    slot_mapping: Tensor
    counts: tuple[int, ...] | None = None  # of each replica
    received: Tensor | None = None  # [T, H] from the stage before, if they are here
