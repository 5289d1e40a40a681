"""Tensors that belong together, as operators and their kernels take and return them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Final, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightedParts:
    """Rows [T, H] that are sums of K parts each, not yet added up."""

    parts: Tensor  # [N, H]
    # [T, K] int32: the index of each part of each row; None: K after K, in order
    places: Tensor | None
    weights: Tensor  # [T, K] fp32

    def total(self) -> Tensor:
        """[T, H], summed in fp32 in the order of the parts and rounded to their dtype."""
        (rows, count), device = self.weights.shape, self.parts.device
        places = self.places
        if places is None:
            places = torch.arange(rows * count, device=device)
        places = places.view(rows, count)
        total = torch.zeros(rows, self.parts.shape[1], device=device)
        for at in range(count):
            total.add_(self.parts[places[:, at]].float() * self.weights[:, at, None])
        return total.to(self.parts.dtype)


RECORD: Final = 8
"""Numbers that a share of the vocabulary has of a row, see `sampling.share_record`."""


class ScoreCode(IntEnum):
    """The score that ranks candidates if no confidence passes the threshold; larger is better."""

    CONFIDENCE = 0
    MARGIN = 1
    NEG_ENTROPY = 2


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
        return replace(self, **{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, slots=True)
class Candidates:
    """The outcome, one entry per row of logits."""

    token: Tensor  # [R] int64
    confidence: Tensor  # [R] fp32, probability of ``token`` after the filters
    score: Tensor  # [R] fp32


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The changes of R rows. Rows may share entries; no id occurs twice in a row."""

    begin: Tensor  # [R] int32, a row's first entry
    end: Tensor  # [R] int32, after its last one
    token: Tensor  # [E] int32
    # [E] fp32, above 0: divides logits above 0 and multiplies others; 1 has no effect
    penalty: Tensor
    add: Tensor  # [E] fp32, added afterwards; -inf bars the id
    gap: Tensor  # [R] fp32, how far below its largest logit a row keeps logits; inf keeps all

    def of_rows(self, first: int, end: int) -> LogitEdits:
        """The changes of the rows [first, end), as views."""
        rows = slice(first, end)
        begin, behind, gap = self.begin[rows], self.end[rows], self.gap[rows]
        return replace(self, begin=begin, end=behind, gap=gap)
