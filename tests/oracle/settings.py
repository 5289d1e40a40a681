"""Requests and answers of the oracle. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["confidence", "margin", "neg_entropy"]
Remasking = Literal[
    "low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One request. None takes the checkpoint's block size or end ids; `denoising_steps` None is the
    block size; `tokens_per_step` is only for vanilla denoising.
    """

    algorithm: Literal["d2f", "block_diffusion", "vanilla"] = "d2f"
    max_tokens: int = 32
    block_size: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    answer_index: int = 0
    score: Score = "confidence"
    confidence_threshold: float = 0.9
    window: int = 4
    block_add_threshold: float = 0.1
    full_activation_threshold: float = 0.95
    remasking: Remasking = "low_confidence_dynamic"
    denoising_steps: int | None = None
    caps_steps: bool = False  # LLaDA2.0: a block takes no more steps than the answer has tokens
    entropy_bound: float = 0.35
    tokens_per_step: int = 1
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """The model's proposal at a position."""

    token: int
    confidence: float
    score: float


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """A block that was denoised in a step, in its state before the forward."""

    start: int
    end: int
    masks: int
    full: bool
    denoise_count: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One forward: its ACTIVE blocks, the written tokens, the settled blocks, the resulting final
    text. Candidates are those of every masked position.
    """

    blocks: tuple[BlockTrace, ...]
    candidates: dict[int, Candidate]
    writes: dict[int, int]
    settled: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(slots=True)
class Occurrences:
    """How often the cases that tests must not miss did occur."""

    semi_active_writes: int = 0
    steps_settling_several: int = 0
    blocks_waiting: int = 0
    stops_before_later_blocks: int = 0
    stops_behind_unfinished: int = 0
    fallback_writes: int = 0
    ragged_tails: int = 0
    prompts_shorter_than_block: int = 0
    cut_last_blocks: int = 0

    def add(self, other: Occurrences) -> None:
        """Sum over several runs."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The answer, without the stop id; `forwards` counts denoising forwards."""

    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    forwards: int
    steps: tuple[StepTrace, ...]
    occurred: Occurrences
