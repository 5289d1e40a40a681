"""What one request asks of the decoder: settings, sampling, stopping.

Checked values only; no defaults are chosen here (the router resolves them) and nothing is drawn.
Thresholds are kept as the float32 they become on the wire, so that every path compares alike.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

import numpy as np

MAX_WINDOW = 64
_Choice = TypeVar("_Choice", bound=StrEnum)


class RequestError(ValueError):
    """The request cannot be served as it was sent; the message says what was expected."""


class Algorithm(StrEnum):
    """How blocks are denoised."""

    D2F = "d2f"
    BLOCK_DIFFUSION = "block_diffusion"


class Score(StrEnum):
    """By what the best mask is chosen where none passes the threshold."""

    CONFIDENCE = "confidence"
    MARGIN = "margin"
    NEG_ENTROPY = "neg_entropy"


class Remasking(StrEnum):
    """In which order block diffusion fills masks."""

    LOW_CONFIDENCE_DYNAMIC = "low_confidence_dynamic"
    LOW_CONFIDENCE_STATIC = "low_confidence_static"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How the blocks of one request are denoised; the knobs of D2F (arXiv 2508.09192) and SDAR.

    Raises RequestError where a knob is out of its range.
    """

    algorithm: Algorithm
    window: int  # most ACTIVE blocks in flight
    confidence_threshold: float  # written where the confidence is strictly above
    block_add_threshold: float  # progress of the last block from which the next one is appended
    full_activation_threshold: float  # progress from which the successor must advance every step
    score: Score
    remasking: Remasking
    denoising_steps: int  # forwards a block is spread over (block diffusion)

    def __post_init__(self) -> None:
        _check_range("window", self.window, 1, MAX_WINDOW)
        for name, value in (
            ("confidence_threshold", self.confidence_threshold),
            ("block_add_threshold", self.block_add_threshold),
            ("full_activation_threshold", self.full_activation_threshold),
        ):
            _check_range(name, value, 0.0, 1.0)
            object.__setattr__(self, name, float(np.float32(value)))
        if self.denoising_steps < 1:
            raise RequestError(f"denoising_steps must be at least 1, got {self.denoising_steps}")

    @classmethod
    def from_names(
        cls,
        *,
        algorithm: str,
        window: int,
        confidence_threshold: float,
        block_add_threshold: float,
        full_activation_threshold: float,
        score: str,
        remasking: str,
        denoising_steps: int,
    ) -> Self:
        """Builds settings from the wire's names; RequestError lists the accepted ones."""
        return cls(
            algorithm=_choice(Algorithm, "algorithm", algorithm),
            window=window,
            confidence_threshold=confidence_threshold,
            block_add_threshold=block_add_threshold,
            full_activation_threshold=full_activation_threshold,
            score=_choice(Score, "score", score),
            remasking=_choice(Remasking, "remasking", remasking),
            denoising_steps=denoising_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How candidates are drawn; RequestError where a knob is out of its range."""

    temperature: float  # 0 is greedy
    top_p: float  # in (0, 1]
    top_k: int  # 0 keeps all
    seed: int  # key of the counter-based randomness, uint64

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise RequestError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}")
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("seed", self.seed, 0, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends: a length, and ids that end it and are no part of it."""

    max_tokens: int
    stop_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}")

    @classmethod
    def of(cls, max_tokens: int, stop_token_ids: Iterable[int]) -> Self:
        return cls(max_tokens, frozenset(stop_token_ids))


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}")


def _choice(kind: type[_Choice], name: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        accepted = ", ".join(kind)
        raise RequestError(f"{name} must be one of {accepted}; got {value!r}") from None
