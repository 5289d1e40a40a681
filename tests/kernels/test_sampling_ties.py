"""Logits that are equal at the cut of top-k or of top-p: the authors' rule, and every path of ours.

The rule in the plainest words. SDAR and LLaDA2 apply top-k and then top-p, Dream the other way
round. Top-k drops values below the k-th. Top-p drops a token if the tokens before it hold more than
that share.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from operators import sampling
from operators.references import sample_confidence_ref
from operators.sampling import MASK, Case
from oracle.sampling import candidate
from oracle.settings import Settings
from torch import Tensor

from effuse.kernels.sampling import sample_confidence
from effuse.kernels.values import ScoreCode

FAMILIES = {"sdar": True, "llada2": True, "dream": False}
"""Whether top-k comes first."""
LIMITS = [(20, 1.0), (3, 1.0), (5, 0.75), (4, 0.5)]
"""top-k and top-p; the last two cut at a power of two of the mass of equals."""
VOCAB_SIZE = 64
TEMPERATURE = 0.5  # divides without rounding
CASES = list(
    product(FAMILIES, [torch.float32, torch.bfloat16], LIMITS, ["at_the_kth", "all_equal"])
)


def tied_row(kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """[V] of which many are equal; sorted by id so that no order of equals is special."""
    if kind == "all_equal":
        row = torch.full((VOCAB_SIZE,), -torch.inf)
        row[8:16] = 1.0
        return row.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCAB_SIZE, generator=generator) * 3).round().div(2).to(dtype)


def by_the_authors(row: Tensor, top_k: int, top_p: float, top_k_first: bool) -> Tensor:
    """Probabilities [V] of one row, in fp32."""
    values = row.float() / TEMPERATURE
    values[MASK] = -torch.inf

    def largest(values: Tensor) -> Tensor:
        return torch.where(values < values.topk(top_k).values[-1], -torch.inf, values)

    def likely(values: Tensor) -> Tensor:
        if top_p == 1:
            return values
        order = values.argsort(descending=True, stable=True)
        reached = values[order].softmax(0).cumsum(0)
        kept = torch.full_like(values, -torch.inf)
        for rank, token in enumerate(order):
            if rank == 0 or reached[rank - 1] <= top_p:
                kept[token] = values[token]
        return kept

    kept = likely(largest(values)) if top_k_first else largest(likely(values))
    return kept.softmax(0)


def test_there_are_48_cases_and_ties_at_the_cut_in_most() -> None:
    assert len(CASES) == 48
    wide = 0
    for family, dtype, (top_k, top_p), kind in CASES:
        wanted = by_the_authors(tied_row(kind, dtype, top_k), top_k, top_p, FAMILIES[family])
        wide += int((wanted > 0).sum()) > top_k
    assert wide > 16


@pytest.mark.parametrize(("family", "dtype", "limits", "kind"), CASES)
def test_kept_are_those_that_the_authors_keep(
    family: str, dtype: torch.dtype, limits: tuple[int, float], kind: str
) -> None:
    """By the entropy of the kept tokens, and by the probability of the drawn one among them."""
    (top_k, top_p), top_k_first = limits, FAMILIES[family]
    row = tied_row(kind, dtype, top_k)
    wanted = by_the_authors(row, top_k, top_p, top_k_first)
    entropy = torch.special.xlogy(wanted, wanted).sum()
    case = Case(TEMPERATURE, top_p, top_k, ScoreCode.NEG_ENTROPY, rows=50)
    settings = sampling.make_sampling([case], torch.Generator().manual_seed(3))
    for sample in (sample_confidence, sample_confidence_ref):
        found = sample(row.expand(50, -1), settings, MASK, top_k_first=top_k_first)
        torch.testing.assert_close(found.score, entropy.expand(50))
        torch.testing.assert_close(found.confidence, wanted[found.token])


@pytest.mark.parametrize(("family", "dtype", "limits", "kind"), CASES)
def test_the_oracle_keeps_them_as_well(
    family: str, dtype: torch.dtype, limits: tuple[int, float], kind: str
) -> None:
    (top_k, top_p), top_k_first = limits, FAMILIES[family]
    row = tied_row(kind, dtype, top_k)
    wanted = by_the_authors(row, top_k, top_p, top_k_first)
    settings = Settings(temperature=TEMPERATURE, top_k=top_k, top_p=top_p, score="neg_entropy")
    found = candidate(row, settings, MASK, 5, 0, top_k_first=top_k_first)
    entropy = float(torch.special.xlogy(wanted, wanted).sum())
    assert found.score == pytest.approx(entropy, abs=1e-5)
    assert found.confidence == pytest.approx(float(wanted[found.token]), abs=1e-6)
