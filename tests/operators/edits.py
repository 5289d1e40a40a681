"""Cases of logit edits, each a kind of row, and the check against the entry-by-entry reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from effuse.kernels.values import LogitEdits
from operators.references import edit_logits_ref
from operators.sampling import MASK

Edit = Callable[[Tensor, LogitEdits, int], Tensor]
INF = math.inf


@dataclass(frozen=True, slots=True)
class EditCase:
    """One row: its entries (token, penalty, add), and how far below the largest is kept."""

    entries: tuple[tuple[int, float, float], ...] = ()
    gap: float = INF
    logits: str = "normal"


MANY = tuple((token, 1.0 + token / 100, -token / 50) for token in range(5, 295))
CASES = {
    "nothing": EditCase(),
    "bias": EditCase(((0, 1.0, 2.5), (299, 1.0, -100.0))),
    "penalties": EditCase(((1, 1.5, -0.75), (2, 0.5, 0.25), (7, 3.0, 0.0))),
    "barred": EditCase(((4, 1.0, -INF), (17, 2.0, -INF))),
    "more_than_a_chunk": EditCase(MANY),
    "min_p": EditCase(gap=1.5),
    "min_p_keeps_the_largest_alone": EditCase(gap=0.0),
    "min_p_after_entries": EditCase(((9, 1.0, 50.0), (8, 1.0, 49.5)), gap=1.0),
    "min_p_beside_a_barred_mode": EditCase(((0, 1.0, -INF),), gap=0.8, logits="zero_largest"),
    "min_p_passes_over_the_mask": EditCase(gap=1.5, logits="mask_largest"),
    "nothing_is_finite": EditCase(((3, 2.0, 1.0),), gap=0.5, logits="all_minus_inf"),
}


def check(cases: list[EditCase], edit: Edit, device: torch.device, vocab_size: int) -> None:
    """All `cases` in one call; every second row shares the entries of the one before."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.cat([_logits(case, vocab_size, generator) for case in cases])
    edits = make_edits(cases)
    given = logits.to(device)
    moved = LogitEdits(*(getattr(edits, field.name).to(device) for field in fields(edits)))
    found = edit(given, moved, MASK)
    assert torch.equal(given.cpu(), logits), "the logits were written to"
    wanted = edit_logits_ref(logits, edits, MASK)
    assert found.dtype == torch.float32
    changed = (wanted != logits) & wanted.isfinite()
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.cpu()[~changed], wanted[~changed].float())


def make_edits(cases: list[EditCase]) -> LogitEdits:
    entries = [entry for case in cases for entry in case.entries]
    counts = torch.tensor([len(case.entries) for case in cases])
    end = counts.cumsum(0)
    token, penalty, add = zip(*entries, strict=True) if entries else ((), (), ())
    return LogitEdits(
        begin=(end - counts).int(),
        end=end.int(),
        token=torch.tensor(token, dtype=torch.int32),
        penalty=torch.tensor(penalty, dtype=torch.float32),
        add=torch.tensor(add, dtype=torch.float32),
        gap=torch.tensor([case.gap for case in cases], dtype=torch.float32),
    )


def _logits(case: EditCase, vocab_size: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(1, vocab_size, generator=generator) * 2
    match case.logits:
        case "normal":
            return normal
        case "zero_largest":
            return normal.index_fill(1, torch.tensor([0]), 50.0)
        case "mask_largest":
            return normal.index_fill(1, torch.tensor([MASK]), 50.0)
        case "all_minus_inf":
            return torch.full_like(normal, -INF)
    raise ValueError(case.logits)
