"""Parts of a model on the ranks of a group: together they compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from expert_checkpoints import EXPERT_FAMILIES, ExpertFamily, write_expert_checkpoint
from models.test_adapter import write_adapter
from paged_model import PagedModel
from safetensors.torch import load_file
from thread_group import run_ranks
from torch import Tensor

from effuse.models.config import ModelConfig
from effuse.models.group import RankPlace
from effuse.models.tensors import shard_of
from effuse.models.weights import load_model

TOLERANCE = 2e-5  # of the largest logit
IDS = [(7 * at + 3) % 250 for at in range(13)]
FEW_KV_HEADS = TinySizes(num_heads=8, num_kv_heads=2, head_dim=4)


def outcome(
    path: Path, place: RankPlace, adapter: Path | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, V], K [T, heads, D], V) of one sequence that is stored whole."""
    model = PagedModel(path, page_size=4, block_size=4, adapter=adapter, place=place)
    pages = model.pages(len(IDS))
    hidden = model.forward(IDS, 0, pages, len(IDS), 0)
    return model.model.logits(hidden), *model.stored(1, pages, len(IDS))


def check(
    path: Path, size: int, *, expert_parallel: bool = False, adapter: Path | None = None
) -> None:
    logits, k, v = outcome(path, RankPlace(), adapter)
    config, most = ModelConfig.from_dir(path), TOLERANCE * float(logits.abs().max())
    of_ranks = run_ranks(
        size, lambda place: outcome(path, place, adapter), expert_parallel=expert_parallel
    )
    for rank, (of_rank, own_k, own_v) in enumerate(of_ranks):
        torch.testing.assert_close(of_rank, logits, rtol=0, atol=most)
        heads = shard_of(config, rank, size).kv_heads
        for own, whole in ((own_k, k), (own_v, v)):
            same = whole[:, heads.start : heads.stop]
            torch.testing.assert_close(own, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_compute_what_one_computes(
    tmp_path: Path, architecture: Architecture, size: int
) -> None:
    sizes = FEW_KV_HEADS if architecture != "llada" else TinySizes(num_kv_heads=4)
    check(write_tiny_checkpoint(tmp_path, architecture, seed=3, sizes=sizes), size)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_are_cut_or_spread(
    tmp_path: Path, family: ExpertFamily, size: int, expert_parallel: bool
) -> None:
    check(write_expert_checkpoint(tmp_path, family, 5), size, expert_parallel=expert_parallel)


def test_a_vocabulary_that_does_not_divide_is_cut_unevenly(tmp_path: Path) -> None:
    sizes = replace(FEW_KV_HEADS, vocab_size=275)
    check(write_tiny_checkpoint(tmp_path, "sdar", sizes=sizes), 4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_is_cut_with_its_weights(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", "dream", tied=tied, sizes=FEW_KV_HEADS)
    write_adapter(
        tmp_path / "lora",
        load_file(path / "model.safetensors"),
        ("q_proj", "v_proj", "o_proj", "down_proj", "up_proj"),
    )
    check(path, 2, adapter=tmp_path / "lora")


def test_a_rank_reads_no_more_than_its_part(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=FEW_KV_HEADS)
    sizes = []
    for size in (1, 2):
        weights = load_model(path, place=RankPlace(0, size)).weights
        layer = weights.layers[0]
        held = [weights.embedding, layer.qkv, layer.attn_out, layer.gate_up, layer.down]
        sizes.append(sum(tensor.numel() for tensor in held))
        assert all(tensor.is_contiguous() for tensor in held)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)
    assert sizes[1] * 2 == sizes[0]


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_row_has_the_same_bits_at_any_place(
    tmp_path: Path, family: ExpertFamily, expert_parallel: bool
) -> None:
    """Ranks round what they add. So other rows must not choose the rank of a shared expert."""
    path = write_expert_checkpoint(tmp_path, family, 5)

    def count_changed(place: RankPlace) -> int:
        model = PagedModel(path, page_size=4, block_size=4, place=place).model
        assert model.is_deterministic
        draw = torch.Generator().manual_seed(7)
        mixed = torch.randn(16, model.q_dim, generator=draw)
        residual = torch.randn(16, model.config.hidden_size, generator=draw)
        whole, fewer = model.finish(mixed, residual), model.finish(mixed[1:], residual[1:])
        return int((whole[1:] != fewer).any(dim=1).sum())

    assert run_ranks(2, count_changed, expert_parallel=expert_parallel) == [0, 0]


@pytest.mark.parametrize(
    ("family", "size", "expert_parallel", "message"),
    [
        ("sdar", 3, False, "--tensor-parallel-size 3: 8 attention heads are not a multiple"),
        ("sdar", 2, True, "--expert-parallel: the model has no experts"),
        ("sdar_moe", 16, False, "attention heads are not a multiple"),
    ],
)
def test_impossible_degrees_are_refused_by_name(
    tmp_path: Path, family: str, size: int, expert_parallel: bool, message: str
) -> None:
    if family == "sdar":
        path = write_tiny_checkpoint(tmp_path, "sdar", sizes=FEW_KV_HEADS)
    else:
        path = write_expert_checkpoint(tmp_path, "sdar_moe")
    with pytest.raises(ValueError, match=message):
        shard_of(ModelConfig.from_dir(path), 0, size, expert_parallel=expert_parallel)
