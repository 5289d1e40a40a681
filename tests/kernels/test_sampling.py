"""Candidate sampling on the torch path: the reference, the distribution, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operators import sampling
from operators.paths import public
from operators.references import sample_confidence_ref
from operators.sampling import CASES, MASK, TOP_K_FIRST, Case
from torch import Tensor

from effuse.kernels.sampling import sample_confidence
from effuse.kernels.values import RowSampling, ScoreCode

OPS = public(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES | TOP_K_FIRST)
def test_equals_reference(name: str, dtype: torch.dtype) -> None:
    sampling.check([(CASES | TOP_K_FIRST)[name]], OPS, dtype, vocab_size=97)


@pytest.mark.parametrize("cases", [CASES, TOP_K_FIRST], ids=["top_p_first", "top_k_first"])
def test_rows_of_all_settings_in_one_call(cases: dict[str, Case]) -> None:
    sampling.check(list(cases.values()), OPS, torch.float32, vocab_size=301)


def test_a_released_vocabulary() -> None:
    """The reference, too, must be linear in it: on a GPU it checks rows of every setting."""
    names = ("drawn", "top_p_drawn", "top_p_and_top_k", "drawn_hot_entropy")
    rows = [replace(CASES[name], rows=1) for name in names]
    sampling.check(rows, OPS, torch.float32, vocab_size=152_064)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_not_finite_shows_it(dtype: torch.dtype) -> None:
    for cases in (CASES, TOP_K_FIRST):
        plain = [case for case in cases.values() if case.logits == "normal"]
        sampling.check_not_finite(plain, OPS, dtype, 97)


def test_no_rows() -> None:
    empty = sampling.make_sampling([], torch.Generator())
    found = sample_confidence(torch.empty(0, 9), empty, MASK)
    assert found.token.shape == found.confidence.shape == found.score.shape == (0,)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(temperature=1.0), id="plain"),
        pytest.param(Case(temperature=0.6), id="temperature"),
        pytest.param(Case(temperature=1.5, top_k=3), id="top_k"),
        pytest.param(Case(temperature=1.0, top_p=0.8), id="top_p"),
        pytest.param(Case(temperature=1.0, top_p=0.7, top_k=3), id="top_p_and_top_k"),
        pytest.param(
            Case(temperature=1.0, top_p=0.7, top_k=3, top_k_first=True), id="top_k_and_top_p"
        ),
    ],
)
def test_draws_follow_the_filtered_distribution(case: Case) -> None:
    draws = 20_000
    logits = torch.tensor([1.0, 0.2, -0.5, 9.0, 0.7, -1.0, 2.0, 0.1])
    settings = sampling.make_sampling(
        [Case(case.temperature, case.top_p, case.top_k, rows=draws)],
        torch.Generator().manual_seed(1),
    )
    rows = logits.expand(draws, -1)
    found = sample_confidence(rows, settings, MASK, top_k_first=case.top_k_first)
    expected = filtered_probabilities(logits, case)
    counts = found.token.bincount(minlength=len(logits))
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = ((counts - draws * expected) ** 2 / (draws * expected))[kept].sum()
    # The seed is fixed; 24.3 is the 0.1 % point for seven degrees of freedom.
    assert chi_square < 24.3
    torch.testing.assert_close(found.confidence, expected[found.token].float())


def filtered_probabilities(logits: Tensor, case: Case) -> Tensor:
    values = (logits.double() / case.temperature).index_fill(0, torch.tensor([MASK]), -torch.inf)
    order = values.argsort(descending=True)
    if case.top_k_first:
        values[order[case.top_k :]] = -torch.inf
    probability = values.softmax(0)
    keep: list[int] = []
    mass = 0.0
    for token in order.tolist():
        if mass < case.top_p and len(keep) < (case.top_k or len(logits)):
            keep.append(token)
        mass += float(probability[token])
    kept = torch.zeros_like(values)
    kept[keep] = probability[keep]
    return kept / kept.sum()


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    cases = [CASES["drawn"], CASES["greedy"], CASES["top_p_drawn"]]
    generator = torch.Generator().manual_seed(2)
    logits = torch.cat([sampling.make_logits(case, 50, generator) for case in cases])
    settings = sampling.make_sampling(cases, generator)
    together = sample_confidence(logits, settings, MASK)
    for row in range(len(logits)):
        alone = sample_confidence(logits[row : row + 1], row_of(settings, row), MASK)
        assert alone.token[0] == together.token[row]
        assert alone.confidence[0] == together.confidence[row]


def row_of(s: RowSampling, row: int) -> RowSampling:
    own = slice(row, row + 1)
    return RowSampling(
        s.temperature[own],
        s.top_p[own],
        s.top_k[own],
        s.seed[own],
        s.answer_index[own],
        s.position[own],
        s.denoise_count[own],
        s.score[own],
    )


def test_mask_may_be_the_first_or_last_token() -> None:
    logits = torch.zeros(1, 5)
    settings = sampling.make_sampling([Case(rows=1)], torch.Generator())
    assert sample_confidence(logits, settings, 0).token.tolist() == [1]
    assert sample_confidence(logits, settings, 4).token.tolist() == [0]
    assert sample_confidence(logits - torch.inf, settings, 0).token.tolist() == [1]


def test_scores_have_the_meaning_of_their_names() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25, 7.0]]).log()
    expected = {
        ScoreCode.CONFIDENCE: 0.5,
        ScoreCode.MARGIN: 0.25,
        ScoreCode.NEG_ENTROPY: -1.0397207,
    }
    for score, value in expected.items():
        settings = sampling.make_sampling([Case(score=score, rows=1)], torch.Generator())
        for function in (sample_confidence, sample_confidence_ref):
            assert function(logits, settings, MASK).score.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("mask_token_id", [-1, 9])
def test_mask_id_outside_the_vocabulary_is_refused(mask_token_id: int) -> None:
    settings = sampling.make_sampling([Case(rows=2)], torch.Generator())
    with pytest.raises(ValueError, match=f"2 x 9 have no column for mask id {mask_token_id}"):
        sample_confidence(torch.zeros(2, 9), settings, mask_token_id)
