"""Stages of layers: together they compute, bit by bit, what one process computes."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, TinySizes, architecture_of, write_tiny_checkpoint
from expert_checkpoints import write_expert_checkpoint
from models.test_shard import IDS
from paged_model import PagedModel
from torch import Tensor

from effuse.models.config import ModelConfig
from effuse.models.group import PipelineStage, RankPlace
from effuse.models.part import Part, PartResult
from effuse.models.prompt_graphs import MOST_SEQUENCES
from effuse.models.stages import group_costs, stage_groups
from effuse.models.tensors import tensors_of

FOUR = TinySizes(num_layers=4)
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way of rows from one stage to the next, as of a `ProcessGroup`."""

    rows: queue.Queue[Tensor]

    def pass_on(self, x: Tensor) -> None:
        self.rows.put(x)

    def take_over(self, into: Tensor) -> Tensor:
        return into.copy_(self.rows.get(timeout=_PATIENCE_S))


def places(config: ModelConfig, count: int) -> list[RankPlace]:
    """Each stage's place, the first one first; a group of layers is one layer."""
    links: list[Any] = [None, *(Link(queue.Queue()) for _ in range(count - 1)), None]
    cuts = stage_groups(config, config.num_layers, count)
    return [
        RankPlace(stage=PipelineStage(at, count, own, own, before=before, after=after))
        for at, (own, (before, after)) in enumerate(zip(cuts, pairwise(links), strict=True))
    ]


def outcome(path: Path, place: RankPlace) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """(logits [T, V] of a last stage, K and V of each layer here) of a sequence that is stored."""
    model = PagedModel(path, page_size=4, block_size=4, place=place)
    pages = model.pages(len(IDS))
    hidden = model.forward(IDS, 0, pages, len(IDS), 0)
    stored = [model.stored(at, pages, len(IDS)) for at in range(len(model.kv))]
    assert model.model.has_head or hidden.shape == (0, model.model.config.hidden_size)
    return model.model.logits(hidden) if model.model.has_head else hidden, stored


def checkpoint(path: Path, family: str, *, tied: bool = False) -> Path:
    if family == "llada2_moe":
        return write_expert_checkpoint(path, "llada2_moe")
    return write_tiny_checkpoint(path, architecture_of(family), seed=3, sizes=FOUR, tied=tied)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", [*ARCHITECTURES, "tied dream", "llada2_moe"])
def test_stages_compute_what_one_computes(tmp_path: Path, family: str, count: int) -> None:
    tied, _, name = family.rpartition(" ")
    path = checkpoint(tmp_path, name, tied=bool(tied))
    logits, stored = outcome(path, RankPlace())
    of_stages = places(ModelConfig.from_dir(path), count)
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda place: outcome(path, place), of_stages))
    assert torch.equal(found[-1][0], logits)
    of_layers = [layer for _, layers in found for layer in layers]
    for own, whole in zip(of_layers, stored, strict=True):
        assert torch.equal(own[0], whole[0]) and torch.equal(own[1], whole[1])


@pytest.mark.parametrize("padded", [False, True], ids=["by calls", "on the rows of graphs"])
@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_runners_of_stages_give_results_in_the_last_one(
    tmp_path: Path, family: str, padded: bool
) -> None:
    """A prompt, a denoise step beside another prompt, a step behind cached tokens, and more
    candidates than a prompt's graph selects rows."""
    path = checkpoint(tmp_path, family)
    prompt = Part(token_ids=IDS[:8], start=0, pages=[1, 2], num_stored=8, block_origin=8)
    step = Part(token_ids=IDS[8:], start=8, pages=[1, 2, 3, 4], num_stored=0, block_origin=8,
                candidates=range(9, 13), denoise_counts=[0] * 4)  # fmt: skip
    alone = Part(token_ids=IDS, start=0, pages=[5, 6, 7, 8], num_stored=13, block_origin=13,
                 candidates=range(5, 13), denoise_counts=[0] * 8, keep_boundary=True)  # fmt: skip
    many = [replace(alone, pages=[*range(at, at + 4)]) for at in range(11, 47, 4)]
    forwards = ([prompt], [alone, replace(prompt, pages=[9, 10])], [step], [step, alone], many)
    assert sum(len(part.candidates) for part in many) > 2 * MOST_SEQUENCES

    def run(place: RankPlace, padded: bool = padded) -> list[list[PartResult]]:
        runner = PagedModel(path, page_size=4, block_size=4, place=place).runner(padded=padded)
        graphs = runner._graphs
        assert graphs is None or all(map(graphs.takes, forwards)), "none goes the usual way"
        return [runner.run(parts) for parts in forwards]

    expected = run(RankPlace(), padded=False)
    of_stages = places(ModelConfig.from_dir(path), 2)
    with ThreadPoolExecutor(2) as pool:
        none, found = pool.map(run, of_stages)
    assert none == [[]] * len(forwards)
    for one, other in zip(expected, found, strict=True):
        assert [mine.tokens for mine in one] == [theirs.tokens for theirs in other]
        for mine, theirs in zip(one, other, strict=True):
            assert (mine.boundary is None) == (theirs.boundary is None)
            if mine.boundary is not None and theirs.boundary is not None:
                assert torch.equal(mine.boundary, theirs.boundary)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_only_its_layers_and_what_its_place_needs(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig.from_dir(checkpoint(tmp_path, "dream", tied=tied))
    held = [set(tensors_of(config, place.shard(config))) for place in places(config, 3)]
    whole = set(tensors_of(config, RankPlace().shard(config)))
    embedding, head, norm = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
    assert [embedding in one for one in held] == [True, False, tied]
    assert [head in one for one in held] == [False, False, not tied]
    assert [norm in one for one in held] == [False, False, True]
    assert set.union(*held) == whole
    shared = {embedding} if tied else set[str]()
    assert sum(map(len, held)) == len(whole) + len(shared)


@pytest.mark.parametrize(
    ("layers", "vocabulary", "groups", "count"),
    [(4, 272, 4, 2), (4, 272, 2, 2), (8, 640, 8, 2), (8, 640, 4, 3), (6, 272, 6, 4)],
)
def test_the_largest_stage_reads_as_few_weights_as_possible(
    tmp_path: Path, layers: int, vocabulary: int, groups: int, count: int
) -> None:
    sizes = TinySizes(num_layers=layers, vocab_size=vocabulary)
    config = ModelConfig.from_dir(write_tiny_checkpoint(tmp_path, "sdar", sizes=sizes))
    costs = group_costs(config, groups)
    found = stage_groups(config, groups, count)
    assert [at for one in found for at in one] == list(range(groups))
    largest = max(sum(costs[at] for at in one) for one in found)
    for other in _all_cuts(groups, count):
        assert largest <= max(sum(costs[a:b]) for a, b in pairwise(other))


def _all_cuts(groups: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(0, groups)]
    return [
        (*rest, groups) for last in range(count - 1, groups) for rest in _all_cuts(last, count - 1)
    ]


def test_the_head_counts_as_layers_do(tmp_path: Path) -> None:
    sizes = TinySizes(num_layers=4, vocab_size=640)
    for tied in (False, True):
        path = write_tiny_checkpoint(tmp_path / str(tied), "dream", sizes=sizes, tied=tied)
        costs = group_costs(ModelConfig.from_dir(path), 4)
        assert costs[0] == costs[1] == costs[2]
        assert costs[3] - costs[0] - 640 * 32 == 32 * (not tied) + 32 * tied, "the norm"


def test_fewer_groups_than_stages_are_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(checkpoint(tmp_path, "sdar"))
    with pytest.raises(ValueError, match="--pipeline-parallel-size 3: the model's pages have 2"):
        stage_groups(config, 2, 3)
