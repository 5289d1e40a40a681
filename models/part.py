"""Input and output of the model runner for one sequence in one forward, and its interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effuse.config.decoding import Sampling
from effuse.kernels.sampling_llada import LladaDraw
from effuse.kernels.values import ScoreCode

GREEDY: Final = Sampling()


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Changes of the logits of N different ids, as in `LogitEdits`."""

    token_ids: NDArray[np.int64]  # [N]
    penalties: NDArray[np.float32]  # [N]
    added: NDArray[np.float32]  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEdits:
    """Changes of a part's logits before tokens are drawn from them."""

    edits: TokenEdits
    early: TokenEdits  # replaces `all` for candidates at positions before `early_end`
    early_end: int
    min_p: float  # share of the likeliest token's probability; 0 keeps all


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's rows in a forward: positions start .. start + len(token_ids) - 1."""

    token_ids: Sequence[int]
    start: int  # the number of cached tokens before the rows, which all rows see
    pages: Sequence[int]  # cover all cached and stored tokens, in order
    num_stored: int  # K and V of the first num_stored rows, except `unstored`, are stored
    block_origin: int
    candidates: Sequence[int] = ()  # absolute positions that need a candidate
    denoise_counts: Sequence[int] = ()  # parallel to candidates: forwards that denoised its block
    boundary: Tensor | None = None  # [H] hidden row of position start - 1 (shifting models)
    keep_boundary: bool = False  # return the hidden row of position start + num_stored - 1
    sampling: Sampling = GREEDY
    score: ScoreCode = ScoreCode.CONFIDENCE
    draw: LladaDraw | None = None  # settings of LLaDA's draws, instead of sampling and score
    num_behind: int = 0  # tokens after the rows that are cached right after those before them
    unstored: range = range(0)  # rows that are not stored
    guidance: float = 0.0  # above 0, its logits are moved away from those of the next part
    num_logprobs: int | None = None  # most likely ids to return with log-probabilities; None: none
    edits: PartEdits | None = None  # changes of its logits, applied after guidance
    replica: int = 0  # that has its pages and computes it


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """For each candidate: its token's log-probability, and the likeliest ids with theirs."""

    chosen: list[float]
    top_token_ids: list[list[int]]
    top: list[list[float]]


@dataclass(frozen=True, slots=True)
class PartResult:
    """Three lists parallel to the part's candidates, and the boundary [H] if asked for."""

    tokens: list[int]
    confidences: list[float]
    scores: list[float]
    boundary: Tensor | None
    logprobs: HostLogprobs | None = None  # if the part asked for them


class Forward(Protocol):
    """The part of the model runner that every engine uses."""

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results in the order of the parts."""


class PromptForward(Forward, Protocol):
    """A forward whose stored layers can be followed."""

    def progress(self) -> Callable[[], int | None]:
        """A function that any thread may call: how many groups of layers the next forward has
        stored."""


BegunT = TypeVar("BegunT")


class Pipeline(Protocol[BegunT]):
    """Forwards over stages of which each computes another one. They end in their order."""

    most_begun: int

    def num_parts(self, num_requests: int) -> int:
        """Forwards into which so many requests are best divided."""

    def begin(self, parts: Sequence[Part]) -> BegunT:
        """Begins a forward."""

    def end(self, begun: BegunT) -> list[PartResult]:
        """Its results, in the order of the parts; waits for it."""
