"""The two ways into an operator: the public launcher, and the Triton launch behind it.

In the interpreter tensors live on the CPU, where the public launchers would choose torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from effuse.kernels.attention import Partials
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.experts import Routes
from effuse.kernels.experts_routing import Routing
from effuse.kernels.sampling_shared_triton import sampling_shape
from effuse.kernels.values import Candidates, RowSampling, WeightedParts

Pair = tuple[Tensor, Tensor]


class Sample(Protocol):
    """`sample_confidence` or what stands for it."""

    def __call__(
        self,
        logits: Tensor,
        sampling: RowSampling,
        mask_token_id: int,
        /,
        *,
        top_k_first: bool = False,
    ) -> Candidates: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Arguments of one attention call and the places of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    scale: float
    out: Tensor
    splits: int | None
    batch_invariant: bool
    lse: Tensor | None = None
    cached_only: bool = False


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of every operator."""

    device: torch.device
    attention: Callable[[Attention], None]
    merge_partials: Callable[[Partials, Partials], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_residual: Callable[[Tensor | WeightedParts, Tensor, Tensor, float], Pair]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], Pair]
    rotary_store_kv: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Pair
    ]
    swiglu: Callable[[Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    sample_confidence: Sample


def public(device: torch.device) -> Operators:
    """The launchers that the models call."""
    from effuse.kernels.attention import block_attention, merge_partials, partial_attention
    from effuse.kernels.pages import store_kv
    from effuse.kernels.rowwise import rms_norm, rms_norm_residual, rotary, rotary_store_kv, swiglu
    from effuse.kernels.sampling import sample_confidence

    def attention(a: Attention) -> None:
        if a.lse is not None:
            into = Partials(a.out, a.out, a.lse)
            partial_attention(
                *(a.q, a.k, a.v, a.k_cache, a.v_cache, a.batch),
                scale=a.scale,
                into=into,
                cached_only=a.cached_only,
            )
            return
        block_attention(a.q, a.k, a.v, a.k_cache, a.v_cache, a.batch, scale=a.scale, out=a.out)

    return Operators(
        device=device,
        attention=attention,
        merge_partials=merge_partials,
        rms_norm=rms_norm,
        rms_norm_residual=rms_norm_residual,
        rotary=rotary,
        rotary_store_kv=rotary_store_kv,
        swiglu=swiglu,
        store_kv=store_kv,
        sample_confidence=sample_confidence,
    )


def triton_kernels(device: torch.device, *, max_chunk: int = 8192) -> Operators:
    """The Triton kernels, on a GPU or (TRITON_INTERPRET=1) on the CPU."""
    from effuse.kernels import (
        attention_ranks_triton,
        attention_triton,
        pages_triton,
        rotary_triton,
        rowwise_triton,
        sampling_triton,
    )

    def attention(a: Attention) -> None:
        attention_triton.launch(
            a.q,
            a.k,
            a.v,
            a.k_cache,
            a.v_cache,
            a.batch,
            scale=a.scale,
            out=a.out,
            splits=a.splits,
            batch_invariant=a.batch_invariant,
            lse=a.lse,
            cached_only=a.cached_only,
        )

    def merge_partials(dealt: Partials, own: Partials) -> Tensor:
        return attention_ranks_triton.launch_merge(dealt.out, dealt.lse, own.out, own.lse)

    def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        pages_triton.launch_store(k, v, k_cache, v_cache, slots)

    def rotary_store_kv(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, *cache: Tensor
    ) -> Pair:
        k_cache, v_cache, slots = cache
        return rotary_triton.launch(q, k, table, positions, (v, k_cache, v_cache, slots))

    def sample_confidence(
        logits: Tensor, s: RowSampling, mask_token_id: int, *, top_k_first: bool = False
    ) -> Candidates:
        shape = sampling_shape(logits.shape[1], max_chunk)
        return sampling_triton.launch(logits, s, mask_token_id, shape, top_k_first=top_k_first)

    return Operators(
        device=device,
        attention=attention,
        merge_partials=merge_partials,
        rms_norm=rowwise_triton.launch_norm,
        rms_norm_residual=rowwise_triton.launch_norm_residual,
        rotary=rotary_triton.launch,
        rotary_store_kv=rotary_store_kv,
        swiglu=rowwise_triton.launch_swiglu,
        store_kv=store_kv,
        sample_confidence=sample_confidence,
    )


def route_on_triton(logits: Tensor, bias: Tensor | None, routing: Routing) -> Routes:
    """`experts.route` by its kernel, on a GPU or in the interpreter."""
    from effuse.kernels import experts_routes_triton

    return Routes(*experts_routes_triton.launch_route(logits, bias, routing))


def experts_on_triton(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> WeightedParts:
    """`experts.expert_mlp` by its kernels."""
    from effuse.kernels import experts_triton

    return experts_triton.launch_mlp(
        x, gate_up, down, routes.experts, routes.weights, num_ranks=routes.num_ranks
    )


def experts_invariant(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> WeightedParts:
    """The same, with the weights first in each product."""
    from effuse.kernels import experts_triton

    return experts_triton.launch_mlp(
        x, gate_up, down, routes.experts, routes.weights, batch_invariant=True
    )


def own_routes_on_triton(
    routes: Routes, held: range, num_routed: int, rank: int, num_ranks: int
) -> Routes:
    """`experts.own_routes` by its kernel."""
    from effuse.kernels.experts_routes_triton import launch_own

    found = launch_own(routes.experts, routes.weights, held, num_routed, rank, num_ranks)
    return Routes(*found, num_ranks)


def lookup_on_triton(token_ids: Tensor, rows: Tensor, first: int) -> Tensor:
    """`rowwise.lookup` by its kernel."""
    from effuse.kernels import rowwise_triton

    return rowwise_triton.launch_lookup(token_ids, rows, first)


def total_on_triton(given: WeightedParts) -> Tensor:
    """`rowwise.total_of` by its kernel."""
    from effuse.kernels import rowwise_triton

    return rowwise_triton.launch_total(given)


def experts_grouped(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> WeightedParts:
    """`experts.expert_mlp` by torch's grouped products."""
    from effuse.kernels import experts_triton

    return experts_triton.grouped_mlp(x, gate_up, down, routes.experts, routes.weights)
