"""Candidates from records of shares of the vocabulary, on a GPU and of a real size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operators import sampling
from operators.paths import triton_kernels

from effuse.kernels.sampling import of_shares, share_record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FREE = [case for name, case in sampling.CASES.items() if not name.startswith(("top_", "filters_"))]


@pytest.mark.parametrize("vocab_size", [304, 152_064])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_records_of_shares_give_the_candidates_of_whole_rows(count: int, vocab_size: int) -> None:
    sample = sampling.by_shares(count, share_record, of_shares)
    ops = replace(triton_kernels(torch.device("cuda")), sample_confidence=sample)
    sampling.check(FREE, ops, torch.float32, vocab_size)
    sampling.check(FREE, ops, torch.bfloat16, vocab_size)
