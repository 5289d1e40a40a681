"""The floor of a step: how each product goes, and that steps and products take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from effuse.benchmarks import gpu_floor
from effuse.benchmarks.gpu_floor import (
    MOST_ROWS_HALVED,
    WAYS,
    Floor,
    Turns,
    fastest,
    halves,
    in_turns,
    known_ways,
)
from effuse.benchmarks.gpu_models import TINY, random_model
from effuse.models import transformer

CPU = torch.device("cpu")


def test_the_way_with_the_least_time_is_chosen() -> None:
    assert fastest({"linear": 3.0, "halves": 2.0}) == "halves"
    assert fastest({"linear": 2.0, "halves": 3.0}) == "linear"
    assert fastest({"linear": 2.0, "halves": 2.0}) == "linear"


@pytest.mark.parametrize("product", ["attn_out", "down"])
def test_halves_are_tried_wherever_the_step_does_them(product: str) -> None:
    assert transformer._MOST_ROWS_HALVED <= MOST_ROWS_HALVED
    assert known_ways(product, MOST_ROWS_HALVED, can_halve=True) == ("linear", "halves")
    assert known_ways(product, MOST_ROWS_HALVED + 1, can_halve=True) == ("linear",)
    assert known_ways(product, 1, can_halve=False) == ("linear",)


def test_halves_are_not_tried_where_nothing_adds_them_up() -> None:
    assert known_ways("gate_up", 1, can_halve=True) == ("linear",)


def test_halves_are_both_parts_of_the_sum() -> None:
    """Their shape; a CPU has no such product."""
    x, weight = (torch.empty(rows, 16, dtype=torch.bfloat16, device="meta") for rows in (8, 24))
    assert (halves(x, weight).shape, halves(x, weight).dtype) == ((2, 8, 24), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_halves_add_up_to_the_product() -> None:
    x, weight = (torch.randn(rows, 512, dtype=torch.bfloat16, device="cuda") for rows in (40, 96))
    expected = functional.linear(x.float(), weight.float())
    torch.testing.assert_close(halves(x, weight).sum(0), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_of_a_step_are_a_graph() -> None:
    model = random_model(TINY, torch.device("cuda"), torch.bfloat16)
    floor = Floor(model, 64)
    for pair in ((64, 8), (32, 32)):
        floor.replay(*pair)()
    torch.cuda.synchronize()
    assert set(floor.chosen.values()) <= set(WAYS)
    assert floor.choices().count(" rows by ") == 6  # two products of 8, 32 and 64 rows


class Watched:
    """Stands for the ways and for their times: halves are faster up to 8 rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, int, int]] = []  # way, rows, columns
        for name in WAYS:
            monkeypatch.setitem(WAYS, name, partial(self._product, name))
        monkeypatch.setattr(gpu_floor, "medians_us", self._times)
        monkeypatch.setattr(Floor, "_ways", lambda _, *key: known_ways(*key, can_halve=True))

    def _product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        self.done.append((name, len(x), len(weight)))
        return functional.linear(x, weight)

    def _times(self, rivals: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
        calls = rivals["halves"]
        assert len(calls) == TINY.num_layers, "every layer's weights"
        first = calls[0]
        assert isinstance(first, partial)
        return {"linear": 5.0, "halves": 4.0 if len(first.args[1]) <= 8 else 6.0}


def test_each_number_of_rows_goes_its_own_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    floor = Floor(random_model(TINY, CPU, torch.float32), 32)
    run = floor.replay(16, 8)
    run()
    width, inner = TINY.hidden_size, 2 * TINY.intermediate_size
    many = [("linear", 16, width), ("linear", 16, inner), ("linear", 16, width)]
    few = [("halves", 8, width), ("linear", 8, inner), ("halves", 8, width)]
    assert watched.done == many * (TINY.num_layers - 1) + few
    assert floor.choices() == (
        "attn_out of 8 rows by halves, attn_out of 16 rows by linear, "
        "down of 8 rows by halves, down of 16 rows by linear"
    )
    assert floor.replay(16, 8) is run


def test_a_turn_is_some_steps_and_then_the_products_of_just_those() -> None:
    done: list[str] = []
    bare = [partial(done.append, f"bare {number}") for number in range(5)]
    turns = in_turns(CPU, lambda: done.append("step"), bare, 2)
    assert done == [
        *("step", "step", "bare 0", "bare 1"),
        *("step", "step", "bare 2", "bare 3"),
        *("step", "bare 4"),
    ]
    assert (len(turns.step_ms), len(turns.bare_ms), turns.num_steps) == (3, 3, 5)


def test_the_ratio_is_that_of_all_turns_together() -> None:
    turns = Turns([6.0, 30.0], [6.0, 10.0], 4)
    assert turns.ratio == 36 / 16
    assert (turns.mean_step_ms, turns.mean_bare_ms) == (9.0, 4.0)
    assert turns.spread == pytest.approx((1.2, 2.8))
