"""From one row of logits to a candidate: mask id out, temperature, top-p, top-k, draw, score.

With the oracle's own Philox4x32-10 (Salmon et al., 2011), in numpy.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.edits import likely
from oracle.settings import Candidate, Settings

_32_BITS = (1 << 32) - 1

Word = NDArray[np.integer]
Words = tuple[Word, Word, Word, Word]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds over four words of 32 bits, each an array of them."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (right >> 32) ^ b ^ low,
            right & _32_BITS,
            (left >> 32) ^ d ^ high,
            left & _32_BITS,
        )
        low, high = (low + 0x9E3779B9) & _32_BITS, (high + 0xBB67AE85) & _32_BITS
    return a, b, c, d


def gumbel(
    count: int, *, seed: int, position: int, denoise_count: int, answer_index: int
) -> Tensor:
    """Noise of token ids 0..count-1, [count] fp32."""
    quads = np.arange((count + 3) // 4, dtype=np.uint64)
    rest = [np.full_like(quads, word) for word in (position, denoise_count, answer_index)]
    words = philox((quads, rest[0], rest[1], rest[2]), (seed & _32_BITS, seed >> 32))
    word = np.stack(words, axis=1).reshape(-1)[:count]
    uniform = (word >> 8) * 2.0**-24 + 2.0**-25
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


def forbid(row: Tensor, mask_token_id: int) -> Tensor:
    """The mask is never a candidate."""
    row = row.float().clone()
    row[mask_token_id] = -math.inf
    return row


def candidate(
    row: Tensor,
    settings: Settings,
    mask_token_id: int,
    position: int,
    denoise_count: int,
    *,
    top_k_first: bool = False,
) -> Candidate:
    """Candidate for one position from its logits [V]."""
    row = forbid(row, mask_token_id)
    if settings.temperature > 0:
        row = row / settings.temperature
    if settings.min_p:
        row = likely(row, settings.min_p)
    kept = _filtered(row, settings, top_k_first)
    probability = kept.softmax(dim=-1)
    if settings.temperature > 0:
        noise = gumbel(
            len(row),
            seed=settings.seed,
            position=position,
            denoise_count=denoise_count,
            answer_index=settings.answer_index,
        )
        token = _first_largest(kept + noise)
    else:
        token = _first_largest(kept)
    confidence = float(probability[token])
    return Candidate(token, confidence, _score(probability, confidence, settings))


def _filtered(row: Tensor, settings: Settings, top_k_first: bool) -> Tensor:
    """-inf for tokens that top-p, then top-k drop, or top-k and then top-p of the rest. Top-p
    counts equal logits in the order of their ids; top-k keeps all that equal its last one.
    """
    if settings.top_p >= 1 and not 0 < settings.top_k < len(row):
        return row
    order: list[int] = row.sort(descending=True, stable=True).indices.tolist()
    filters = [_most_likely, _largest]
    for keep in reversed(filters) if top_k_first else filters:
        order = keep(row, order, settings)
    kept = torch.full_like(row, -math.inf)
    kept[order] = row[order]
    return kept


def _most_likely(row: Tensor, order: list[int], settings: Settings) -> list[int]:
    """Top-p: tokens before which there is no more than that share of the mass."""
    if settings.top_p >= 1:
        return order
    mass_before = [0.0, *row[order].softmax(dim=-1).cumsum(dim=-1)[:-1].tolist()]
    return order[: sum(mass <= np.float32(settings.top_p) for mass in mass_before)]


def _largest(row: Tensor, order: list[int], settings: Settings) -> list[int]:
    """Top-k: tokens that fewer than k others exceed."""
    if not 0 < settings.top_k < len(order):
        return order
    values = row.tolist()
    return [token for token in order if values[token] >= values[order[settings.top_k - 1]]]


def _first_largest(row: Tensor) -> int:
    return row.tolist().index(row.max().item())


def _score(probability: Tensor, confidence: float, settings: Settings) -> float:
    score = "neg_entropy" if settings.remasking == "entropy_bounded" else settings.score
    if score == "margin":
        first, second = probability.sort(descending=True).values[:2].tolist()
        return float(first - second)
    if score == "neg_entropy":
        held = probability[probability > 0]
        return float((held * held.log()).sum())
    return confidence
