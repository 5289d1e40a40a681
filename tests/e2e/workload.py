"""Requests of many lengths and settings, drawn from a seed, as plain data.

The same `Job` is sent to a fleet and to the reference decoder; how either is asked is not here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from effuse.v1 import generation_pb2

_ALGORITHMS = {
    "d2f": generation_pb2.ALGORITHM_D2F,
    "block_diffusion": generation_pb2.ALGORITHM_BLOCK_DIFFUSION,
}
_SCORES = {
    "confidence": generation_pb2.SCORE_CONFIDENCE,
    "margin": generation_pb2.SCORE_MARGIN,
    "neg_entropy": generation_pb2.SCORE_NEG_ENTROPY,
}
_REMASKING = {
    "low_confidence_dynamic": generation_pb2.REMASKING_LOW_CONFIDENCE_DYNAMIC,
    "low_confidence_static": generation_pb2.REMASKING_LOW_CONFIDENCE_STATIC,
    "sequential": generation_pb2.REMASKING_SEQUENTIAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, every knob set."""

    prompt: tuple[int, ...]
    max_tokens: int
    algorithm: str
    window: int = 4
    confidence_threshold: float = 0.9
    block_add_threshold: float = 0.1
    full_activation_threshold: float = 0.95
    score: str = "confidence"
    remasking: str = "low_confidence_dynamic"
    denoising_steps: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def message(self, request_id: str | None = None) -> generation_pb2.GenerateRequest:
        """The job as a request of the public API, with token ids in the answer."""
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=generation_pb2.TokenIds(ids=self.prompt),
            sampling=generation_pb2.SamplingParams(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
            ),
            stopping=generation_pb2.StoppingParams(
                max_tokens=self.max_tokens,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
            ),
            decoding=self._decoding(),
            output=generation_pb2.OutputOptions(token_ids=True),
        )

    def _decoding(self) -> generation_pb2.DecodingParams:
        """Only the knobs that the algorithm uses: the router refuses the others."""
        shared = generation_pb2.DecodingParams(
            algorithm=_ALGORITHMS[self.algorithm],
            confidence_threshold=self.confidence_threshold,
            score=_SCORES[self.score],
        )
        if self.algorithm == "d2f":
            shared.window = self.window
            shared.block_add_threshold = self.block_add_threshold
            shared.full_activation_threshold = self.full_activation_threshold
        else:
            shared.remasking = _REMASKING[self.remasking]
            shared.denoising_steps = self.denoising_steps
        return shared


def draw_jobs(
    seed: int,
    count: int,
    algorithm: str,
    *,
    block_size: int,
    ids: Sequence[int],
    least_blocks: int = 0,
) -> list[Job]:
    """Jobs of different lengths and settings; the first prompts are shorter than a block.

    Answers may have ten blocks, and have `least_blocks` at least.
    """
    chance = random.Random(f"{seed} {algorithm}")
    jobs = []
    for number in range(count):
        shortest = 1 if number < 3 else block_size
        length = chance.randint(shortest, block_size - 1 if number < 3 else 6 * block_size)
        job = Job(
            prompt=tuple(chance.choice(ids) for _ in range(length)),
            max_tokens=chance.randint(1 + least_blocks * block_size, 10 * block_size),
            algorithm=algorithm,
            window=chance.choice([1, 2, 4, 4, 6]),
            confidence_threshold=chance.choice([0.3, 0.6, 0.9]),
            block_add_threshold=chance.choice([0.0, 0.1, 0.5]),
            full_activation_threshold=chance.choice([0.5, 0.95]),
            score=chance.choice(list(_SCORES)),
            remasking=chance.choice(list(_REMASKING)),
            denoising_steps=chance.randint(1, block_size),
        )
        jobs.append(_sampled(job, chance) if number % 4 == 3 else job)
    return jobs


def _sampled(job: Job, chance: random.Random) -> Job:
    return replace(
        job,
        temperature=chance.choice([0.5, 1.0]),
        top_p=chance.choice([0.8, 1.0]),
        top_k=chance.choice([0, 20]),
        seed=chance.getrandbits(64),
    )
