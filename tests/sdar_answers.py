"""Answers of SDAR's own loop on a tiny checkpoint.

`decoding/published_sdar.jsonl` has a run in each line: the request and the resulting tokens of
`block_diffusion_generate` of github.com/JetAstra/SDAR (generate.py at commit c2041a8). It ran with
its own modelling code, on the checkpoint of `write_sdar_checkpoint`, as that code saved it. Changes
were

- the mask id's logit, which is -inf here: theirs may write it;
- `torch.multinomial`, which the mode replaced, or the largest of log p and our noise;
- the order of equal confidences in `torch.topk`, which is left to right here;
- the written positions, which were restricted to masks: their `topk` takes the step's whole share
  even if fewer masks are left, and so overwrites the prompt or other tokens;
- `entropy_bounded`, which cannot run unchanged (it writes to a name that is not set, and adds up
  over positions instead of tokens): entropies are of the distributions for draws.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import TinySizes, write_tiny_checkpoint

_FILE = Path(__file__).parent / "decoding" / "published_sdar.jsonl"
_SIZES = TinySizes(hidden_size=64, head_dim=16, intermediate_size=96)


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


def sdar_runs(block_size: int | None = None) -> list[SdarRun]:
    """All runs, or those of one block size."""
    runs = [SdarRun(**json.loads(line)) for line in _FILE.read_text().splitlines()]
    return [run for run in runs if block_size in (None, run.block_size)]


def write_sdar_checkpoint(path: Path, block_size: int = 4) -> Path:
    """The checkpoint of the runs; its configuration has `block_size`."""
    return write_tiny_checkpoint(
        path, "sdar", seed=29, head_scale=8.0, gain=0.6, sizes=_SIZES, block_size=block_size
    )
