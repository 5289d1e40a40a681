"""Philox4x32-10 against the vectors published with it, and the noise made of it."""

from __future__ import annotations

import math

import pytest
import torch
from operators.references import philox_4x32_ref

from effuse.kernels.sampling import gumbel_noise, gumbel_of_words, philox_4x32

# The known-answer vectors of the Random123 distribution: counter, key, result.
ONES = 0xFFFFFFFF
VECTORS = [
    pytest.param((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", id="zeros"),
    pytest.param((ONES,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd", id="ones"),
    pytest.param(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        "d16cfe09 94fdcceb 5001e420 24126ea1",
        id="pi",
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, int, int, int], seed: int, expected: str) -> None:
    words = [int(word, 16) for word in expected.split()]
    assert list(philox_4x32_ref(counter, seed)) == words
    signed = seed - 2**64 if seed >= 2**63 else seed
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    found = philox_4x32((c0, c1, c2, c3), torch.tensor([signed]))
    assert [int(word) for word in found] == words


def test_noise_of_a_token_is_its_word_of_its_counter() -> None:
    seed, position, denoise_count, answer_index = -(2**62) + 12345, 77, 5, 2
    row = torch.tensor([[seed], [position], [denoise_count], [answer_index]])
    noise = gumbel_noise(row[0], row[1], row[2], row[3], 10)
    for token in range(10):
        words = philox_4x32_ref((token // 4, position, denoise_count, answer_index), seed + 2**64)
        uniform = (words[token % 4] >> 8) * 2.0**-24 + 2.0**-25
        assert noise[0, token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


def test_noise_is_finite_for_every_word() -> None:
    extremes = gumbel_of_words(torch.tensor([0, 255, 256, 2**31, 2**32 - 256, 2**32 - 1]))
    assert torch.isfinite(extremes).all()
    assert extremes.max().item() == pytest.approx(25 * math.log(2), rel=1e-6)
