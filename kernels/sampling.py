"""From logits to one candidate token for each row, with its confidence and ranking score.

Filters (temperature, top-p, top-k), drawing and probability. The decode worker decides which
candidates are written. Changes of logits (penalties, biases, barred ids, min-p) are a pass of their
own before, so that rows of requests without changes are not read again. Randomness has no state:
Philox4x32-10 gives the same number for the same key and counter, on every device and in every batch
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.values import Candidates, LogitEdits, RowSampling, ScoreCode

ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
KEY_STEP_0 = 0x9E3779B9
KEY_STEP_1 = 0xBB67AE85
LOW_32 = 0xFFFFFFFF
_LOGPROB_ROWS = 256  # at a time: a row takes 8 bytes for each token beside its logits

Words = tuple[Tensor, Tensor, Tensor, Tensor]


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
    `gumbel_noise`. Scores: the confidence; the difference of the two largest
    probabilities; sum of p log p. A row with only -inf gives confidence 0 and the lowest allowed
    id. A row with NaN or +inf gives a NaN confidence and any id.
    """
    rows, vocab_size = logits.shape
    if vocab_size < 2 or not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"logits {rows} x {vocab_size} have no column for mask id {mask_token_id}")
    if logits.is_cuda:
        from effuse.kernels import sampling_triton

        return sampling_triton.launch(logits, sampling, mask_token_id, top_k_first=top_k_first)
    kept = _kept_logits(logits, sampling, mask_token_id, top_k_first)
    token = _choose(kept, sampling, mask_token_id)
    probability = kept.softmax(dim=-1)
    probability[kept.amax(dim=-1) == float("-inf")] = 0.0
    confidence = probability.gather(1, token[:, None]).squeeze(1)
    return Candidates(token, confidence, _scores(probability, confidence, sampling.score))


def share_record(
    logits: Tensor, sampling: RowSampling, mask_token_id: int, first_token: int
) -> Tensor:
    """The part of each row that `of_shares` needs of logits [R, n], those of the tokens from
    ``first_token`` on, on a GPU a multiple of 4: [R, RECORD] fp32.

    The filters are not applied. A record has the largest logit, the sum of exponentials over it,
    its token; the second largest logit; the sum of e * log2(e) over those exponentials e; and of
    the draw the largest logit with noise, its token, and its logit. Columns that the row's settings
    do not need have any value. Tokens are below 2**24.
    """
    if logits.is_cuda:
        from effuse.kernels import sampling_triton

        return sampling_triton.launch_record(logits, sampling, mask_token_id, first_token)
    mask = mask_token_id - first_token
    kept = _scaled(logits, sampling, mask if 0 <= mask < logits.shape[1] else None)
    top = kept.topk(2, dim=-1)
    peak, mode = kept.max(dim=-1)
    share = (kept - peak[:, None]).exp()
    share[peak == float("-inf")] = 0.0
    total = share.sum(dim=-1)
    terms = torch.special.xlogy(share, share).sum(dim=-1) / math.log(2)
    noisy, drawn = kept.clone(), (sampling.temperature > 0).nonzero().squeeze(1)
    if drawn.numel():
        noisy[drawn] += _noise(sampling, drawn, kept.shape[1], first_token)
    highest, token = noisy.max(dim=-1)
    value = kept.gather(1, token[:, None]).squeeze(1)
    columns = peak, total, mode + first_token, top.values[:, 1], terms
    return torch.stack([*columns, highest, token + first_token, value], dim=1).float()


def of_shares(records: Tensor, sampling: RowSampling, mask_token_id: int) -> Candidates:
    """`sample_confidence` without filters, from the records [N, R, RECORD] of all shares of the
    vocabulary, in their order."""
    if records.is_cuda:
        from effuse.kernels import sampling_finish_triton

        return sampling_finish_triton.launch_shares(records, sampling, mask_token_id)
    peaks, sums, modes, seconds, terms, highest, tokens, values = records.unbind(2)
    peak, best = peaks.max(dim=0)
    fall = torch.where(sums > 0, peaks - peak, 0.0)
    total = (sums * fall.exp()).sum(dim=0)
    drawn = sampling.temperature > 0
    at = torch.where(drawn, highest.argmax(dim=0), best)[None]
    token = torch.where(drawn, tokens.gather(0, at), modes.gather(0, at))[0].long()
    value = torch.where(drawn, values.gather(0, at)[0], peak)
    confidence = (value - peak).exp() / total
    others = peaks.scatter(0, best[None], seconds.gather(0, best[None]))
    margin = (1 - (others.amax(dim=0) - peak).exp()) / total
    terms = fall.exp() * (terms + fall / math.log(2) * sums)
    entropy = terms.sum(dim=0) / total * math.log(2) - total.log()
    kinds = ((ScoreCode.MARGIN, margin), (ScoreCode.NEG_ENTROPY, entropy))
    score = confidence.clone()
    for kind, found in kinds:
        score = torch.where(sampling.score == kind, found, score)
    is_empty = peak == float("-inf")
    lowest = torch.where(sampling.score == ScoreCode.NEG_ENTROPY, float("-inf"), 0.0)
    return Candidates(
        torch.where(is_empty, int(mask_token_id == 0), token),
        torch.where(is_empty, 0.0, confidence),
        torch.where(is_empty, lowest, score),
    )


def _scaled(logits: Tensor, sampling: RowSampling, mask_token_id: int | None) -> Tensor:
    """fp32 logits [R, V] over their temperatures, -inf for the mask."""
    scaled = logits.to(torch.float32, copy=True)
    if mask_token_id is not None:
        scaled[:, mask_token_id] = float("-inf")
    drawn = sampling.temperature > 0
    if drawn.any():
        scaled /= torch.where(drawn, sampling.temperature, 1.0)[:, None]
    return scaled


def _kept_logits(
    logits: Tensor, sampling: RowSampling, mask_token_id: int, top_k_first: bool
) -> Tensor:
    """Scaled fp32 logits [R, V], -inf for excluded tokens."""
    kept = _scaled(logits, sampling, mask_token_id)
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


def _noise(sampling: RowSampling, rows: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    return gumbel_noise(
        sampling.seed[rows],
        sampling.position[rows],
        sampling.denoise_count[rows],
        sampling.answer_index[rows],
        vocab_size,
        first,
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


def philox_4x32(counter: Words, seed: Tensor) -> Words:
    """Four words of 32 bits, each as int64 in 0..2**32-1, for broadcastable int64 tensors.

    ``seed`` is the bit pattern of a uint64: its low half is the first key word, its high half the
    second. Counter words are modulo 2**32.
    """
    c0, c1, c2, c3 = (word & LOW_32 for word in counter)
    key_0, key_1 = seed & LOW_32, (seed >> 32) & LOW_32
    for _ in range(ROUNDS):
        # Products wrap around in int64; the masks below read their 64 bits as unsigned.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c2 = (
            ((product_1 >> 32) & LOW_32) ^ c1 ^ key_0,
            ((product_0 >> 32) & LOW_32) ^ c3 ^ key_1,
        )
        c1, c3 = product_1 & LOW_32, product_0 & LOW_32
        key_0, key_1 = (key_0 + KEY_STEP_0) & LOW_32, (key_1 + KEY_STEP_1) & LOW_32
    return c0, c1, c2, c3


def gumbel_noise(
    seed: Tensor,
    position: Tensor,
    denoise_count: Tensor,
    answer_index: Tensor,
    vocab_size: int,
    first: int = 0,
) -> Tensor:
    """Standard Gumbel noise [R, vocab_size] fp32 for the rows' keys and counters, each [R], of the
    tokens from ``first`` on.

    Token i takes word i % 4 of counter (i // 4, position, denoise_count, answer_index).
    """
    quads = torch.arange(first // 4, (first + vocab_size + 3) // 4, device=seed.device)
    columns = [x.long()[:, None] for x in (position, denoise_count, answer_index)]
    words = philox_4x32((quads[None, :], columns[0], columns[1], columns[2]), seed[:, None])
    word = torch.stack(words, dim=-1).view(len(seed), -1)[:, first % 4 :][:, :vocab_size]
    return gumbel_of_words(word)


def gumbel_of_words(word: Tensor) -> Tensor:
    """-log(-log(u)) as fp32, for u = (word >> 8) * 2**-24 + 2**-25 of words in 0..2**32-1.

    Computed in fp64: in fp32 the largest u would round to 1, and the noise that decides a draw is
    made of u close to 1.
    """
    uniform = (word >> 8).double() * 2.0**-24 + 2.0**-25
    return -(-uniform.log()).log().float()


def edit_logits(logits: Tensor, edits: LogitEdits, mask_token_id: int) -> Tensor:
    """The changed logits [R, V] fp32 of ``logits`` [R, V], any float dtype; the input is unchanged.

    Entries first (repetition penalty: arXiv 1909.05858), then min-p (arXiv 2407.01082): a logit
    that is more than the row's gap below the largest one (without the mask id's) becomes -inf. The
    gap is -T * log(min_p), for the row's temperature T. NaN stays NaN.
    """
    changed = logits.to(torch.float32, copy=True)
    if changed.is_cuda:
        from effuse.kernels import sampling_edits_triton

        sampling_edits_triton.launch(changed, edits, mask_token_id)
        return changed
    _apply_entries(changed, edits)
    limited = edits.gap.isfinite().nonzero().squeeze(1)
    if limited.numel():
        rows = changed[limited]
        others = rows.clone()
        others[:, mask_token_id] = float("-inf")
        floor = others.amax(dim=1) - edits.gap[limited]
        changed[limited] = rows.masked_fill(rows < floor[:, None], float("-inf"))
    return changed


def _apply_entries(changed: Tensor, edits: LogitEdits) -> None:
    counts = (edits.end - edits.begin).long()
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    within = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    entry = edits.begin.long()[row] + within
    token, penalty = edits.token[entry].long(), edits.penalty[entry]
    value = changed[row, token]
    scaled = torch.where(value > 0, value / penalty, value * penalty)
    changed[row, token] = scaled + edits.add[entry]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each of R rows, of the chosen token and of the K likeliest ones."""

    chosen: Tensor  # [R] fp32
    top_tokens: Tensor  # [R, K] int64, the likeliest first
    top: Tensor  # [R, K] fp32


def token_logprobs(logits: Tensor, token: Tensor, mask_token_id: int, num_top: int) -> Logprobs:
    """Log-probabilities of ``token`` [R] int64 by ``logits`` [R, V], any float dtype, in fp32: the
    softmax over all ids except the mask's, before any change that a request asks for. K is
    ``num_top``, but at most V - 1. Masks are written by another number, the confidence."""
    num_top = min(num_top, logits.shape[1] - 1)
    parts = [
        _logprobs_of(*some, mask_token_id, num_top)
        for some in zip(
            torch.split(logits, _LOGPROB_ROWS), torch.split(token, _LOGPROB_ROWS), strict=True
        )
    ]
    chosen, top_tokens, top = zip(*parts, strict=True)
    return Logprobs(torch.cat(chosen), torch.cat(top_tokens), torch.cat(top))


def _logprobs_of(
    logits: Tensor, token: Tensor, mask_token_id: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    allowed = logits.to(torch.float32, copy=True)
    allowed[:, mask_token_id] = float("-inf")
    logprob = allowed.log_softmax(dim=-1)
    top, top_tokens = logprob.topk(num_top, dim=-1)
    return logprob.gather(1, token[:, None]).squeeze(1), top_tokens, top
