"""The mixture of experts on the torch path, and the rules that a routing must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operators import experts

from effuse.kernels.experts import Routes, expert_mlp, own_routes, route, router_logits
from effuse.kernels.experts_routes_triton import most_tiles
from effuse.kernels.experts_routing import Routing
from effuse.kernels.rowwise import total_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", experts.ROUTINGS)
def test_route_equals_definition(name: str, biased: bool) -> None:
    experts.check_route(route, CPU, experts.ROUTINGS[name], biased=biased)


def test_a_row_of_no_number_goes_to_experts_that_exist() -> None:
    experts.check_route_of_no_number(route, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", experts.LAYERS)
def test_experts_give_what_their_definition_says(name: str, dtype: torch.dtype) -> None:
    experts.check_mlp(expert_mlp, CPU, dtype, experts.LAYERS[name])


def test_a_row_gets_the_same_in_every_batch() -> None:
    experts.check_order(expert_mlp, CPU, torch.float32)
    experts.check_crowd(expert_mlp, CPU, torch.float32)


def test_picks_of_another_rank_give_zeros() -> None:
    spread = experts.Spread(own_routes, expert_mlp, total_of)
    for name in ("many_tiles", "one_row"):
        experts.check_spread(spread, CPU, torch.float32, experts.LAYERS[name])
    layer = experts.LAYERS["many_tiles"]
    x, gate_up, down = experts.weights_of(layer, torch.float32)
    together = expert_mlp(x, gate_up, down, experts.routes_of(layer)).total()
    routes = experts.routes_of(layer)
    for row in range(0, layer.rows, 9):
        own = Routes(routes.experts[row : row + 1], routes.weights[row : row + 1])
        alone = expert_mlp(x[row : row + 1], gate_up, down, own).total()
        assert torch.equal(alone[0], together[row])


def test_router_logits_are_not_rounded_to_the_dtype() -> None:
    x, router = experts.random(6, 64).bfloat16(), experts.random(8, 64).bfloat16()
    found = router_logits(x, router)
    exact = x.double() @ router.double().t()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert (found != found.bfloat16().float()).any()


@pytest.mark.parametrize(("num_experts", "tile_rows"), [(1, 16), (7, 16), (64, 64)])
def test_no_choice_needs_more_tiles(num_experts: int, tile_rows: int) -> None:
    for num_picks in (1, 5, 16, 17, 100, 1000):
        worst = 0  # as many experts as possible with one pick more than whole tiles hold
        for used in range(1, min(num_experts, num_picks) + 1):
            whole = (num_picks - used) // tile_rows
            worst = max(worst, used + whole)
        assert worst <= most_tiles(num_picks, num_experts, tile_rows)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_groups": 3}, "cannot form 3 equal groups"),
        ({"top_groups": 5, "num_groups": 4}, "5 of 4 groups"),
        ({"top_k": 9, "num_groups": 4, "top_groups": 2}, "cannot choose 9 experts"),
        ({"top_k": 0}, "cannot choose 0 experts"),
        ({"num_groups": 16, "top_groups": 2}, "two experts in each"),
        ({"num_experts": 12, "num_groups": 2}, "power of two"),
    ],
)
def test_a_routing_that_fits_no_expert_is_refused(wrong: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "num_experts": 16,
        "top_k": 2,
        "scores": "sigmoid",
        "renormalises": True,
    }
    Routing(**good)
    with pytest.raises(ValueError, match=says):
        Routing(**good | wrong)
