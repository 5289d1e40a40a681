"""Log-probabilities of tokens by the model, before any change that a request asks for.

Masks are written by another number, a probability after temperature and filters (`sampling.py`).
Plain torch on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_ROWS = 256  # rows at a time: a row takes 8 bytes for each token beside its logits


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each of R rows, of the chosen token and of the K likeliest ones."""

    chosen: Tensor  # [R] fp32
    top_tokens: Tensor  # [R, K] int64, the likeliest first
    top: Tensor  # [R, K] fp32


def token_logprobs(logits: Tensor, token: Tensor, mask_token_id: int, num_top: int) -> Logprobs:
    """Log-probabilities of ``token`` [R] int64 by ``logits`` [R, V], any float dtype, in fp32: the
    softmax over all ids except the mask's. K is ``num_top``, but at most V - 1.
    """
    num_top = min(num_top, logits.shape[1] - 1)
    parts = [
        _of_rows(logits[first : first + _MOST_ROWS], token[first : first + _MOST_ROWS],
                 mask_token_id, num_top)
        for first in range(0, max(1, len(logits)), _MOST_ROWS)
    ]  # fmt: skip
    chosen, top_tokens, top = zip(*parts, strict=True)
    return Logprobs(torch.cat(chosen), torch.cat(top_tokens), torch.cat(top))


def _of_rows(
    logits: Tensor, token: Tensor, mask_token_id: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    allowed = logits.to(torch.float32, copy=True)
    allowed[:, mask_token_id] = float("-inf")
    logprob = allowed.log_softmax(dim=-1)
    top, top_tokens = logprob.topk(num_top, dim=-1)
    return logprob.gather(1, token[:, None]).squeeze(1), top_tokens, top
