"""What the model runner takes and gives for one sequence in one forward. Data, no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSampling:
    """How a part's candidates are drawn.

    `score` is 0 confidence, 1 margin, 2 negative entropy; `top_k` 0 keeps all tokens; `seed` is an
    unsigned 64-bit number; `denoise_counts` runs parallel to the part's candidates.
    """

    denoise_counts: Sequence[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    score: int = 0
    answer_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's rows in a forward: positions start .. start + len(token_ids) - 1."""

    token_ids: Sequence[int]
    start: int  # equals the number of cached tokens, which all rows see
    pages: Sequence[int]  # cover positions [0, start + num_stored)
    num_stored: int  # the first num_stored rows have their K and V stored
    block_origin: int
    candidates: Sequence[int] = ()  # absolute positions that want a candidate
    boundary: Tensor | None = None  # [H] hidden row of position start - 1 (shifting models)
    keep_boundary: bool = False  # return the hidden row of position start + num_stored - 1
    sampling: PartSampling | None = None  # needed where there are candidates


@dataclass(frozen=True, slots=True)
class PartResult:
    """Three lists parallel to the part's candidates, and the boundary [H] where it was asked."""

    tokens: list[int]
    confidences: list[float]
    scores: list[float]
    boundary: Tensor | None
