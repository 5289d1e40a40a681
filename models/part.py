"""What the model runner takes and gives for one sequence in one forward, and how it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effuse.config.decoding import Sampling
from effuse.kernels.sampling import ScoreCode
from effuse.kernels.sampling_llada import LladaDraw

GREEDY: Final = Sampling()


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """What is done to the logits of N ids, none of them twice, as `LogitEdits` has it."""

    token_ids: NDArray[np.int64]  # [N]
    penalties: NDArray[np.float32]  # [N]
    added: NDArray[np.float32]  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEdits:
    """What is done to a part's logits before tokens are drawn from them."""

    edits: TokenEdits
    early: TokenEdits  # in their place for candidates at positions before `early_end`
    early_end: int
    min_p: float  # share of the likeliest token's probability; 0 keeps all


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's rows in a forward: positions start .. start + len(token_ids) - 1."""

    token_ids: Sequence[int]
    start: int  # equals the number of cached tokens before the rows, which all rows see
    pages: Sequence[int]  # cover as many tokens as are cached and stored, in their order
    num_stored: int  # the first num_stored rows, but `unstored`, have their K and V stored
    block_origin: int
    candidates: Sequence[int] = ()  # absolute positions that want a candidate
    denoise_counts: Sequence[int] = ()  # parallel to candidates: forwards that denoised its block
    boundary: Tensor | None = None  # [H] hidden row of position start - 1 (shifting models)
    keep_boundary: bool = False  # return the hidden row of position start + num_stored - 1
    sampling: Sampling = GREEDY
    score: ScoreCode = ScoreCode.CONFIDENCE
    draw: LladaDraw | None = None  # how LLaDA draws; takes the place of sampling and score
    num_behind: int = 0  # tokens behind the rows that are cached right after those before them
    unstored: range = range(0)  # rows that are passed over in storing
    guidance: float = 0.0  # above 0 its logits are led away from those of the part that follows
    num_logprobs: int | None = None  # likeliest ids to return with log-probabilities; None: none
    edits: PartEdits | None = None  # what is changed of its logits, guidance included


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """For each candidate: of its token, and the likeliest ids with theirs."""

    chosen: list[float]
    top_token_ids: list[list[int]]
    top: list[list[float]]


@dataclass(frozen=True, slots=True)
class PartResult:
    """Three lists parallel to the part's candidates, and the boundary [H] where it was asked."""

    tokens: list[int]
    confidences: list[float]
    scores: list[float]
    boundary: Tensor | None
    logprobs: HostLogprobs | None = None  # where they were asked for


class Forward(Protocol):
    """The part of the model runner that every engine uses."""

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results in the order of the parts."""
        ...
