"""LLaDA's way of drawing: its noise word by word, its confidence by the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from operators.references import philox_4x32_ref

from effuse.kernels.sampling_llada import (
    LladaDraw,
    gumbel_noise_64,
    position_noise,
    sample_llada,
)

SEED = 2**64 - 12345
DRAW = LladaDraw(temperature=0.0, seed=SEED, answer_index=0, never=(9,), last=())
WHERE = torch.tensor([4, 7]), torch.tensor([3, 3])


def uniform(high: int, low: int) -> float:
    return ((high * 2**32 + low) // 2**12 + 0.5) / 2**52


def test_noise_of_a_token_is_two_words_of_its_counter() -> None:
    noise = gumbel_noise_64(SEED, *WHERE, 2, 7)
    assert noise.shape == (2, 7) and noise.dtype is torch.float64
    for row, position in enumerate((4, 7)):
        for token in range(7):
            words = philox_4x32_ref((token // 2, position, 3, 2), SEED)[2 * (token % 2) :]
            expected = -math.log(-math.log(uniform(*words[:2])))
            assert noise[row, token].item() == pytest.approx(expected, rel=1e-12)


def test_noise_of_positions_is_apart_from_that_of_tokens() -> None:
    found = position_noise(SEED, np.array([4, 7]), 3, 2).tolist()
    words = [philox_4x32_ref((2**32 - 1, position, 3, 2), SEED) for position in (4, 7)]
    assert found == [uniform(*word[:2]) for word in words]


def test_confidence_is_the_probability_without_temperature() -> None:
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))
    drawn = sample_llada(logits, replace(DRAW, temperature=1.0), *WHERE)
    noisy = logits.double() + gumbel_noise_64(SEED, *WHERE, 0, 10)
    noisy[:, 9] = -torch.inf
    assert drawn.token.tolist() == noisy.argmax(dim=1).tolist()
    assert drawn.token.tolist() != logits.argmax(dim=1).tolist(), "the noise decides nothing"
    probability = logits[:, :9].softmax(dim=1)
    expected = [probability[row, token].item() for row, token in enumerate(drawn.token.tolist())]
    assert drawn.confidence.tolist() == pytest.approx(expected)
    assert torch.equal(drawn.score, drawn.confidence)


def test_draws_follow_the_distribution() -> None:
    """Half the temperature squares the odds."""
    logits = torch.tensor([[0.0, math.log(3.0)]]).expand(4000, 2)
    where = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    draw = replace(DRAW, never=(), temperature=0.5)
    assert sample_llada(logits, draw, *where).token.float().mean().item() == pytest.approx(
        0.9, abs=0.02
    )


def test_some_ids_are_never_drawn_and_some_are_drawn_last() -> None:
    logits = torch.tensor([[5.0, 4.0, 1.0, 0.0]])
    where = torch.tensor([0]), torch.tensor([0])
    never = sample_llada(logits, replace(DRAW, never=(0,)), *where)
    assert never.token.item() == 1
    assert never.confidence.item() == pytest.approx(logits[0, 1:].softmax(0)[0].item())
    last = sample_llada(logits, replace(DRAW, never=(), last=(0, 2)), *where)
    assert (last.token.item(), last.confidence.item()) == (0, 0.0)
    other = sample_llada(logits.flip(1), replace(DRAW, never=(), last=(0, 2)), *where)
    assert other.confidence.item() == pytest.approx(torch.tensor([5.0, 1.0]).softmax(0)[0].item())
