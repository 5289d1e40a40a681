"""Fast-dLLM v2's tokens are its authors' own loop's: part by part, the first token by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoding.engines import Answer, Rig
from decoding.published import Published, published_runs, write_published

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.denoise import FastDllmV2
from effuse.decode_worker.sequence import Block, IntArray, Sequence
from effuse.models.config import ModelConfig
from effuse.models.weights import load_model

RUNS = published_runs("fast_dllm_v2")
KINDS = sorted({(run.checkpoint, run.block_size) for run in RUNS})


def of_kind(checkpoint: int, block_size: int) -> list[Published]:
    return [run for run in RUNS if (run.checkpoint, run.block_size) == (checkpoint, block_size)]


def answers(home: Path, runs: list[Published], **rig: Any) -> tuple[Rig, list[Answer]]:
    """One engine's answers to runs of one checkpoint, all together."""
    first = runs[0]
    path = write_published(home / "m", "fast_dllm_v2", first.checkpoint, first.block_size)
    made = Rig(load_model(path), **{"num_pages": 1024} | rig)
    found = [made.start(run.request(str(number))) for number, run in enumerate(runs)]
    made.run()
    return made, found


def test_the_runs_meet_what_they_are_for() -> None:
    assert len(RUNS) == 72 and {size for _, size in KINDS} == {8, 16, 32}
    parts = {(run.block_size, run.settings["block_length"]) for run in RUNS}
    assert parts == {(32, 8), (16, 4), (8, 4), (8, 8)}
    aligned = [run for run in RUNS if len(run.prompt) % run.block_size == 0]
    short = [run for run in RUNS if len(run.prompt) < run.block_size]
    drawn = [run for run in RUNS if run.temperature]
    stopped = [run for run in RUNS if len(run.tokens) < run.max_tokens]
    assert min(map(len, (aligned, short, drawn, stopped))) >= 12
    assert any(run.temperature and len(run.tokens) > run.block_size for run in RUNS)


@pytest.mark.parametrize(("checkpoint", "block_size"), KINDS)
def test_tokens_are_those_of_the_authors_loop(
    tmp_path: Path, checkpoint: int, block_size: int
) -> None:
    runs = of_kind(checkpoint, block_size)
    _, found = answers(tmp_path, runs)
    for run, answer in zip(runs, found, strict=True):
        assert list(answer.token_ids) == run.tokens, run


def test_preempted_requests_give_the_same_tokens(tmp_path: Path) -> None:
    runs = of_kind(1, 8)
    rig, found = answers(tmp_path, runs, num_pages=12)
    assert rig.engine.counters.preemptions > 0
    for run, answer in zip(runs, found, strict=True):
        assert list(answer.token_ids) == run.tokens, run


def nothing_is_greedy(sequence: Sequence, block: Block) -> bool:
    return False


def all_masks(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
    return sequence.masks(block)


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (FastDllmV2, "is_greedy", nothing_is_greedy),
        (FastDllmV2, "proposals", all_masks),
        (ModelConfig, "shift_logits", False),
    ],
    ids=["drawn", "whole", "unshifted"],
)
def test_what_was_otherwise_is_noticed(
    tmp_path: Path, owner: object, name: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    runs = of_kind(2, 16)
    _, found = answers(tmp_path, runs)
    assert [list(answer.token_ids) for answer in found] != [run.tokens for run in runs]
