"""Vanilla denoising gives the reference decoder's tokens, one a forward."""

from __future__ import annotations

from pathlib import Path

import oracle.decode
import pytest
from checkpoints import ARCHITECTURES, write_tiny_checkpoint
from decoding.engines import load_tiny
from oracle.settings import Settings

from effuse.cli.vanilla import Ask, run_vanilla

PROMPTS = ((5,), (7, 8, 9, 10, 11, 12), (30, 31, 32), (40,) * 17)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param, seed=5)


def test_vanilla(checkpoint: Path) -> None:
    asks = [
        # Whole blocks, so that block-causal canvases end where the engine's last block does.
        Ask(prompt_token_ids=prompt, max_tokens=12 - len(prompt) % 4)
        for prompt in PROMPTS
    ]
    done: list[int] = []
    model = load_tiny(checkpoint)
    answers = run_vanilla(model, asks, max_num_seqs=3, on_token=lambda: done.append(1))
    assert len(done) == sum(ask.max_tokens for ask in asks)
    is_causal = model.config.prompt_attention == "causal_blocks"
    for ask, answer in zip(asks, answers, strict=True):
        expected = oracle.decode.decode(
            checkpoint,
            ask.prompt_token_ids,
            Settings(
                algorithm="block_diffusion" if is_causal else "vanilla",
                confidence_threshold=1.0,  # nothing passes: one token a forward
                max_tokens=ask.max_tokens,
            ),
        )
        assert tuple(answer.token_ids) == expected.token_ids
        assert answer.forward_passes == ask.max_tokens
