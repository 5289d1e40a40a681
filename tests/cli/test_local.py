"""The engine and vanilla denoising in one process give the reference decoder's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import oracle.decode
import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from decoding.engines import load_tiny, make_request, oracle_settings
from oracle.settings import Settings

from effuse.cli.evaluate import Way, settings_of
from effuse.cli.local import Ask, LocalEngine, LocalEngineError
from effuse.cli.vanilla import run_vanilla

ARCHITECTURES: tuple[Architecture, ...] = ("sdar", "dream", "llada")
PROMPTS = ((5,), (7, 8, 9, 10, 11, 12), (30, 31, 32), (40,) * 17)
MAX_TOKENS = 11
D2F = Way("D2F", "d2f", 3, 0.9)


def _expected(directory: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    settings = settings_of(D2F, 4)
    knobs = {name: getattr(settings, name) for name in settings.__struct_fields__}
    request = make_request("x", prompt, max_tokens=MAX_TOKENS, **knobs)
    return oracle.decode.decode(directory, prompt, oracle_settings(request)).token_ids


def _asks() -> list[Ask]:
    settings = settings_of(D2F, 4)
    return [Ask(prompt_token_ids=one, max_tokens=MAX_TOKENS, settings=settings) for one in PROMPTS]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param, seed=5)


def test_the_engine(checkpoint: Path) -> None:
    engine = LocalEngine(load_tiny(checkpoint), max_num_seqs=2, max_model_len=64)
    done: list[int] = []
    answers = engine.run(_asks(), lambda: done.append(1))
    assert len(done) == len(PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert tuple(answer.token_ids) == _expected(checkpoint, prompt)
        assert answer.commits[-1][0] == len(answer.token_ids)
        assert answer.commits[-1][1] <= answer.forward_passes
        assert 0 < answer.first_block_s <= answer.total_s


def test_vanilla(checkpoint: Path) -> None:
    asks = [
        # Whole blocks, so that block-causal canvases end where the engine's last block does.
        replace(ask, max_tokens=12 - len(ask.prompt_token_ids) % 4)
        for ask in _asks()
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


def test_a_refused_request_is_an_error(checkpoint: Path) -> None:
    engine = LocalEngine(load_tiny(checkpoint), max_num_seqs=2, max_model_len=16)
    with pytest.raises(LocalEngineError, match=r"INVALID_ARGUMENT.*max_model_len is 16"):
        engine.run([replace(_asks()[3], max_tokens=20)], lambda: None)
