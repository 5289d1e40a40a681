"""Checks of the mixture of experts: routes against their definition, and the experts' results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effuse.kernels.experts import Routes, own_routes
from effuse.kernels.experts_routing import Routing
from effuse.kernels.values import WeightedParts
from operators.references import expert_mlp_ref, route_ref
from operators.tolerance import assert_close

if TYPE_CHECKING:
    from effuse.kernels.experts_routes_triton import SortedPicks

Route = Callable[[Tensor, Tensor | None, Routing], Routes]
ExpertMlp = Callable[[Tensor, Tensor, Tensor, Routes], WeightedParts]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a rank calls that holds a part of the experts."""

    own: Callable[[Routes, range, int, int, int], Routes]
    mlp: ExpertMlp
    total: Callable[[WeightedParts], Tensor]


SOFTMAX = Routing(num_experts=6, top_k=2, scores="softmax", renormalises=False)
RENORMALISED = Routing(num_experts=8, top_k=3, scores="softmax", renormalises=True)
GROUPED = Routing(
    num_experts=16,
    top_k=4,
    scores="sigmoid",
    renormalises=True,
    scale=2.5,
    num_groups=4,
    top_groups=2,
    num_shared=1,
)
ROUTINGS = {"softmax": SOFTMAX, "renormalised": RENORMALISED, "grouped": GROUPED}

Sort = Callable[[Tensor, int, int], "SortedPicks"]
# (rows of three picks, experts, rows of a tile): less than one part of sorting, two, and nine.
SORTED = [(6, 8, 16), (7, 8, 16), (2001, 10, 32), (11_001, 10, 32)]


@dataclass(frozen=True, slots=True)
class Layer:
    """Rows and sizes of one layer."""

    rows: int
    hidden: int
    inner: int
    routing: Routing


LAYERS = {
    "one_row": Layer(1, 32, 16, GROUPED),
    "few_rows": Layer(5, 32, 16, RENORMALISED),
    "odd_sizes": Layer(9, 40, 24, SOFTMAX),
    "many_tiles": Layer(70, 64, 48, SOFTMAX),
    "no_row": Layer(0, 32, 16, GROUPED),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator)


def check_route(route: Route, device: torch.device, routing: Routing, *, biased: bool) -> None:
    """Random rows, and one whose scores are all equal."""
    logits = torch.cat([random(21, routing.num_experts), torch.zeros(1, routing.num_experts)])
    bias = 0.3 * random(routing.num_experts, seed=1) if biased else None
    found = route(logits.to(device), None if bias is None else bias.to(device), routing)
    expected = route_ref(logits, bias, routing)
    assert found.experts.dtype == torch.int32 and found.weights.dtype == torch.float32
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=1e-5, atol=1e-6)


def check_route_of_no_number(route: Route, device: torch.device) -> None:
    """A row that is not finite goes to experts that exist, and harms no other row."""
    logits = random(3, GROUPED.num_experts)
    expected = route_ref(logits[::2], None, GROUPED)
    logits[1] = float("nan")
    found = route(logits.to(device), None, GROUPED).experts.cpu()
    assert ((found >= 0) & (found < GROUPED.num_weights)).all()
    assert torch.equal(found[::2], expected.experts)


def check_sort(
    sort: Sort, device: torch.device, num_rows: int, num_experts: int, tile_rows: int
) -> None:
    """Picks lie by expert and in their order, and tiles of one expert each lie over all of them.

    Half of the experts are chosen, the last one among them or not.
    """
    picks = random(num_rows, 3).argsort(0) % (num_experts // 2) * 2 + num_rows % 2
    found = sort(picks.int().to(device), num_experts, tile_rows)
    order, counts = found.order.cpu(), torch.bincount(picks.flatten(), minlength=num_experts)
    assert torch.equal(order.long(), picks.flatten().sort(stable=True).indices)
    assert torch.equal(order[found.ranks.cpu()], torch.arange(len(order), dtype=torch.int32))
    ends = counts.cumsum(0).tolist()
    assert found.ends.tolist() == ends
    expected = [
        (expert, start)
        for expert, end in enumerate(ends)
        for start in range(end - int(counts[expert]), end, tile_rows)
    ]
    owners, used = found.owners.cpu(), len(expected)
    assert list(zip(owners[:used].tolist(), found.starts[:used].tolist(), strict=True)) == expected
    assert (owners[used:] == -1).all() and used <= len(owners)


def check_mlp(mlp: ExpertMlp, device: torch.device, dtype: torch.dtype, layer: Layer) -> None:
    x, gate_up, down = weights_of(layer, dtype)
    routes = routes_of(layer)
    found = mlp(x.to(device), gate_up.to(device), down.to(device), routes_on(routes, device))
    assert_close(
        found.total(),
        expert_mlp_ref(x.double(), gate_up.double(), down.double(), routes),
        expert_mlp_ref(x, gate_up, down, routes),
    )


def check_order(mlp: ExpertMlp, device: torch.device, dtype: torch.dtype) -> None:
    """The same rows in another order; numpy's products, which the interpreter takes, differ."""
    layer = LAYERS["many_tiles"]
    x, gate_up, down = (each.to(device) for each in weights_of(layer, dtype))
    routes = routes_on(routes_of(layer), device)
    together = mlp(x, gate_up, down, routes).total()
    order = torch.randperm(layer.rows, generator=torch.Generator().manual_seed(3)).to(device)
    shuffled = mlp(x[order], gate_up, down, Routes(routes.experts[order], routes.weights[order]))
    assert torch.equal(shuffled.total(), together[order])


def check_crowd(mlp: ExpertMlp, device: torch.device, dtype: torch.dtype) -> None:
    """Every pick of every row is the same expert: a pick for each place of nearly all tiles."""
    layer = LAYERS["many_tiles"]
    x, gate_up, down = weights_of(layer, dtype)
    weights = routes_of(layer).weights
    routes = Routes(torch.full(weights.shape, 4, dtype=torch.int32), weights)
    found = mlp(x.to(device), gate_up.to(device), down.to(device), routes_on(routes, device))
    exact = expert_mlp_ref(x.double(), gate_up.double(), down.double(), routes)
    assert_close(found.total(), exact, expert_mlp_ref(x, gate_up, down, routes))


def check_spread(
    spread: Spread, device: torch.device, dtype: torch.dtype, layer: Layer, size: int = 2
) -> None:
    """Ranks with a part of the experts each give, summed, what one gives with all."""
    x, gate_up, down = weights_of(layer, dtype)
    routes, num_routed = routes_of(layer), layer.routing.num_experts
    total = torch.zeros(layer.rows, layer.hidden, device=device)
    each = num_routed // size
    for rank in range(size):
        held = range(rank * each, (rank + 1) * each)
        kept = [*held, *range(num_routed, len(gate_up))]
        expected = own_routes(routes, held, num_routed, rank, size)
        part = spread.own(routes_on(routes, device), held, num_routed, rank, size)
        assert torch.equal(part.experts.cpu(), expected.experts)
        assert torch.equal(part.weights.cpu(), expected.weights)
        given = spread.mlp(x.to(device), gate_up[kept].to(device), down[kept].to(device), part)
        total += spread.total(given).float()
    exact = expert_mlp_ref(x.double(), gate_up.double(), down.double(), routes)
    assert_close(total.to(dtype), exact, expert_mlp_ref(x, gate_up, down, routes))


def weights_of(layer: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate_up and down."""
    count, hidden, inner = layer.routing.num_weights, layer.hidden, layer.inner
    return (
        random(layer.rows, hidden).to(dtype),
        (random(count, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (random(count, hidden, inner) / inner**0.5).to(dtype),
    )


def routes_of(layer: Layer) -> Routes:
    return route_ref(random(layer.rows, layer.routing.num_experts, seed=2), None, layer.routing)


def routes_on(routes: Routes, device: torch.device) -> Routes:
    return Routes(routes.experts.to(device), routes.weights.to(device), routes.num_ranks)
