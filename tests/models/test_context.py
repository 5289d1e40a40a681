"""Ranks that hold different tokens of a sequence: together they compute what one process computes,
and each stores only its own tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from paged_model import PagedModel
from thread_group import run_ranks
from torch import Tensor

from effuse.kernels.attention_batch import ContextCut
from effuse.models.config import ModelConfig
from effuse.models.group import RankPlace
from effuse.models.tensors import shard_of

TOLERANCE = 2e-5  # of the largest logit
FEW_KV_HEADS = TinySizes(num_heads=8, num_kv_heads=2, head_dim=4)
BLOCK = 4
IDS = [(7 * at + 3) % 250 for at in range(61)]
# The second forward sees a context that is shorter than a page, the others ragged ones.
ENDS = (0, 3, 4, 21, 24, 25, 48, 61)


def logits_of(path: Path, place: RankPlace, page_size: int) -> tuple[Tensor, list[Tensor]]:
    """(logits [T, V] of one sequence that is computed in chunks; K and V of the first layer as they
    lie in this rank's pages, [pages, page_size, heads, D] each)."""
    model = PagedModel(path, page_size=page_size, block_size=BLOCK, place=place)
    pages = model.pages(len(IDS))
    found = []
    for begin, end in pairwise(ENDS):
        is_last = end == len(IDS)  # its last rows are in flight and are not stored
        hidden = model.forward(IDS[begin:end], begin, pages, end - begin - 5 * is_last, 0)
        found.append(model.model.logits(hidden))
    kv = [view[torch.tensor(pages)] for view in model.kv[0]]
    return torch.cat(found), kv


def check(path: Path, size: int, degree: int, page_size: int) -> None:
    logits, whole = logits_of(path, RankPlace(), page_size)
    config, most = ModelConfig.from_dir(path), TOLERANCE * float(logits.abs().max())
    of_ranks = run_ranks(
        size,
        lambda place: logits_of(path, place, page_size),
        context_degree=degree,
        page_size=page_size,
    )
    by_token = [view.flatten(0, 1)[: len(IDS) - 5] for view in whole]
    for rank, (found, own) in enumerate(of_ranks):
        torch.testing.assert_close(found, logits, rtol=0, atol=most)
        heads = shard_of(config, rank, size, context_degree=degree).kv_heads
        for view, tokens in zip(own, by_token, strict=True):
            expected = torch.full_like(view, float("nan"))
            for token in range(len(tokens)):
                turn, offset = divmod(token, page_size)
                if turn % degree == rank % degree:
                    expected[turn // degree, offset] = tokens[token, heads.start : heads.stop]
            torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("size", "degree", "page_size"), [(2, 2, 4), (4, 2, 4), (4, 4, 4), (4, 2, 8), (4, 4, 1)]
)
def test_ranks_compute_what_one_computes(
    tmp_path: Path, size: int, degree: int, page_size: int
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, sizes=FEW_KV_HEADS, block_size=BLOCK)
    check(path, size, degree, page_size)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_every_family(tmp_path: Path, architecture: Architecture) -> None:
    sizes = FEW_KV_HEADS if architecture != "llada" else TinySizes(num_kv_heads=4)
    path = write_tiny_checkpoint(tmp_path, architecture, seed=3, sizes=sizes, block_size=BLOCK)
    check(path, 4, 2, 4)


def test_no_kv_head_is_held_twice_if_the_context_is_cut(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=FEW_KV_HEADS)
    config = ModelConfig.from_dir(path)
    assert [shard_of(config, rank, 4).kv_heads for rank in range(4)] == [
        *[range(1)] * 2,
        *[range(1, 2)] * 2,
    ]
    cut = [shard_of(config, rank, 4, context_degree=2) for rank in range(4)]
    assert [one.kv_heads for one in cut] == [*[range(1)] * 2, *[range(1, 2)] * 2]
    assert [one.queries for one in cut] == [*[range(4)] * 2, *[range(4, 8)] * 2]
    assert [one.heads for one in cut] == [range(at, at + 2) for at in (0, 2, 4, 6)]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_token_is_on_one_rank(degree: int) -> None:
    cuts = [ContextCut(rank, degree, 4) for rank in range(degree)]
    for count in range(50):
        assert sum(cut.length(count) for cut in cuts) == count
        found = [int(cut.lengths(torch.tensor([count]))) for cut in cuts]
        assert found == [cut.length(count) for cut in cuts]
    slots = torch.tensor([-1, *range(degree * 4 * 3)])
    own = torch.stack([cut.slots(slots) for cut in cuts])
    assert (own[:, 0] == -1).all()
    assert ((own[:, 1:] >= 0).sum(0) == 1).all()
    for cut in own:
        assert sorted(cut[cut >= 0].tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("size", "degree", "kv_heads", "message"),
    [
        (
            4,
            3,
            2,
            "--decode-context-parallel-size 3: 4 tensor-parallel ranks are not a multiple of it",
        ),
        (12, 3, 6, "4 groups of ranks cannot share 6 KV heads"),
    ],
)
def test_impossible_degrees_are_refused_with_their_numbers(
    tmp_path: Path, size: int, degree: int, kv_heads: int, message: str
) -> None:
    sizes = TinySizes(num_heads=12, num_kv_heads=kv_heads, head_dim=4, intermediate_size=24)
    config = ModelConfig.from_dir(write_tiny_checkpoint(tmp_path, "sdar", sizes=sizes))
    with pytest.raises(ValueError, match=message):
        shard_of(config, 0, size, context_degree=degree)
