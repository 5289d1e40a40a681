"""Sampling cases, each a kind of row, and the check against the row-by-row reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from effuse.kernels.values import Candidates, RowSampling, ScoreCode
from operators.paths import Operators, Sample
from operators.references import sample_confidence_ref

MASK = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Some rows with the same settings over logits of one kind; every row gets its own counters."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    score: ScoreCode = ScoreCode.CONFIDENCE
    logits: str = "normal"
    rows: int = 4
    top_k_first: bool = False


CASES = {
    "greedy": Case(),
    "greedy_margin": Case(score=ScoreCode.MARGIN),
    "greedy_entropy": Case(score=ScoreCode.NEG_ENTROPY),
    "mask_is_the_mode": Case(logits="mask_largest"),
    "ties_take_lowest_id": Case(logits="ties", score=ScoreCode.MARGIN),
    "huge": Case(logits="huge", score=ScoreCode.NEG_ENTROPY),
    "huge_drawn": Case(logits="huge", temperature=0.5, score=ScoreCode.MARGIN),
    "half_minus_inf": Case(logits="half_minus_inf", score=ScoreCode.NEG_ENTROPY),
    "half_minus_inf_drawn": Case(logits="half_minus_inf", temperature=1.3),
    "all_minus_inf": Case(logits="all_minus_inf", score=ScoreCode.MARGIN),
    "all_minus_inf_entropy": Case(
        logits="all_minus_inf", score=ScoreCode.NEG_ENTROPY, temperature=1
    ),
    "one_finite": Case(logits="one_finite", score=ScoreCode.MARGIN, temperature=0.7),
    "one_finite_entropy": Case(logits="one_finite", score=ScoreCode.NEG_ENTROPY),
    "only_mask_finite": Case(logits="only_mask_finite"),
    "drawn": Case(temperature=0.8),
    "drawn_hot_entropy": Case(temperature=5.0, score=ScoreCode.NEG_ENTROPY),
    "drawn_margin": Case(temperature=1.0, score=ScoreCode.MARGIN),
    "top_p": Case(top_p=0.7),
    "top_p_tiny_keeps_the_mode": Case(top_p=1e-6, temperature=1.0, score=ScoreCode.MARGIN),
    "top_p_drawn": Case(top_p=0.9, temperature=1.2),
    "top_k_1": Case(top_k=1, temperature=1.0, score=ScoreCode.NEG_ENTROPY),
    "top_k_drawn": Case(top_k=5, temperature=2.0),
    "top_k_above_vocabulary": Case(top_k=10_000, temperature=1.0),
    "top_k_among_ties": Case(top_k=3, temperature=1.0, logits="ties", score=ScoreCode.MARGIN),
    "top_k_in_equals": Case(top_k=5, temperature=1.0, logits="all_equal"),
    "top_k_and_top_p_among_ties": Case(
        top_p=0.83, top_k=9, logits="ties", score=ScoreCode.NEG_ENTROPY
    ),
    "top_k_within_the_tie_of_top_p": Case(
        top_p=0.23, top_k=2, logits="ties", temperature=3.0, score=ScoreCode.NEG_ENTROPY
    ),
    "top_p_among_ties": Case(top_p=0.5, logits="all_equal", score=ScoreCode.NEG_ENTROPY),
    "top_p_and_top_k": Case(top_p=0.8, top_k=7, temperature=1.5, score=ScoreCode.NEG_ENTROPY),
    "filters_with_minus_inf": Case(top_p=0.9, top_k=9, temperature=1, logits="half_minus_inf"),
}
TOP_K_FIRST = {
    f"{name}_top_k_first": replace(case, top_k_first=True)
    for name, case in CASES.items()
    if name.startswith(("greedy", "top_", "filters_"))
} | {
    "top_k_first_as_sdar": Case(top_p=0.95, top_k=20, temperature=0.6, top_k_first=True),
    "top_k_first_keeps_less": Case(
        top_p=0.7, top_k=4, score=ScoreCode.NEG_ENTROPY, top_k_first=True
    ),
    "top_k_first_in_equals": Case(
        top_p=0.5, top_k=11, logits="all_equal", score=ScoreCode.NEG_ENTROPY, top_k_first=True
    ),
    "top_k_first_among_ties": Case(
        top_p=0.6, top_k=9, logits="ties", score=ScoreCode.NEG_ENTROPY, top_k_first=True
    ),
    "top_k_first_of_fewer": Case(
        top_p=0.8, top_k=5, logits="one_finite", temperature=1, top_k_first=True
    ),
    "top_k_first_with_minus_inf": Case(
        top_p=0.8, top_k=60, logits="half_minus_inf", top_k_first=True
    ),
}
"""The order of SDAR, a property of a whole call and not of a row."""


def check(cases: list[Case], ops: Operators, dtype: torch.dtype, vocab_size: int) -> None:
    """All ``cases`` in one call, so that rows of different settings share it."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.cat([make_logits(case, vocab_size, generator) for case in cases]).to(dtype)
    sampling = make_sampling(cases, generator)
    poisoned = logits.to(ops.device)
    (first,) = {case.top_k_first for case in cases}
    settings = to_device(sampling, ops.device)
    found = ops.sample_confidence(poisoned, settings, MASK, top_k_first=first)
    wanted = sample_confidence_ref(logits, sampling, MASK, top_k_first=first)
    assert torch.equal(poisoned.cpu(), logits), "the logits were written to"
    assert found.token.dtype == torch.int64
    assert found.token.tolist() == wanted.token.tolist()
    torch.testing.assert_close(found.confidence.cpu(), wanted.confidence, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.score.cpu(), wanted.score, rtol=2e-5, atol=5e-6)


def by_shares(
    count: int,
    record: Callable[[Tensor, RowSampling, int, int], Tensor],
    combine: Callable[[Tensor, RowSampling, int], Candidates],
) -> Sample:
    """Candidates from the records of `count` shares of the vocabulary."""

    def sample(
        logits: Tensor, settings: RowSampling, mask: int, /, *, top_k_first: bool = False
    ) -> Candidates:
        shares = logits.chunk(count, dim=1)
        firsts = [sum(one.shape[1] for one in shares[:at]) for at in range(count)]
        pairs = zip(shares, firsts, strict=True)
        records = [record(one.contiguous(), settings, mask, first) for one, first in pairs]
        return combine(torch.stack(records), settings, mask)

    return sample


NOT_FINITE = ("greedy", "greedy_margin", "drawn_hot_entropy", "top_p", "top_k_drawn")


def check_not_finite(cases: list[Case], ops: Operators, dtype: torch.dtype, size: int) -> None:
    """A row that holds NaN or infinity gives no finite confidence, whatever its settings, a token
    that exists, and leaves other rows as they are."""
    generator = torch.Generator().manual_seed(5)
    mask = size - 1  # in no tile with the first tokens, like that of released vocabularies
    logits = make_logits(Case(rows=5 * len(cases)), size, generator).to(dtype)
    logits[1::5, size - 2] = float("nan")
    logits[2::5] = float("nan")
    logits[3::5, 2:5] = float("nan")
    logits[4::5, 1] = float("inf")
    sampling = make_sampling([replace(case, rows=5) for case in cases], generator)
    (first,) = {case.top_k_first for case in cases}
    settings = to_device(sampling, ops.device)
    found = ops.sample_confidence(logits.to(ops.device), settings, mask, top_k_first=first)
    wanted = sample_confidence_ref(logits[::5], every(sampling, 5), mask, top_k_first=first)
    is_finite = found.confidence.isfinite().view(-1, 5)
    assert is_finite.tolist() == [[True, False, False, False, False]] * len(cases)
    assert ((found.token >= 0) & (found.token < size)).all()
    assert found.token.cpu()[::5].tolist() == wanted.token.tolist()


def every(s: RowSampling, step: int) -> RowSampling:
    """The settings of the first row and of each ``step``-th one behind it."""
    return RowSampling(**{field.name: getattr(s, field.name)[::step] for field in fields(s)})


def make_logits(case: Case, vocab_size: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(case.rows, vocab_size, generator=generator) * 2
    minus_inf = torch.full_like(normal, float("-inf"))
    token = vocab_size - 2
    match case.logits:
        case "normal":
            return normal
        case "mask_largest":
            return normal.index_fill(1, torch.tensor([MASK]), 50.0)
        case "ties":
            return normal.round().clamp(-2, 2)
        case "all_equal":
            return torch.zeros_like(normal)
        case "huge":
            return (normal * 1e4).clamp(-6e4, 6e4)  # beyond, float16 has only infinities
        case "half_minus_inf":
            return normal.masked_fill(torch.arange(vocab_size) % 2 == 0, float("-inf"))
        case "all_minus_inf":
            return minus_inf
        case "one_finite":
            return minus_inf.index_fill(1, torch.tensor([token]), -7.0)
        case "only_mask_finite":
            return minus_inf.index_fill(1, torch.tensor([MASK]), 1.0)
    raise ValueError(case.logits)


def make_sampling(cases: list[Case], generator: torch.Generator) -> RowSampling:
    rows = [case for case in cases for _ in range(case.rows)]
    count = len(rows)

    def integers(low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator).to(dtype)

    return RowSampling(
        temperature=torch.tensor([case.temperature for case in rows], dtype=torch.float32),
        top_p=torch.tensor([case.top_p for case in rows], dtype=torch.float32),
        top_k=torch.tensor([case.top_k for case in rows], dtype=torch.int32),
        seed=integers(-(2**63), 2**63 - 1, torch.int64),
        answer_index=integers(0, 3, torch.int32),
        position=integers(0, 4096, torch.int32),
        denoise_count=integers(0, 40, torch.int32),
        score=torch.tensor([int(case.score) for case in rows], dtype=torch.int8),
    )


def to_device(s: RowSampling, device: torch.device) -> RowSampling:
    return RowSampling(
        temperature=s.temperature.to(device),
        top_p=s.top_p.to(device),
        top_k=s.top_k.to(device),
        seed=s.seed.to(device),
        answer_index=s.answer_index.to(device),
        position=s.position.to(device),
        denoise_count=s.denoise_count.to(device),
        score=s.score.to(device),
    )
