"""The benchmark of a mixture of experts on a tiny model: loads, ways, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from effuse.benchmarks import gpu_moe
from effuse.benchmarks.gpu_models import TINY_EXPERTS, random_model
from effuse.benchmarks.gpu_moe import DrawnRoutes, ExpertBench, ExpertFloor, ExpertLoad
from effuse.benchmarks.gpu_step import WARM_STEPS
from effuse.kernels.experts import Routes
from effuse.models.transformer import LayerWeights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ExpertBench:
    torch.set_num_threads(1)
    return ExpertBench("tiny-experts", CPU, 2, 32)


def test_steps_and_products_have_the_same_loads(
    bench: ExpertBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a step, each in every layer with experts, and of the products beside it."""
    stepped: list[Tensor] = []
    bare: list[Tensor] = []
    route = DrawnRoutes._route

    def watch(self: DrawnRoutes, x: Tensor, router: Tensor, bias: Tensor | None) -> Routes:
        found = route(self, x, router, bias)
        stepped.append(found.experts)
        return found

    def note(_: LayerWeights, load: ExpertLoad) -> None:
        bare.append(load.routes.experts)

    monkeypatch.setattr(DrawnRoutes, "_route", watch)
    monkeypatch.setitem(gpu_moe.EXPERT_WAYS, "tiles", note)
    # one for each mask and step: there is no script on a CPU
    result = bench.measure(2, 32, 4, 40, 4)
    assert (result.strayed, result.waits) == (0, 0)
    # Steps are padded to sizes that are captured, products are not.
    assert len(bare) == 2 * (40 + WARM_STEPS)
    for step, product in zip(stepped[-80:], bare[-80:], strict=True):
        assert torch.equal(step[: len(product)], product)
    assert {len(each) for each in bare} >= {64, 96}, "blocks are stored beside others"


def test_rows_reach_as_many_experts_as_are_drawn(bench: ExpertBench) -> None:
    model = bench.model
    assert isinstance(model, DrawnRoutes)
    assert bench.reached(1) == 3 and bench.reached(64) == 9, "two and the shared one; all of them"
    assert (model.drawn[:, -1] == 8).all()


def test_sorted_rows_end_where_the_next_expert_begins() -> None:
    layer = random_model(TINY_EXPERTS, CPU, torch.float32).weights.layers[1]
    picks = torch.tensor([[0, 3, 8], [3, 1, 8]], dtype=torch.int32)
    load = ExpertLoad.of(picks, layer)
    assert load.ends.tolist() == [1, 2, 2, 4, 4, 4, 4, 4, 6]
    assert (len(load.rows), load.tiles) == (6, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_of_experts_go_a_known_way() -> None:
    cuda = torch.device("cuda")
    model = DrawnRoutes(TINY_EXPERTS, random_model(TINY_EXPERTS, cuda, torch.bfloat16).weights)
    model.draw(128)
    floor = ExpertFloor(model, 128)
    floor.replay(64, 32)()
    torch.cuda.synchronize()
    assert floor.chosen["experts", 64] in gpu_moe.EXPERT_WAYS
    layer, load = model.weights.layers[1], ExpertLoad.of(model.drawn[:64], model.weights.layers[1])
    found = torch._grouped_mm(load.rows, layer.gate_up.transpose(1, 2), offs=load.ends)
    owners = torch.searchsorted(load.ends, torch.arange(len(found), device=cuda), right=True)
    for row, owner in enumerate(owners.tolist()):
        expected = functional.linear(load.rows[row], layer.gate_up[owner])
        torch.testing.assert_close(found[row], expected, rtol=2e-2, atol=2e-2)


def test_the_command_measures_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_moe, "BATCHES", ((1, 2, 1), (2, 2, 2), (64, 1, 1)))
    path = tmp_path / "out" / "moe.json"
    asked = ["--model", "tiny-experts", "--context", "32", "--batch", "1", "--batch", "2"]
    assert gpu_moe.main([*asked, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [result["batch"] for result in written["results"]] == [1, 2]
    said = capsys.readouterr().out
    assert "rows reach" in said and "one way for every product" in said
    assert gpu_moe.main([*asked, "--seconds", "0", "--json", str(path)]) == 0
    assert "batch 2 was not started" in capsys.readouterr().out
