"""Logit edits on the torch path: the reference, 16-bit logits, shared entries, the effect of
NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operators import edits
from operators.edits import CASES, EditCase, make_edits
from operators.sampling import MASK

from effuse.kernels.sampling import edit_logits

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name: str) -> None:
    edits.check([CASES[name]], edit_logits, CPU, 300)


def test_rows_of_all_kinds_in_one_call() -> None:
    edits.check(list(CASES.values()), edit_logits, CPU, 301)


def test_rows_may_share_entries() -> None:
    one = make_edits([EditCase(((2, 2.0, 1.0),))])
    shared = replace(
        one, begin=torch.tensor([0, 0, 1]).int(), end=torch.tensor([1, 1, 1]).int(),
        gap=torch.full((3,), torch.inf),
    )  # fmt: skip
    found = edit_logits(torch.full((3, 4), 3.0), shared, MASK)
    assert found[:, 2].tolist() == [2.5, 2.5, 3.0]
    assert (found[:, [0, 1, 3]] == 3).all()


def test_sixteen_bits_are_changed_in_fp32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
    found = edit_logits(logits, make_edits([EditCase(((1, 1.0, 2**-12),))]), MASK)
    assert (found.dtype, found[0, 1].item()) == (torch.float32, 2 + 2**-12)


def test_what_is_no_number_stays_none() -> None:
    """The engine looks for it behind sampling, and must find it there."""
    logits = torch.tensor([[1.0, torch.nan, 0.0, 9.0]])
    found = edit_logits(logits, make_edits([EditCase(gap=0.5)]), MASK)
    assert found.isnan().any()
