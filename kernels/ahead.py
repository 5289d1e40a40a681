"""Weights that a small kernel fetches into the L2 cache for the product that follows it.

With few rows a product is as fast as its weights arrive, and memory idles while the kernels between
two products run. Only a hint: no result depends on it. Which weights, and how much of them, is the
model's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ahead:
    """The first `row_bytes` of each of the first `num_rows` rows of a matrix."""

    matrix: Tensor  # rows are contiguous
    num_rows: int
    row_bytes: int  # a multiple of 16


def fetch_of(weight: Tensor, most_bytes: int, *, parts: int = 1, share: float = 1.0) -> Ahead:
    """At most about `most_bytes` of `weight` [out, in]: the beginnings of its rows.

    `parts` cuts rows, for a product that begins in several places of each; `share` is the share
    of the rows that the product begins with.
    """
    matrix = weight.view(-1, weight.shape[1] // parts)
    num_rows = max(1, int(len(matrix) * share))
    whole = matrix.shape[1] * matrix.element_size()
    row_bytes = min(whole, max(128, most_bytes // num_rows)) // 128 * 128
    return Ahead(matrix, num_rows, row_bytes)


def can_overlap(device: torch.device) -> bool:
    """Whether kernels may begin before their predecessor's end, and fetch ahead: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
