"""From logits to one candidate token for each row, with its confidence and ranking score.

Filters (temperature, top-p, top-k), drawing and probability. The decode worker decides which
candidates are written.
"""

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from effuse.kernels.sampling_philox import gumbel_noise


class ScoreCode(IntEnum):
    """The score that ranks candidates if no confidence passes the threshold; larger is better."""

    CONFIDENCE = 0
    MARGIN = 1
    NEG_ENTROPY = 2

    @classmethod
    def named(cls, name: str) -> Self:
        """The code of confidence, margin or neg_entropy. Raises KeyError."""
        return cls[name.upper()]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings and random counters, one entry per row of logits."""

    temperature: Tensor  # [R] fp32, 0 is greedy
    top_p: Tensor  # [R] fp32, 1 keeps all
    top_k: Tensor  # [R] int32, 0 keeps all
    seed: Tensor  # [R] int64, bit pattern of a uint64
    answer_index: Tensor  # [R] int32 or int64
    position: Tensor  # [R] int32 or int64, absolute position of the token
    denoise_count: Tensor  # [R] int32 or int64, earlier forwards that denoised its block
    score: Tensor  # [R] int8, a `ScoreCode`

    def of_rows(self, rows: Tensor | slice) -> Self:
        """The entries of these rows."""
        return replace(self, **{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, slots=True)
class Candidates:
    """The outcome, one entry per row of logits."""

    token: Tensor  # [R] int64
    confidence: Tensor  # [R] fp32, probability of ``token`` after the filters
    score: Tensor  # [R] fp32


def sample_confidence(
    logits: Tensor, sampling: RowSampling, mask_token_id: int, *, top_k_first: bool = False
) -> Candidates:
    """Choose a token for every row of ``logits`` [R, V], V >= 2, any float dtype; all in fp32.

    The mask token is excluded first. Rows with temperature T > 0 are divided by T. Top-p keeps a
    token if the probability mass before it, in descending order with ties by lowest id, is at most
    top_p. Top-k then keeps the k largest of the remaining ones, and all that equal the k-th. With
    ``top_k_first`` top-k comes first, and top-p counts only the mass that top-k kept. Different
    families use different rules. The distribution is the softmax of the kept logits. T = 0 takes
    its most probable token (ties: lowest id); T > 0 draws by Gumbel-max with the noise of
    `sampling_philox.gumbel_noise`. Scores: the confidence; the difference of the two largest
    probabilities; sum of p log p. A row with only -inf gives confidence 0 and the lowest allowed
    id. A row with NaN or +inf gives a NaN confidence and any id.
    """
    rows, vocab_size = logits.shape
    if vocab_size < 2 or not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"logits {rows} x {vocab_size} have no column for mask id {mask_token_id}")
    if logits.is_cuda:
        return _launch_triton(logits, sampling, mask_token_id, top_k_first)
    kept = _kept_logits(logits, sampling, mask_token_id, top_k_first)
    token = _choose(kept, sampling, mask_token_id)
    probability = kept.softmax(dim=-1)
    probability[kept.amax(dim=-1) == float("-inf")] = 0.0
    confidence = probability.gather(1, token[:, None]).squeeze(1)
    return Candidates(token, confidence, _scores(probability, confidence, sampling.score))


def _launch_triton(
    logits: Tensor, s: RowSampling, mask_token_id: int, top_k_first: bool
) -> Candidates:
    from effuse.kernels import sampling_triton

    if logits.stride(1) != 1:
        logits = logits.contiguous()
    counters = (s.seed, s.position, s.denoise_count, s.answer_index)
    return Candidates(
        *sampling_triton.launch(
            logits,
            s.temperature,
            s.top_p,
            s.top_k,
            counters,
            s.score,
            mask_token_id,
            top_k_first=top_k_first,
        )
    )


def _kept_logits(
    logits: Tensor, sampling: RowSampling, mask_token_id: int, top_k_first: bool
) -> Tensor:
    """Scaled fp32 logits [R, V], -inf for excluded tokens."""
    kept = logits.to(torch.float32, copy=True)
    kept[:, mask_token_id] = float("-inf")
    drawn = sampling.temperature > 0
    if drawn.any():
        kept /= torch.where(drawn, sampling.temperature, 1.0)[:, None]
    vocab_size = logits.shape[1]
    limited = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    filtered = ((sampling.top_p < 1) | limited).nonzero().squeeze(1)
    if filtered.numel():
        top_k = torch.where(limited, sampling.top_k, vocab_size)
        limits = sampling.top_p[filtered], top_k[filtered]
        kept[filtered] = _filter(kept[filtered], *limits, top_k_first)
    return kept


def _filter(logits: Tensor, top_p: Tensor, top_k: Tensor, top_k_first: bool) -> Tensor:
    """``logits`` [N, V] with -inf for tokens that top-p [N] and top-k [N] drop."""
    ordered, token = logits.sort(dim=-1, descending=True, stable=True)
    if top_k_first:
        ordered = _drop_below_kth(ordered, top_k)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    beyond = (mass[:, :-1] > top_p[:, None]) & (top_p[:, None] < 1)
    ordered[:, 1:].masked_fill_(beyond, float("-inf"))
    if not top_k_first:
        ordered = _drop_below_kth(ordered, top_k)
    return torch.empty_like(logits).scatter_(1, token, ordered)


def _drop_below_kth(ordered: Tensor, top_k: Tensor) -> Tensor:
    """Descending rows [N, V] with -inf for values below the value of rank top_k [N]."""
    kth = ordered.gather(1, top_k[:, None].long() - 1)
    return ordered.masked_fill(ordered < kth, float("-inf"))


def _choose(kept: Tensor, sampling: RowSampling, mask_token_id: int) -> Tensor:
    best, token = kept.max(dim=-1)
    drawn = (sampling.temperature > 0).nonzero().squeeze(1)
    if drawn.numel():
        noise = _noise(sampling, drawn, kept.shape[1])
        token[drawn] = (kept[drawn] + noise).argmax(dim=-1)
    # If all logits are -inf, the first id wins, which may be the mask.
    return torch.where(best == float("-inf"), int(mask_token_id == 0), token)


def _noise(sampling: RowSampling, rows: Tensor, vocab_size: int) -> Tensor:
    return gumbel_noise(
        sampling.seed[rows],
        sampling.position[rows],
        sampling.denoise_count[rows],
        sampling.answer_index[rows],
        vocab_size,
    )


def _scores(probability: Tensor, confidence: Tensor, kind: Tensor) -> Tensor:
    score = confidence.clone()
    margin = (kind == ScoreCode.MARGIN).nonzero().squeeze(1)
    if margin.numel():
        top = probability[margin].topk(2, dim=-1).values
        score[margin] = top[:, 0] - top[:, 1]
    entropy = (kind == ScoreCode.NEG_ENTROPY).nonzero().squeeze(1)
    if entropy.numel():
        chosen = probability[entropy]
        negative = torch.special.xlogy(chosen, chosen).sum(dim=-1)
        # A row without any probability must not look certain.
        score[entropy] = torch.where(confidence[entropy] > 0, negative, float("-inf"))
    return score
