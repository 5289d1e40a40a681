"""A request's changes of a row of logits before a token is drawn from it, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from oracle.settings import Settings


def edited(
    row: Tensor,
    settings: Settings,
    stops: Sequence[int],
    *,
    prompt: Sequence[int],
    answer: Sequence[int],
    at: int,
) -> Tensor:
    """The logits [V] of the position `at`, with `answer` as the final text so far."""
    row = row.float().clone()
    for token in {*prompt, *answer} if settings.repetition_penalty != 1 else ():
        value = float(row[token])
        row[token] = (
            value / settings.repetition_penalty
            if value > 0
            else value * settings.repetition_penalty
        )
    has_penalty = settings.presence_penalty or settings.frequency_penalty
    for token in set(answer) if has_penalty else ():
        row[token] -= settings.presence_penalty
        row[token] -= settings.frequency_penalty * answer.count(token)
    for token, added in settings.logit_bias:
        row[token] += added
    if at < len(prompt) + settings.min_tokens:
        row[list(stops)] = -math.inf
    return row


def likely(row: Tensor, min_p: float) -> Tensor:
    """-inf for logits whose probability is below this share of the largest one's."""
    probability = row.double().softmax(dim=-1)
    return row.masked_fill(probability < min_p * probability.max(), -math.inf)
