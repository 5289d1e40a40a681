"""Block diffusion in a split fleet: the tokens of the authors' own code over either connector,
with prompts handed over. SDAR over ZMQ is test_equality.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from decoding.published import published_runs, write_published
from e2e.client import all_at_once, connect
from e2e.tiny import fleet_of
from llada2_answers import answered, edited, write_answered_checkpoint
from sdar_answers import sdar_runs, write_sdar_checkpoint

from effuse.client.params import Params, make_request

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
    kept: Callable[[int], list[Kept]]
    block_size: int


def sdar(block_size: int) -> list[Kept]:
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
    checkpoint = FAST_DLLM_CHECKPOINTS[block_size]
    return [
        Kept(prompt=run.prompt, params=run.params(), tokens=run.tokens)
        for run in published_runs("fast_dllm_v2")
        if (run.checkpoint, run.block_size) == (checkpoint, block_size)
    ]


def write_fast_dllm_v2(path: Path, block_size: int) -> Path:
    checkpoint = FAST_DLLM_CHECKPOINTS[block_size]
    return write_published(path, "fast_dllm_v2", checkpoint, block_size)


@pytest.mark.parametrize(
    ("connector", "family"),
    [
        ("nixl", Family(write_sdar_checkpoint, sdar, 16)),
        ("zmq", Family(write_answered_checkpoint, llada2, 32)),
        ("nixl", Family(write_answered_checkpoint, llada2, 8)),
        ("zmq", Family(write_fast_dllm_v2, fast_dllm_v2, 32)),
        ("nixl", Family(write_fast_dllm_v2, fast_dllm_v2, 8)),
    ],
    ids=["sdar-nixl", "llada2-zmq", "llada2-nixl", "v2-zmq", "v2-nixl"],
)
def test_tokens_are_those_of_the_authors_code(
    connector: str, family: Family, tmp_path: Path
) -> None:
    kept = family.kept(family.block_size)
    assert len(kept) > 8
    model = family.write(tmp_path / "model", family.block_size)
    with fleet_of(model, connector=connector) as fleet, connect(fleet.address) as client:
        answers = all_at_once(
            client.generate, [make_request(run.prompt, run.params, token_ids=True) for run in kept]
        )
    for run, answer in zip(kept, answers, strict=True):
        assert list(answer.token_ids) == list(run.tokens), run
        assert answer.stats.prefill_worker == "prefill-0"
        assert answer.stats.connector == connector
        assert (answer.stats.kv_pages > 0) == (len(run.prompt) >= family.block_size)
    assert any(answer.stats.kv_pages for answer in answers)
