"""SDAR's answers are those of its authors' own loop, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding.engines import Rig, make_request
from decoding.scripts import ORDERS
from sdar_answers import SdarRun, sdar_runs, write_sdar_checkpoint

from effuse.config.decoding import Sampling
from effuse.decode_worker import denoise
from effuse.decode_worker.sequence import Block
from effuse.models.config import ModelConfig
from effuse.models.weights import load_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sdar_checkpoint(tmp_path_factory.mktemp("published") / "sdar")


def answers(checkpoint: Path, runs: list[SdarRun]) -> list[list[int]]:
    """One engine's answers to runs of one block size, all together."""
    rig = Rig(load_model(checkpoint, block_size=runs[0].block_size))
    found = [
        rig.start(
            make_request(
                str(number),
                run.prompt,
                max_tokens=run.max_tokens,
                stop_token_ids=run.stops,
                sampling=Sampling(**run.sampling),
                algorithm="block_diffusion",
                **run.settings,
            )
        )
        for number, run in enumerate(runs)
    ]
    rig.run()
    return [list(answer.token_ids) for answer in found]


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_tokens_are_those_of_the_authors_loop(checkpoint: Path, block_size: int) -> None:
    runs = sdar_runs(block_size)
    assert answers(checkpoint, runs) == [run.tokens for run in runs]


def test_the_runs_meet_what_they_are_for() -> None:
    runs = sdar_runs()
    assert len(runs) == 64
    assert {run.settings["remasking"] for run in runs} == set(ORDERS)
    ragged = [run for run in runs if len(run.prompt) % run.block_size]
    stopped = [run for run in runs if len(run.tokens) < run.max_tokens]
    drawn = [run for run in runs if run.sampling["temperature"]]
    assert min(map(len, (ragged, stopped, drawn))) >= 8


def share_of_masks_at_birth(block: Block, denoising_steps: int) -> int:
    even, rest = divmod(block.masks_at_birth, denoising_steps)
    return max(1, even + (min(block.denoise_count, denoising_steps - 1) < rest))


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (denoise, "step_share", share_of_masks_at_birth),
        (ModelConfig, "top_k_first", False),
    ],
    ids=["share_of_masks_at_birth", "top_p_first"],
)
def test_what_was_otherwise_is_noticed(
    checkpoint: Path,
    owner: object,
    name: str,
    bug: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, bug)
    runs = sdar_runs(16)
    assert answers(checkpoint, runs) != [run.tokens for run in runs]
