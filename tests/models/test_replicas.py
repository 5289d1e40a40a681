"""Replicas with rows of their own and experts in common compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_checkpoints import EXPERT_FAMILIES, ExpertFamily, write_expert_checkpoint
from paged_model import PagedModel
from thread_group import run_ranks

from effuse.models.config import ModelConfig
from effuse.models.group import Group, RankPlace
from effuse.models.part import Part, PartResult
from effuse.models.tensors import replica_of

LENGTHS = (9, 4, 13, 6)


def parts_of(pages: list[list[int]], replicas: tuple[int, ...]) -> list[Part]:
    """A sequence for each replica that is named, with candidates at odd positions."""
    return [
        Part(
            token_ids=[(7 * at + number) % 250 for at in range(LENGTHS[number])],
            start=0,
            pages=pages[number],
            num_stored=LENGTHS[number],
            block_origin=0,
            candidates=range(1, LENGTHS[number], 2),
            denoise_counts=[0] * (LENGTHS[number] // 2),
            replica=replica,
        )
        for number, replica in enumerate(replicas)
    ]


def results(path: Path, place: RankPlace, replicas: tuple[int, ...]) -> list[PartResult]:
    """Of a forward that also computes prompts without candidates, and of a second forward."""
    model = PagedModel(path, page_size=4, block_size=4, place=place)
    parts = parts_of([model.pages(length) for length in LENGTHS], replicas)
    if place.replicas is None:
        parts = [replace(part, replica=0) for part in parts]
    runner = model.runner()
    runner.run([replace(part, candidates=(), denoise_counts=()) for part in parts])
    return runner.run(parts)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_each_replica_gets_the_results_of_its_rows(
    tmp_path: Path, family: ExpertFamily, size: int
) -> None:
    path = write_expert_checkpoint(tmp_path, family, 5)
    # Replicas with one sequence, with several, and with none.
    replicas = (0, 1, 1) if size == 2 else (3, 1, 1, 0)
    expected = results(path, RankPlace(), replicas)
    of_ranks = run_ranks(size, lambda place: results(path, place, replicas), data_parallel=True)
    for rank, found in enumerate(of_ranks):
        own = [one for one, at in zip(expected, replicas, strict=True) if at == rank]
        assert [one.tokens for one in found] == [one.tokens for one in own]
        for one, other in zip(found, own, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.confidences), torch.tensor(other.confidences), rtol=0, atol=1e-5
            )


def test_a_replica_whose_rows_want_nothing_helps_with_the_last_layer(tmp_path: Path) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe", 5)

    def run(place: RankPlace) -> list[PartResult]:
        model = PagedModel(path, page_size=4, block_size=4, place=place)
        parts = parts_of([model.pages(length) for length in LENGTHS], (0, 1))
        parts[1] = replace(parts[1], candidates=(), denoise_counts=())
        return model.runner().run(parts)

    first, second = run_ranks(2, run, data_parallel=True)
    assert len(first[0].tokens) == LENGTHS[0] // 2
    assert second[0].tokens == []


def test_a_replica_reads_only_its_experts_and_all_else(tmp_path: Path) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe", 5)
    models = run_ranks(
        2,
        lambda place: PagedModel(path, page_size=4, block_size=4, place=place).model,
        data_parallel=True,
    )
    alone = PagedModel(path, page_size=4, block_size=4).model
    for model in models:
        assert model.weights.layers[0].qkv.shape == alone.weights.layers[0].qkv.shape
        num_shared = alone.config.experts.routing.num_shared  # type: ignore[union-attr]
        whole = len(alone.weights.layers[-1].down)
        assert len(model.weights.layers[-1].down) == (whole - num_shared) // 2 + num_shared


def test_the_group_of_all_replicas_holds_their_graphs(tmp_path: Path) -> None:
    """Their exchanges are in them, and it ends them."""
    held: list[object] = []

    class Holding(Group):
        def hold(self, graph: object) -> None:
            held.append(graph)

    path = write_expert_checkpoint(tmp_path, "llada2_moe", 5)
    place = RankPlace(0, 2, meeting=Holding(), data_parallel=True)
    model = PagedModel(path, page_size=4, block_size=4, place=place).model
    model.hold("a graph")  # type: ignore[arg-type]
    assert held == ["a graph"]


@pytest.mark.parametrize("family", ["sdar", "llada2_moe"])
def test_models_that_replicas_cannot_share_are_refused(tmp_path: Path, family: str) -> None:
    if family == "sdar":
        from checkpoints import write_tiny_checkpoint

        path, message = write_tiny_checkpoint(tmp_path, "sdar"), "no experts"
    else:
        path, message = (
            write_expert_checkpoint(tmp_path, "llada2_moe", 5),
            "are not a multiple of 5",
        )
    with pytest.raises(ValueError, match=message):
        replica_of(ModelConfig.from_dir(path), 0, 5)
