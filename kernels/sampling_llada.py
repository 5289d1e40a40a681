"""From logits to candidates with LLaDA's rules: Gumbel-max in fp64, ranked by plain probability.

Unlike in `sampling.py`, the temperature changes the drawn token but not its confidence, and there
are no filters. Plain torch on every device. Source: arXiv 2502.09992 and its generate; reason for
fp64: arXiv 2409.02908.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from effuse.kernels.sampling import philox_4x32
from effuse.kernels.values import Candidates

_POSITION_WORDS = (1 << 32) - 1  # larger than the counters of all tokens
_MOST_ROWS = 64  # rows at a time: the noise of one row takes 8 bytes for each token, several times


@dataclass(frozen=True, slots=True, kw_only=True)
class LladaDraw:
    """How the rows of one sequence are drawn."""

    temperature: float  # 0 is greedy
    seed: int  # uint64
    answer_index: int
    never: tuple[int, ...]  # ids that are never drawn
    last: tuple[int, ...]  # ids with confidence 0; the others share the probability


def sample_llada(logits: Tensor, draw: LladaDraw, positions: Tensor, steps: Tensor) -> Candidates:
    """A token for each row of ``logits`` [R, V], any float dtype; everything except the noise in
    fp32.

    ``positions`` and ``steps`` [R] int64 are the rows' positions in the sequence and the earlier
    forwards. The token is the argmax of logits + temperature * Gumbel noise, computed in fp64
    (ties: lowest id). Its confidence and score are its softmax probability without temperature,
    among all ids except `never` and `last`.
    """
    tokens, confidences = [], []
    for first in range(0, len(logits), _MOST_ROWS):
        rows = slice(first, first + _MOST_ROWS)
        token, confidence = _sample_rows(logits[rows], positions[rows], steps[rows], draw)
        tokens.append(token)
        confidences.append(confidence)
    confidence = torch.cat(confidences)
    return Candidates(torch.cat(tokens), confidence, confidence)


def _sample_rows(
    logits: Tensor, positions: Tensor, steps: Tensor, draw: LladaDraw
) -> tuple[Tensor, Tensor]:
    kept = logits.to(torch.float32, copy=True)
    kept[:, list(draw.never)] = float("-inf")
    if draw.temperature > 0:
        noise = gumbel_noise_64(draw.seed, positions, steps, draw.answer_index, kept.shape[1])
        token = (kept.double() + draw.temperature * noise).argmax(dim=-1)
    else:
        token = kept.argmax(dim=-1)
    kept[:, list(draw.last)] = float("-inf")
    return token, kept.softmax(dim=-1).gather(1, token[:, None]).squeeze(1)


def gumbel_noise_64(
    seed: int, positions: Tensor, steps: Tensor, answer_index: int, vocab_size: int
) -> Tensor:
    """Standard Gumbel noise [R, vocab_size] fp64 from uniform numbers of 52 bits.

    Token i takes words 2 * (i % 2) and the next one of counter (i // 2, position, step,
    answer_index).
    """
    pairs = torch.arange((vocab_size + 1) // 2, device=positions.device)
    words = _words(pairs[None, :], positions[:, None], steps[:, None], answer_index, seed)
    uniform = torch.stack((_uniform(*words[:2]), _uniform(*words[2:])), dim=-1)
    return -(-uniform.view(len(positions), -1)[:, :vocab_size].log()).log()


def position_noise(
    seed: int, positions: npt.NDArray[np.int64], step: int, answer_index: int
) -> npt.NDArray[np.float64]:
    """A uniform number in (0, 1) for each position at a step, independent of the tokens'."""
    where, number = torch.from_numpy(positions), torch.tensor(step)
    words = _words(torch.tensor(_POSITION_WORDS), where, number, answer_index, seed)
    drawn: npt.NDArray[np.float64] = _uniform(*words[:2]).numpy()
    return drawn


def _words(
    first: Tensor, position: Tensor, step: Tensor, answer_index: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key = torch.tensor(seed - (seed >> 63 << 64), device=position.device)
    return philox_4x32((first, position, step, torch.full_like(step, answer_index)), key)


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    """Midpoints of 2**52 equal parts of (0, 1): exact in fp64, and never 0 or 1."""
    return ((high << 20) + (low >> 12)).double().add_(0.5).mul_(2.0**-52)
