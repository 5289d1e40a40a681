"""Log-probabilities against the definition, on the only path that there is."""

from __future__ import annotations

import pytest
import torch
from operators.references import token_logprobs_ref

from effuse.kernels.sampling import token_logprobs

MASK = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_reference(dtype: torch.dtype) -> None:
    """More rows than are computed at once."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(300, 23, generator=generator) * 3).to(dtype)
    logits[:, MASK] = 50.0
    if dtype is torch.bfloat16:  # ties of the top have no order of their own
        logits += torch.arange(23).to(dtype) / 4
    token = torch.arange(300) % 3
    found = token_logprobs(logits, token, MASK, 4)
    wanted = token_logprobs_ref(logits, token, MASK, 4)
    chosen = torch.tensor([own for own, _ in wanted])
    torch.testing.assert_close(found.chosen, chosen, rtol=1e-5, atol=1e-5)
    top = torch.tensor([[value for _, value in best] for _, best in wanted])
    torch.testing.assert_close(found.top, top, rtol=1e-5, atol=1e-5)
    if dtype is torch.float32:
        assert found.top_tokens.tolist() == [[i for i, _ in best] for _, best in wanted]
    assert (found.top_tokens != MASK).all()


def test_of_a_small_vocabulary_and_of_no_rows() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 9.0]])
    found = token_logprobs(logits, torch.tensor([0]), MASK, 20)
    assert found.top_tokens.tolist() == [[1, 0, 2]]
    assert found.top.exp().sum().item() == pytest.approx(1)
    none = token_logprobs(logits[:0], torch.empty(0, dtype=torch.int64), MASK, 0)
    assert (none.chosen.shape, none.top.shape) == ((0,), (0, 0))
