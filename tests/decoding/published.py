"""Tokens that the authors' own loops wrote on tiny checkpoints, and the requests for them.

`published_NAME.jsonl` has a run in each line: architecture and seed of the checkpoint, prompt,
length, temperature, seed, other settings by our names, and the resulting tokens. The loops are
those published with the models, run one request at a time on the checkpoints of `published_model`
in transformers' implementations. The mask id's logit is -1e30, and equal scores have a stable
top-k. If loops draw, our noise replaces torch's: LLaDA's tokens and all random positions use
`kernels/sampling_llada.py`, Dream's tokens `kernels/sampling.py`.

Fast-dLLM v2's is `batch_sample` of its generation_functions.py (commit d259b48), around Qwen2 with
the mask of its modelling code and no cache at all. Prompts of exactly one block are not among its
runs: it forgets them. No run hangs on less than 5e-5 of a probability.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import Architecture, write_tiny_checkpoint

from decoding.engines import load_tiny, make_request
from effuse.client.params import Params
from effuse.config.decoding import Sampling
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

EOS, EOT = 117, 128  # ids that these checkpoints write often


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One run."""

    architecture: Architecture
    checkpoint: int  # seed of its weights
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    settings: dict[str, Any]
    tokens: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)  # top_p, top_k
    block_size: int = 8  # of the checkpoint, where the loop's blocks are the model's

    def request(self, name: str, **changes: Any) -> StartDecode:
        """The same request to our engine; nothing ends it but its length."""
        asked: dict[str, Any] = (
            {"max_tokens": self.max_tokens, "stop_token_ids": ()} | self.settings | changes
        )
        sampling = Sampling(temperature=self.temperature, seed=self.seed, **self.sampling)
        return make_request(name, self.prompt, sampling=sampling, **asked)

    def params(self) -> Params:
        """The same for the public API; it goes on past ends of sequence, like the loops."""
        return Params(
            max_tokens=self.max_tokens,
            ignore_eos=True,
            temperature=self.temperature,
            seed=self.seed,
            **self.sampling,
            **self.settings,
        )


def published_runs(name: str) -> list[Published]:
    """All runs of one loop."""
    lines = (Path(__file__).parent / f"published_{name}.jsonl").read_text().splitlines()
    return [Published(**json.loads(line)) for line in lines]


def published_model(
    home: Path, architecture: Architecture, seed: int, *, block_size: int = 8
) -> Transformer:
    """A checkpoint on which the loops were run; `block_size` is no matter of theirs."""
    path = write_published(home / f"{architecture}-{seed}", architecture, seed, block_size)
    return load_tiny(path)


def write_published(path: Path, architecture: Architecture, seed: int, block_size: int) -> Path:
    """Its directory."""
    return write_tiny_checkpoint(
        path,
        architecture,
        seed,
        head_scale=4.0,
        block_size=block_size,
        eos_token_ids=(EOS, EOT),
        is_tuned=False,
    )
