"""Ranks that compute different rows of a prompt: together they store what one process stores, each
its own pages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from paged_model import PagedModel
from thread_group import run_ranks
from torch import Tensor

from effuse.models.context_prompts import runs_of_ranks
from effuse.models.group import RankPlace
from effuse.models.part import Part

BLOCK = 4
LENGTHS = (60, 4, 23, 1, 36)  # of prompts; most are shorter than a part of a rank
CHUNK = 24


def prompts_of(is_causal: bool) -> list[list[int]]:
    lengths = [length // BLOCK * BLOCK if is_causal else length for length in LENGTHS]
    return [[(7 * at + 3 * length) % 250 for at in range(length)] for length in lengths if length]


def stored_by(
    path: Path, place: RankPlace, page_size: int, most_tokens: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(K and V of the last layer in the pages of all prompts, [pages, 2, page_size, heads, D] of
    each; the boundaries): the prompts are computed in chunks, all at once."""
    model = PagedModel(path, page_size=page_size, block_size=BLOCK, place=place)
    config, runner = model.model.config, model.runner()
    if model.model.prompts is not None:
        model.model.prompts.most_tokens = most_tokens
    is_causal = config.prompt_attention == "causal_blocks"
    prompts = prompts_of(is_causal)
    pages = [model.pages(len(ids)) for ids in prompts]
    boundaries: list[Tensor | None] = [None] * len(prompts)
    chunk = CHUNK if is_causal else max(LENGTHS)
    for begin, end in pairwise(range(0, max(LENGTHS) + chunk, chunk)):
        going = [at for at, ids in enumerate(prompts) if len(ids) > begin]
        parts = [
            Part(
                token_ids=prompts[at][begin:end],
                start=begin,
                pages=pages[at],
                num_stored=len(prompts[at][begin:end]),
                block_origin=config.block_origin(len(prompts[at])),
                keep_boundary=end >= len(prompts[at]),
            )
            for at in going
        ]
        for at, result in zip(going, runner.run(parts), strict=True):
            boundaries[at] = result.boundary if result.boundary is not None else boundaries[at]
        if most_tokens and model.model.prompts is not None and begin == 0:
            assert len(model.model.prompts._spaces) > 1
    kv = torch.stack(model.kv[-1], dim=1)
    return [kv[torch.tensor(own)] for own in pages], boundaries


def check(path: Path, size: int, degree: int, page_size: int, most_tokens: int = 0) -> None:
    whole, expected = stored_by(path, RankPlace(), page_size, 0)
    prompts = [
        one.transpose(1, 2).flatten(0, 1) for one in whole
    ]  # [pages * page_size, 2, heads, D]
    of_ranks = run_ranks(
        size,
        lambda place: stored_by(path, place, page_size, most_tokens),
        context_degree=degree,
        page_size=page_size,
        cuts_rows=True,
    )
    for rank, (found, boundaries) in enumerate(of_ranks):
        for own, tokens in zip(found, prompts, strict=True):
            by_rank = tokens.view(-1, page_size, *tokens.shape[1:]).transpose(1, 2)
            heads = own.shape[3]
            at = rank // degree * heads
            mine = by_rank[rank % degree :: degree][..., at : at + heads, :]
            left = torch.full_like(own, float("nan"))
            left[: len(mine)] = mine
            torch.testing.assert_close(own, left, rtol=1e-5, atol=1e-5, equal_nan=True)
        for boundary, one in zip(boundaries, expected, strict=True):
            if one is None:
                assert boundary is None
            elif rank == 0:
                torch.testing.assert_close(boundary, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_store_what_one_stores(
    tmp_path: Path, architecture: Architecture, degree: int
) -> None:
    check(
        write_tiny_checkpoint(tmp_path, architecture, seed=3, block_size=BLOCK), degree, degree, 4
    )


@pytest.mark.parametrize(("size", "degree", "page_size"), [(4, 2, 8), (2, 2, 3), (3, 3, 2)])
def test_so_they_do_in_pages_of_all_sizes_and_with_cut_weights(
    tmp_path: Path, size: int, degree: int, page_size: int
) -> None:
    sizes = TinySizes(num_heads=8, num_kv_heads=2, head_dim=4)
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, sizes=sizes, block_size=BLOCK)
    check(path, size, degree, page_size, most_tokens=50)


@pytest.mark.parametrize("num_rows", [1, 4, 7, 8, 60, 61, 64, 4096])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [None, 4])
def test_every_row_is_on_one_rank_and_the_last_on_the_first(
    num_rows: int, degree: int, block_size: int | None
) -> None:
    ranks = runs_of_ranks(num_rows, block_size, degree)
    runs = sorted((run for of_rank in ranks for run in of_rank if run), key=lambda run: run.start)
    assert [at for run in runs for at in run] == list(range(num_rows))
    assert num_rows - 1 in ranks[0][-1]
    if block_size:
        assert not any(run.start % block_size for run in runs)


def test_ranks_have_equal_work() -> None:
    """Pairs of a row and a key that it sees, of block-causal rows."""
    work = [
        sum(at // 4 * 4 + 4 for run in of_rank for at in run)
        for of_rank in runs_of_ranks(4096, 4, 4)
    ]
    assert max(work) == min(work)
