"""Scripted candidates: a model's proposals as a pure function of position and step.

Confidences include the threshold itself and scores repeat, so that strictness and ties are met.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from effuse.config.decoding import Algorithm, DecodeSettings, Remasking, Score
from effuse.decode_worker.sequence import HostCandidates

STOP_ID = 7
MASK_ID = 3
VOCAB = 50
BY_BLOCKS: tuple[Algorithm, ...] = ("d2f", "block_diffusion")  # the others denoise a canvas
ORDERS: tuple[Remasking, ...] = (
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
    "entropy_bounded",
)  # of block diffusion
CONFIDENCES = (0.05, 0.2, 0.5, 0.5, 0.7, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Script:
    """Proposals drawn from a seed; `stop_share` of them are the stop id.

    Stretches of six positions are easy or hard, so that later blocks may be done first.
    """

    seed: int
    stop_share: float = 0.02
    boldness: float = 0.3  # share of easy stretches, in which confidences are high

    def propose(self, position: int, denoise_count: int) -> tuple[int, float, float]:
        """Token, confidence and score of one mask."""
        draw = random.Random(f"{self.seed}/{position}/{denoise_count}")
        token = STOP_ID if draw.random() < self.stop_share else draw.randrange(8, VOCAB)
        half = len(CONFIDENCES) // 2
        stretch = random.Random(f"{self.seed}/{position // 6}").random()
        easy = 0.95 if stretch < self.boldness else 0.15
        upper = draw.random() < easy
        confidence = draw.choice(CONFIDENCES[half:] if upper else CONFIDENCES[:half])
        return token, confidence, draw.choice((-0.3, -0.2, -0.1))

    def candidates(self, positions: list[int], denoise_counts: list[int]) -> HostCandidates:
        rows = [self.propose(*pair) for pair in zip(positions, denoise_counts, strict=True)]
        return HostCandidates(
            np.asarray([row[0] for row in rows], dtype=np.int64),
            np.asarray([row[1] for row in rows], dtype=np.float32),
            np.asarray([row[2] for row in rows], dtype=np.float32),
        )


def make_settings(
    algorithm: Algorithm = "d2f",
    *,
    window: int = 4,
    confidence: float = 0.9,
    add: float = 0.1,
    full: float = 0.95,
    score: Score = "confidence",
    remasking: Remasking = "low_confidence_dynamic",
    steps: int = 4,
    entropy: float = 0.35,
) -> DecodeSettings:
    """Settings with the published defaults, to be varied by name."""
    return DecodeSettings(
        algorithm=algorithm,
        window=window,
        confidence_threshold=confidence,
        block_add_threshold=add,
        full_activation_threshold=full,
        score=score,
        remasking=remasking,
        denoising_steps=steps,
        entropy_bound=entropy,
    )


@dataclass(frozen=True)
class Case:
    """One random request: shape, settings and script."""

    prompt: tuple[int, ...]
    origin: int
    block_size: int
    max_tokens: int
    settings: DecodeSettings
    script: Script


def random_case(seed: int) -> Case:
    """A case drawn from `seed`: any prompt length, anchoring, algorithm and thresholds."""
    draw = random.Random(seed)
    block_size = draw.choice((2, 4, 5, 8))
    prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 3 * block_size)))
    return Case(
        prompt=prompt,
        origin=draw.choice((0, len(prompt))),
        block_size=block_size,
        max_tokens=draw.randint(1, 6 * block_size),
        settings=make_settings(
            draw.choice(BY_BLOCKS),
            window=draw.randint(1, 5),
            confidence=draw.choice((0.5, 0.9, 1.0)),
            add=draw.choice((0.0, 0.1, 0.5, 1.0)),
            full=draw.choice((0.0, 0.5, 0.8, 0.95, 1.0)),
            remasking=draw.choice(ORDERS),
            steps=draw.randint(1, block_size),
            entropy=draw.choice((0.0, 0.35, 1.05)),
        ),
        script=Script(seed, draw.choice((0.0, 0.02, 0.1)), draw.choice((0.1, 0.4, 0.9))),
    )
