"""From logits to candidates as LLaDA draws them: Gumbel-max in fp64, surest by plain probability.

Unlike `sampling.py` the temperature changes which token is drawn and not how sure the model is of
it, and nothing is filtered. Plain torch on every device. Source: arXiv 2502.09992 and its generate;
why fp64: arXiv 2409.02908.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from effuse.kernels.sampling import Candidates
from effuse.kernels.sampling_philox import philox_4x32

_POSITION_WORDS = (1 << 32) - 1  # beyond the counters of all tokens
_MOST_ROWS = 64  # at once: the noise of one takes 8 bytes a token, several times over


@dataclass(frozen=True, slots=True, kw_only=True)
class LladaDraw:
    """How the rows of one sequence are drawn."""

    temperature: float  # 0 is greedy
    seed: int  # uint64
    answer_index: int
    never: tuple[int, ...]  # ids that are not drawn
    last: tuple[int, ...]  # ids whose confidence is 0; the rest share the probability


def sample_llada(logits: Tensor, draw: LladaDraw, positions: Tensor, steps: Tensor) -> Candidates:
    """A token for each row of ``logits`` [R, V], any float dtype; all but the noise in fp32.

    ``positions`` and ``steps`` [R] int64 are the rows' places in the sequence and the forwards
    before this one. The token is the argmax of logits + temperature * Gumbel noise, computed in
    fp64 (ties: lowest id); its confidence and score are its softmax probability without
    temperature, among all ids but `never` and `last`.
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

    Token i takes words 2 * (i % 2) and the next of counter (i // 2, position, step, answer_index).
    """
    pairs = torch.arange((vocab_size + 1) // 2, device=positions.device)
    words = _words(pairs[None, :], positions[:, None], steps[:, None], answer_index, seed)
    uniform = torch.stack((_uniform(*words[:2]), _uniform(*words[2:])), dim=-1)
    return -(-uniform.view(len(positions), -1)[:, :vocab_size].log()).log()


def position_noise(
    seed: int, positions: npt.NDArray[np.int64], step: int, answer_index: int
) -> npt.NDArray[np.float64]:
    """A uniform number in (0, 1) for each position at a step, apart from all that tokens take."""
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
    """Midpoints of 2**52 equal parts of (0, 1): fp64 holds all of them, and neither end is one."""
    return ((high << 20) + (low >> 12)).double().add_(0.5).mul_(2.0**-52)
