"""Tensors that belong together, as operators and their kernels take and return them."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
