"""Ranks draw from their shares of the vocabulary and exchange a record of each row; with a filter
they exchange logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import TinySizes, write_tiny_checkpoint
from operators.paths import triton_kernels
from operators.sampling import CASES, by_shares, check, check_not_finite, make_sampling
from thread_group import ThreadGroup, run_ranks

from effuse.kernels.sampling import of_shares, share_record
from effuse.kernels.values import Candidates
from effuse.models.group import RankPlace
from effuse.models.weights import load_model

SIZES = TinySizes(num_heads=4, num_kv_heads=2, head_dim=8)
FREE = [name for name in CASES if not name.startswith(("top_", "filters_"))]
CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [304, 71])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FREE)
def test_records_of_shares_give_the_candidates_of_whole_rows(
    name: str, count: int, vocab_size: int
) -> None:
    sample = by_shares(count, share_record, of_shares)
    check(
        [CASES[name]],
        replace(triton_kernels(CPU), sample_confidence=sample),
        torch.float32,
        vocab_size,
    )


def test_a_share_that_is_not_finite_is_found_out() -> None:
    ops = replace(triton_kernels(CPU), sample_confidence=by_shares(2, share_record, of_shares))
    check_not_finite([CASES[name] for name in ("greedy", "greedy_margin")], ops, torch.float32, 72)


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_only_filters_and_determinism_need_logits_of_other_ranks(
    tmp_path: Path, size: int, deterministic: bool, filters: bool
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=SIZES)
    cases = [CASES["greedy"], CASES["drawn_hot_entropy"]]
    cases += [CASES["top_p"], CASES["top_k_drawn"]] if filters else []
    sampling = make_sampling(cases, torch.Generator().manual_seed(1))
    alone = load_model(path)
    rows = torch.randn(len(sampling.seed), alone.config.hidden_size)
    expected = alone.candidates(rows, sampling)

    def work(place: RankPlace) -> tuple[Candidates, int]:
        model, group = load_model(path, place=place), place.group
        model.is_deterministic = deterministic
        assert isinstance(group, ThreadGroup)
        before = group.num_dealt
        return model.candidates(rows, sampling, filters=filters), group.num_dealt - before

    for found, num_dealt in run_ranks(size, work):
        assert num_dealt == (filters or deterministic)
        if deterministic:
            assert torch.equal(found.confidence, expected.confidence)
            assert torch.equal(found.score, expected.score)
        assert found.token.tolist() == expected.token.tolist()
        torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.score, expected.score, rtol=1e-5, atol=1e-5)
