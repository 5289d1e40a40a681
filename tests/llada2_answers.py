"""Answers of the code that LLaDA2.0 and 2.1 are published with, on a tiny checkpoint.

`decode_worker/llada2_answers.json` has the greedy results of its `generate`, run in fp32 by
transformers 4.57.6 on the checkpoint of `write_answered_checkpoint`. Prompts have 1 to 70 tokens,
blocks 4, 8 and 32. Every threshold and number of steps occurs, and every third run has an end that
it would write. Runs that depend on less than 2e-5 of a probability are left out. So are runs whose
first block is ragged and filled in fewer steps than it has rows.

`decode_worker/llada21_answers.json` has the same for LLaDA2.1's `generate`, which edits written
tokens, with every threshold of both kinds and limit of further steps. It also has runs that draw,
with our noise instead of torch's. Changes were the mask id's logit, which is -1e30, and masks of
attention in float32. No run depends on less than 5e-5 of a probability or logit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert_checkpoints import write_expert_checkpoint

_HOME = Path(__file__).parent / "decode_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One run: the request, and the resulting tokens, including the end."""

    block: int
    prompt: tuple[int, ...]
    gen: int
    steps: int
    threshold: float
    stop: int
    tokens: tuple[int, ...]
    margin: float  # how close the closest decision was, of probabilities and of best logits
    editing: float = 1.0  # threshold; LLaDA2.0 edits nothing
    post_steps: int = 16
    sampling: dict[str, Any] = field(default_factory=dict)
    edits: int = 0  # tokens that were replaced

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens before the end."""
        return (
            self.tokens[: self.tokens.index(self.stop)] if self.stop in self.tokens else self.tokens
        )


def answered() -> list[Answered]:
    """All runs of LLaDA2.0."""
    return _read("llada2_answers.json")


def edited() -> list[Answered]:
    """All runs of LLaDA2.1."""
    return _read("llada21_answers.json")


def _read(name: str) -> list[Answered]:
    runs = json.loads((_HOME / name).read_text())
    return [
        Answered(**run | {"prompt": tuple(run["prompt"]), "tokens": tuple(run["tokens"])})
        for run in runs
    ]


def write_answered_checkpoint(path: Path, block_size: int = 32) -> Path:
    """The checkpoint of the runs; its configuration has `block_size`."""
    return write_expert_checkpoint(path, "llada2_moe", seed=7, head_dim=32, block_size=block_size)
