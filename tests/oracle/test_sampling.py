"""Filters, ties, randomness and scores, each against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oracle import sampling
from oracle.sampling import candidate, gumbel, philox
from oracle.settings import Candidate, Score, Settings

MASK = 4


def draw(probabilities: list[float], mask_logit: float = 50.0, **knobs: object) -> Candidate:
    """Candidate for logits that are the logs of `probabilities`, then the mask's logit."""
    row = torch.tensor([math.log(p) for p in probabilities] + [mask_logit])
    settings = Settings(**knobs)  # type: ignore[arg-type]
    return candidate(row, settings, MASK, position=5, denoise_count=0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Vectors published with Random123."""
    a, b, c, d = (np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox((a, b, c, d), key)) == expected


def test_noise_takes_words_of_its_counter() -> None:
    noise = gumbel(6, seed=3 + (5 << 32), position=11, denoise_count=2, answer_index=1)
    quad, position, count, answer = (np.array([x], dtype=np.uint64) for x in (1, 11, 2, 1))
    word = int(philox((quad, position, count, answer), (3, 5))[1][0])
    uniform = (word >> 8) * 2.0**-24 + 2.0**-25
    assert noise[5].item() == pytest.approx(-math.log(-math.log(uniform)))
    assert noise.shape == (6,)


def test_greedy_takes_the_lowest_of_equals_and_never_the_mask() -> None:
    found = draw([0.1, 0.4, 0.4, 0.1])
    assert found.token == 1
    assert found.confidence == pytest.approx(0.4, abs=1e-6)


def test_allowing_the_mask_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "forbid", lambda row, mask_token_id: row.float())
    with pytest.raises(AssertionError):
        test_greedy_takes_the_lowest_of_equals_and_never_the_mask()


@pytest.mark.parametrize(
    ("knobs", "confidence"),
    [
        ({"top_k": 2}, 0.5 / 0.8),
        ({"top_p": 0.75}, 0.5 / 0.8),
        ({"top_p": 0.85}, 0.5 / 0.9),
        ({"top_p": 0.1}, 1.0),
        ({"top_p": 0.85, "top_k": 2}, 0.5 / 0.8),
        ({"top_k": 9}, 0.5),
    ],
)
def test_filters_renormalise(knobs: dict[str, float], confidence: float) -> None:
    """A token stays while the mass strictly before it is below top-p."""
    found = draw([0.3, 0.5, 0.1, 0.1], **knobs)
    assert found.token == 1
    assert found.confidence == pytest.approx(confidence, abs=1e-6)


def test_top_p_is_of_what_top_k_left_where_that_comes_first() -> None:
    """0.4 is less than 0.55 of all, so that one more is kept, and more than 0.55 of the 0.7 that
    two hold.
    """
    row = torch.tensor([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)] + [50.0])
    for top_k_first, confidence in ((False, 0.4 / 0.7), (True, 1.0)):
        settings = Settings(top_p=0.55, top_k=2)
        found = candidate(row, settings, MASK, 5, 0, top_k_first=top_k_first)
        assert found.confidence == pytest.approx(confidence, abs=1e-6)


def test_temperature_comes_before_top_p() -> None:
    """At temperature 0.5 the square of the odds: 0.64 / 0.68 is enough for 0.9."""
    found = draw([0.8, 0.1, 0.1, 1e-9], temperature=0.5, top_p=0.9)
    assert (found.token, found.confidence) == (0, 1.0)
    assert draw([0.8, 0.1, 0.1, 1e-9], top_p=0.9).confidence == pytest.approx(0.8 / 0.9, abs=1e-6)


@pytest.mark.parametrize(
    ("score", "value"),
    [
        ("confidence", 0.5),
        ("margin", 0.2),
        ("neg_entropy", 0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.1)),
    ],
)
def test_scores(score: Score, value: float) -> None:
    found = draw([0.3, 0.5, 0.1, 0.1], score=score)
    assert found.score == pytest.approx(value, abs=1e-6)
    assert found.confidence == pytest.approx(0.5, abs=1e-6)


def test_drawn_tokens_follow_the_distribution_and_carry_their_own_probability() -> None:
    odds = [0.3, 0.5, 0.1, 0.1]
    row = torch.tensor([math.log(p) for p in odds] + [50.0])
    settings = Settings(temperature=1.0, seed=1)
    drawn = [candidate(row, settings, MASK, p, p % 3) for p in range(2000)]
    for token, probability in enumerate(odds):
        share = sum(c.token == token for c in drawn) / len(drawn)
        assert share == pytest.approx(probability, abs=0.04)
    assert all(c.confidence == pytest.approx(odds[c.token], abs=1e-6) for c in drawn)
