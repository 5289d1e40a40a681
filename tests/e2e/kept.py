"""Tiny checkpoints on which the authors' own code was run, and the tokens that it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decoding.published import published_runs, write_published
from llada2_answers import answered, edited, write_answered_checkpoint
from sdar_answers import sdar_runs, write_sdar_checkpoint

from effuse.client.params import Params

FAST_DLLM_CHECKPOINTS = {32: 2, 8: 1}  # seeds of those with the most runs, by the size of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A run of the authors' code: a client's request, and the resulting tokens."""

    prompt: Sequence[int]
    params: Params
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny checkpoint with blocks of this size, and all that is kept of it."""

    write: Callable[[Path, int], Path]
    runs: Callable[[int], list[Kept]]
    block_size: int


def sdar(block_size: int) -> list[Kept]:
    """Block diffusion of SDAR's generate.py."""
    return [
        Kept(
            prompt=run.prompt,
            params=Params(
                max_tokens=run.max_tokens,
                stop_token_ids=tuple(run.stops),
                ignore_eos=True,
                algorithm="block_diffusion",
                **run.sampling,
                **run.settings,
            ),
            tokens=run.tokens,
        )
        for run in sdar_runs(block_size)
    ]


def llada2(block_size: int) -> list[Kept]:
    """LLaDA2.0's, and LLaDA2.1's that edit, beside each other."""
    return [
        Kept(
            prompt=run.prompt,
            params=Params(
                max_tokens=run.gen,
                stop_token_ids=(run.stop,),
                ignore_eos=True,
                algorithm="block_diffusion",
                confidence_threshold=run.threshold,
                denoising_steps=run.steps,
                editing_threshold=run.editing,
                max_post_steps=run.post_steps,
                **run.sampling,
            ),
            tokens=run.answer,
        )
        for run in [*answered(), *edited()]
        if run.block == block_size
    ]


def fast_dllm_v2(block_size: int) -> list[Kept]:
    """Fast-dLLM v2's batch_sample."""
    checkpoint = FAST_DLLM_CHECKPOINTS[block_size]
    return [
        Kept(prompt=run.prompt, params=run.params(), tokens=run.tokens)
        for run in published_runs("fast_dllm_v2")
        if (run.checkpoint, run.block_size) == (checkpoint, block_size)
    ]


def canvas(architecture: Literal["llada", "dream"]) -> Family:
    """Both loops over a whole canvas: the family's own, and Fast-dLLM's with its caches."""

    def runs(_: int) -> list[Kept]:
        return [
            Kept(prompt=run.prompt, params=run.params(), tokens=run.tokens)
            for run in [*published_runs(architecture), *published_runs("fast_dllm")]
            if (run.architecture, run.checkpoint) == (architecture, 1)
        ]

    return Family(
        lambda path, block_size: write_published(path, architecture, 1, block_size), runs, 8
    )


def write_fast_dllm_v2(path: Path, block_size: int) -> Path:
    """Its directory."""
    checkpoint = FAST_DLLM_CHECKPOINTS[block_size]
    return write_published(path, "fast_dllm_v2", checkpoint, block_size)


SDAR = Family(write_sdar_checkpoint, sdar, 16)
LLADA2, LLADA2_SMALL = (Family(write_answered_checkpoint, llada2, size) for size in (32, 8))
FAST_DLLM_V2 = Family(write_fast_dllm_v2, fast_dllm_v2, 32)
