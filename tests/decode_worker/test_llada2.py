"""LLaDA2.0's block diffusion, token for token like the authors' own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import EOS_TOKEN_ID
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, make_request
from llada2_answers import Answered, answered, write_answered_checkpoint
from oracle.decode import denoise_blocks, new_canvas
from oracle.sampling import candidate
from oracle.settings import Candidate, Settings
from paged_model import PagedModel

from effuse.models.weights import load_model
from effuse.worker.messages import StartDecode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answered_checkpoint(tmp_path_factory.mktemp("llada2"))


def test_the_runs_are_of_every_kind() -> None:
    runs = answered()
    assert len(runs) == 96
    assert {run.block for run in runs} == {4, 8, 32}
    assert {run.threshold for run in runs} == {0.3, 0.5, 0.7, 0.9, 0.95}
    assert any(run.steps < run.block for run in runs)
    ragged = [run for run in runs if len(run.prompt) % run.block]
    assert 20 < len(ragged) < len(runs) and any(len(run.prompt) < run.block for run in runs)
    stopped = [run for run in runs if run.stop in run.tokens]
    assert 20 < len(stopped) < len(runs) and any(run.stop != EOS_TOKEN_ID for run in stopped)
    assert any(run.gen % run.block for run in runs), "answers that end within a block"


@pytest.mark.parametrize("block", [4, 8, 32])
def test_answers_are_those_of_the_authors_code(checkpoint: Path, block: int) -> None:
    torch.set_num_threads(1)
    rig = Rig(load_model(checkpoint, block_size=block), num_pages=1024, max_num_seqs=96)
    runs = [run for run in answered() if run.block == block]
    answers = [rig.start(request(str(number), run)) for number, run in enumerate(runs)]
    rig.run()
    for run, answer in zip(runs, answers, strict=True):
        assert answer.token_ids == run.answer, run


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("block", [4, 8, 32])
def test_answers_of_device_steps_are_those_of_the_authors_code(
    checkpoint: Path, block: int, device: str
) -> None:
    """In fp32, of runs that hang on no rounding; on a GPU experts are chosen within graphs."""
    torch.set_num_threads(1)
    runs = [run for run in answered() if run.block == block and run.margin > 3e-4]
    assert len(runs) >= 4
    rig = DeviceRig(
        load_model(checkpoint, block_size=block, device=device),
        num_pages=512,
        page_size=16,
        budget=512,
        max_num_seqs=16,
    )
    answers = [rig.start(request(str(number), run)) for number, run in enumerate(runs)]
    rig.run()
    for run, answer in zip(runs, answers, strict=True):
        assert answer.token_ids == run.answer, run


SHORT = [
    (block, prompt_len, max_tokens, steps)
    for block, lengths in ((32, (1, 5, 12, 31, 32, 40)), (8, (1, 3, 7, 20)))
    for max_tokens in lengths
    for prompt_len, steps in ((3, block), (block, block), (block + 5, block // 2))
][:28]
"""Answers below a block, of a whole one and beyond; steps that divide them and that do not."""


@pytest.mark.parametrize("block", [8, 32])
def test_answers_below_a_block_take_no_more_steps_than_tokens(checkpoint: Path, block: int) -> None:
    """As in the authors' `generate`, which takes `min(steps, gen_length)` steps for each block."""
    torch.set_num_threads(1)
    dense = PagedModel(checkpoint, page_size=16, block_size=block)
    rig, is_seen = Rig(load_model(checkpoint, block_size=block)), False
    for number, (of_block, prompt_len, max_tokens, steps) in enumerate(SHORT):
        if of_block != block:
            continue
        prompt = [(7 * number + 11 * at) % 200 + 3 for at in range(prompt_len)]
        settings = Settings(
            algorithm="block_diffusion",
            confidence_threshold=0.95,
            max_tokens=max_tokens,
            denoising_steps=steps,
        )
        answer = rig.start(
            make_request(
                str(number),
                prompt,
                max_tokens=max_tokens,
                stop_token_ids=(),
                algorithm="block_diffusion",
                denoising_steps=steps,
                confidence_threshold=0.95,
            )
        )
        rig.run()
        found = list(answer.token_ids)
        assert found == by_the_authors(dense, prompt, replace(settings, caps_steps=True)), settings
        is_seen = is_seen or found != by_the_authors(dense, prompt, settings)
    assert is_seen, "the rule would not be seen"


def by_the_authors(dense: PagedModel, prompt: list[int], settings: Settings) -> list[int]:
    """The oracle's answer over the model's own forward of all tokens."""
    mask, pages = dense.model.config.mask_token_id, dense.pages(128)

    def predict(token_ids: list[int], wanted: dict[int, int]) -> dict[int, Candidate]:
        hidden = dense.forward(token_ids, 0, pages, len(token_ids), 0)
        rows = dense.model.logits(hidden)
        return {at: candidate(rows[at], settings, mask, at, n) for at, n in wanted.items()}

    canvas = new_canvas(prompt, 0, dense.block_size, settings.max_tokens)
    answer = denoise_blocks(predict, canvas, settings, (), mask).token_ids
    dense.give_back(pages)
    return list(answer)


def request(name: str, run: Answered) -> StartDecode:
    """The run as a request of an engine."""
    return make_request(
        name,
        run.prompt,
        max_tokens=run.gen,
        stop_token_ids=(run.stop,),
        algorithm="block_diffusion",
        denoising_steps=run.steps,
        confidence_threshold=run.threshold,
    )
