"""Each operator as it is defined, in plain steps that are slow and easy to check."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from effuse.kernels.experts import Routes
from effuse.kernels.experts_routing import Routing
from effuse.kernels.sampling import (
    KEY_STEP_0,
    KEY_STEP_1,
    LOW_32,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ROUNDS,
    gumbel_noise,
)
from effuse.kernels.values import Candidates, LogitEdits, RowSampling, ScoreCode


def block_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    mask: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Plain reference for one sequence with an explicit mask, in the dtype of its inputs.

    q [T, Hq, D]; k, v [T, Hkv, D]; k_context, v_context [C, Hkv, D]; mask [T, C + T] bool, True
    where the row sees the key. Every row must see a key.
    """
    groups = q.shape[1] // k.shape[1]
    keys = torch.cat([k_context, k]).repeat_interleave(groups, dim=1)
    values = torch.cat([v_context, v]).repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values)


def visibility_mask(length: int, context: int, block_origin: int, block_size: int) -> Tensor:
    """The mask [length, context + length] that `AttentionBatch` describes in words."""
    position = torch.arange(context, context + length)
    block = ((position - block_origin) // block_size).clamp(min=-1)
    in_flight = block[:, None] >= block[None, :]
    return torch.cat([torch.ones(length, context, dtype=torch.bool), in_flight], dim=1)


def store_kv_ref(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`store_kv` as a loop over rows."""
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[1])
            k_cache[page, offset] = k[row]
            v_cache[page, offset] = v[row]


def store_distinct_ref(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`store_kv` of the distinct layout, element by element, from the layout's definition."""
    x, page_size = k_cache.shape[4], v_cache.shape[3]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        for d in range(k.shape[2]):
            k_cache[page, :, d // x, offset, d % x] = k[row, :, d]
            v_cache[page, :, d, offset] = v[row, :, d]


def rotary_ref(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [T, H, D] pair by pair as complex numbers, from the definition (Su et al., 2021)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * frequency)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn[:, None, :]
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(x.dtype)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` exactly as defined (Zhang and Sennrich, 2019)."""
    values = x.float() if x.dtype != torch.float64 else x
    scale = torch.sqrt((values * values).mean(dim=-1, keepdim=True) + eps)
    return (values / scale).to(x.dtype) * weight


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """`swiglu` exactly as defined (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def route_ref(logits: Tensor, bias: Tensor | None, routing: Routing) -> Routes:
    """`route` row by row, exactly as defined."""
    experts, weights = [], []
    for row in logits.double():
        scores = row.softmax(0) if routing.scores == "softmax" else 1 / (1 + (-row).exp())
        choice = (scores if bias is None else scores + bias.double()).tolist()
        allowed = _allowed_ref(choice, routing)
        chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: routing.top_k]
        total = sum(float(scores[expert]) for expert in chosen) if routing.renormalises else 1.0
        shared = range(routing.num_experts, routing.num_weights)
        experts.append([*chosen, *shared])
        weights.append(
            [float(scores[e]) / total * routing.scale for e in chosen] + [1.0] * len(shared)
        )
    width = routing.num_picks
    return Routes(
        torch.tensor(experts, dtype=torch.int32).view(-1, width),
        torch.tensor(weights, dtype=logits.dtype).view(-1, width),
    )


def expert_mlp_ref(x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes) -> Tensor:
    """`expert_mlp` pick by pick, exactly as defined, in the dtype of x."""
    out = torch.zeros_like(x)
    for row, (experts, weights) in enumerate(zip(routes.experts, routes.weights, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
            activated = swiglu_ref(functional.linear(x[row : row + 1], gate_up[expert]))
            out[row] += weight * functional.linear(activated, down[expert])[0]
    return out


def _allowed_ref(choice: list[float], routing: Routing) -> list[int]:
    size = routing.num_experts // routing.num_groups
    groups = [choice[at : at + size] for at in range(0, len(choice), size)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(len(groups)), key=lambda group: (-worth[group], group))
    return [
        at for group in best[: routing.top_groups] for at in range(group * size, (group + 1) * size)
    ]


def sample_confidence_ref(
    logits: Tensor, sampling: RowSampling, mask_token_id: int, *, top_k_first: bool = False
) -> Candidates:
    """`sample_confidence` row by row, exactly as defined, with fp64 probabilities."""
    rows = [
        _row_ref(logits[r], sampling, r, mask_token_id, top_k_first) for r in range(len(logits))
    ]
    tokens, confidences, scores = zip(*rows, strict=True) if rows else ((), (), ())
    return Candidates(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(confidences, dtype=torch.float32),
        torch.tensor(scores, dtype=torch.float32),
    )


def _row_ref(
    logits: Tensor, sampling: RowSampling, row: int, mask_token_id: int, top_k_first: bool
) -> tuple[int, float, float]:
    temperature = float(sampling.temperature[row])
    values = logits.float() / temperature if temperature > 0 else logits.float()
    value = values.tolist()
    order = sorted(
        (token for token in range(len(value)) if token != mask_token_id),
        key=lambda token: (-value[token], token),
    )
    descending = [value[token] for token in order]
    probability = _softmax_ref(descending)
    if probability[0] == 0:
        is_entropy = sampling.score[row] == ScoreCode.NEG_ENTROPY
        return min(order), 0.0, float("-inf") if is_entropy else 0.0
    top_k = int(sampling.top_k[row]) or len(order)
    counted = probability[: _tied_ref(descending, top_k)] if top_k_first else probability
    mass = sum(counted)
    kept = _kept_ref([p / mass for p in counted], sampling.top_p[row])
    kept = _tied_ref(descending[:kept], top_k)
    total = sum(probability[:kept])
    probability = [p / total for p in probability[:kept]]
    chosen = 0
    if temperature > 0:
        own = sampling.of_rows(slice(row, row + 1))
        counters = (own.seed, own.position, own.denoise_count, own.answer_index)
        noise = gumbel_noise(*counters, len(value))
        noisy = (values + noise[0]).tolist()
        chosen = min(range(kept), key=lambda i: (-noisy[order[i]], order[i]))
    confidence = probability[chosen]
    return order[chosen], confidence, _score_ref(probability, confidence, int(sampling.score[row]))


def _tied_ref(descending: list[float], top_k: int) -> int:
    """How many of these values top-k keeps: the first k, and those that equal the k-th."""
    return sum(value >= descending[min(top_k, len(descending)) - 1] for value in descending)


def _kept_ref(descending: list[float], top_p: Tensor) -> int:
    """How many of these probabilities top-p keeps; compared in the dtype of ``top_p``."""
    if top_p >= 1:
        return len(descending)
    mass_before = torch.tensor([0.0, *accumulate(descending[:-1])], dtype=torch.float64)
    return max(1, int((mass_before.to(top_p.dtype) <= top_p).sum()))


def _softmax_ref(descending: list[float]) -> list[float]:
    if descending[0] == float("-inf"):
        return [0.0] * len(descending)
    weights = torch.tensor([x - descending[0] for x in descending], dtype=torch.float64).exp()
    probability: list[float] = (weights / weights.sum()).tolist()
    return probability


def _score_ref(probability: list[float], confidence: float, kind: int) -> float:
    if kind == ScoreCode.MARGIN:
        return probability[0] - (probability[1] if len(probability) > 1 else 0.0)
    if kind == ScoreCode.NEG_ENTROPY:
        values = torch.tensor(probability, dtype=torch.float64)
        return float(torch.special.xlogy(values, values).sum())
    return confidence


def edit_logits_ref(logits: Tensor, edits: LogitEdits, mask_token_id: int) -> Tensor:
    """`edit_logits` entry by entry, exactly as defined, in fp64."""
    changed = logits.double()
    for row in range(len(changed)):
        for entry in range(int(edits.begin[row]), int(edits.end[row])):
            token, penalty = int(edits.token[entry]), float(edits.penalty[entry])
            value = float(changed[row, token])
            scaled = value / penalty if value > 0 else value * penalty
            changed[row, token] = scaled + float(edits.add[entry])
        allowed = [value for i, value in enumerate(changed[row].tolist()) if i != mask_token_id]
        floor = max(allowed) - float(edits.gap[row])
        changed[row][changed[row] < floor] = float("-inf")
    return changed


def token_logprobs_ref(
    logits: Tensor, token: Tensor, mask_token_id: int, num_top: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """`token_logprobs` row by row, as defined: of the token, and (id, value) of the top."""
    found = []
    for row, chosen in zip(logits.double().tolist(), token.tolist(), strict=True):
        values = {i: value for i, value in enumerate(row) if i != mask_token_id}
        peak = max(values.values())
        total = math.log(sum(math.exp(value - peak) for value in values.values())) + peak
        best = sorted(values, key=lambda i: -values[i])[:num_top]
        found.append((values[chosen] - total, [(i, values[i] - total) for i in best]))
    return found


def philox_4x32_ref(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """`philox_4x32` on Python integers."""
    c0, c1, c2, c3 = counter
    key_0, key_1 = seed & LOW_32, seed >> 32
    for _ in range(ROUNDS):
        high_0, low_0 = divmod(c0 * MULTIPLIER_0, 1 << 32)
        high_1, low_1 = divmod(c2 * MULTIPLIER_1, 1 << 32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + KEY_STEP_0) & LOW_32, (key_1 + KEY_STEP_1) & LOW_32
    return c0, c1, c2, c3
