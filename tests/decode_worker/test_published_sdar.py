"""SDAR's answers are those of its authors' own loop, token for token.

`decoding/published_sdar.jsonl` holds a run a line: what was asked and the tokens that came out of
`block_diffusion_generate` of github.com/JetAstra/SDAR (generate.py at commit c2041a8) with its own
modelling code, on the checkpoint below as that code saved it. Changed there were

- the mask id's logit, which is -inf here: theirs may write it;
- `torch.multinomial`, in whose place stood the mode, or the largest of log p and our noise;
- the order of equal confidences in `torch.topk`, which is left to right here;
- what is written, which was kept to masks: their `topk` takes the step's whole share where fewer
  masks are left, and so writes over the prompt or over tokens that are there;
- `entropy_bounded`, which cannot run as it stands (it writes to a name that is not set, and adds
  up over positions where it means tokens): entropies are of the distributions that are drawn from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decoding
import pytest
from checkpoints import TinySizes, write_tiny_checkpoint
from decoding.engines import Rig, make_request
from decoding.scripts import ORDERS

from effuse.config.decoding import Sampling
from effuse.decode_worker import block_diffusion
from effuse.decode_worker.sequence import Block
from effuse.models.config import ModelConfig
from effuse.models.weights import load_model

FILE = Path(next(iter(decoding.__path__))) / "published_sdar.jsonl"
SIZES = TinySizes(hidden_size=64, head_dim=16, intermediate_size=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class SdarRun:
    """One line of the file."""

    prompt: list[int]
    max_tokens: int
    stops: list[int]
    block_size: int
    sampling: dict[str, Any]
    settings: dict[str, Any]
    tokens: list[int]


RUNS = [SdarRun(**json.loads(line)) for line in FILE.read_text().splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "sdar"
    return write_tiny_checkpoint(path, "sdar", seed=29, head_scale=8.0, gain=0.6, sizes=SIZES)


def answers(checkpoint: Path, runs: list[SdarRun]) -> list[list[int]]:
    """What one engine answers to runs of one block size, all at once."""
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


def of_size(block_size: int) -> list[SdarRun]:
    return [run for run in RUNS if run.block_size == block_size]


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_tokens_are_those_of_the_authors_loop(checkpoint: Path, block_size: int) -> None:
    runs = of_size(block_size)
    assert answers(checkpoint, runs) == [run.tokens for run in runs]


def test_the_runs_meet_what_they_are_for() -> None:
    assert len(RUNS) == 64
    assert {run.settings["remasking"] for run in RUNS} == set(ORDERS)
    ragged = [run for run in RUNS if len(run.prompt) % run.block_size]
    stopped = [run for run in RUNS if len(run.tokens) < run.max_tokens]
    drawn = [run for run in RUNS if run.sampling["temperature"]]
    assert min(map(len, (ragged, stopped, drawn))) >= 8


def share_of_masks_at_birth(block: Block, denoising_steps: int) -> int:
    even, rest = divmod(block.masks_at_birth, denoising_steps)
    return max(1, even + (min(block.denoise_count, denoising_steps - 1) < rest))


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (block_diffusion, "step_share", share_of_masks_at_birth),
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
    runs = of_size(16)
    assert answers(checkpoint, runs) != [run.tokens for run in runs]
