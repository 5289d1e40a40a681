"""A mixture of experts instead of a layer's MLP: the choice of each row's experts, and their
results.

No function waits for the device or has a shape that depends on the choice, so that CUDA graphs can
capture it. A CPU computes one expert after another.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from effuse.kernels.experts_routing import Routing
from effuse.kernels.rowwise import linear, swiglu
from effuse.kernels.values import WeightedParts

NO_EXPERT: Final = -1
"""The pick of an expert that another rank holds: it gives zeros."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row. K is `Routing.num_picks`; shared experts come last."""

    experts: Tensor  # [T, K] int32, NO_EXPERT for another rank's
    weights: Tensor  # [T, K] fp32
    num_ranks: int = 1  # over which the experts are spread


def router_logits(x: Tensor, router: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """x [T, H] times router [E, H], both in the model's dtype: [T, E] fp32, never rounded to it."""
    if x.is_cuda and batch_invariant:
        from effuse.kernels import products_hopper

        return products_hopper.launch(x, router, out_dtype=torch.float32)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, router.t(), out_dtype=torch.float32)
    return linear(x.float(), router.float())


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> Routes:
    """Routes of ``logits`` [T, E] fp32. ``bias`` [E] fp32 affects the choice but not the weight.

    Of equal experts the lower number is chosen first.
    """
    if logits.is_cuda:
        from effuse.kernels import experts_routes_triton

        return Routes(*experts_routes_triton.launch_route(logits, bias, routing))
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        choice = _within_best_groups(choice, routing)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.renormalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    shared = torch.arange(routing.num_experts, routing.num_weights).expand(len(logits), -1)
    ones = torch.ones(shared.shape)
    return Routes(
        torch.cat([experts, shared], dim=1).int(), torch.cat([weights * routing.scale, ones], dim=1)
    )


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, *, batch_invariant: bool = False
) -> WeightedParts:
    """The sum [T, H] over each row's experts of the weight times the expert's gated MLP of x [T,
    H].

    ``gate_up`` is [E, 2I, H], the gate first, ``down`` [E, H, I], all in the dtype of x. Each
    expert's result is rounded to it. The sum is not taken here: its reader takes it, which saves a
    round trip to memory.
    """
    if x.is_cuda:
        from effuse.kernels import experts_triton

        return experts_triton.launch_mlp(
            x,
            gate_up,
            down,
            routes.experts,
            routes.weights,
            num_ranks=routes.num_ranks,
            batch_invariant=batch_invariant,
        )
    picked = routes.experts.flatten()
    parts = x.new_zeros(len(picked), x.shape[1])
    for expert in torch.unique(picked[picked != NO_EXPERT]).tolist():
        picks = (picked == expert).nonzero().flatten()
        rows = x[picks // routes.experts.shape[1]]
        parts[picks] = linear(swiglu(linear(rows, gate_up[expert])), down[expert])
    return WeightedParts(parts, None, routes.weights)


def own_routes(routes: Routes, held: range, num_routed: int, rank: int, num_ranks: int) -> Routes:
    """Routes [T, K] by the numbers of the experts that the rank holds; NO_EXPERT for others.

    It holds the routed experts `held` of `num_routed`, and all shared ones. A row's first expert
    chooses the rank that computes its shared ones, because ranks round what they add: the rank
    must not depend on other rows.
    """
    experts = routes.experts
    if experts.is_cuda:
        from effuse.kernels import experts_routes_triton

        found = experts_routes_triton.launch_own(
            experts, routes.weights, held, num_routed, rank, num_ranks
        )
        return Routes(*found, num_ranks)
    chosen = experts[:, :1] % num_ranks
    is_shared = experts >= num_routed
    is_own = torch.where(is_shared, chosen == rank, (experts >= held.start) & (experts < held.stop))
    local = torch.where(is_shared, experts - num_routed + len(held), experts - held.start)
    return Routes(
        torch.where(is_own, local, NO_EXPERT).int(),
        torch.where(is_own, routes.weights, 0.0),
        num_ranks,
    )


def _within_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice` with -inf outside of each row's best groups."""
    grouped = choice.view(len(choice), routing.num_groups, -1)
    worth = grouped.topk(2, dim=-1).values.sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, value=True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).view(choice.shape)
