"""LLaDA2.1's editing, token for token like the authors' own code; and that it ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from decoding.device_rig import DeviceRig
from decoding.engines import Answer, Rig, make_request
from llada2_answers import Answered, answered, edited, write_answered_checkpoint

from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.decode_worker import denoise
from effuse.decode_worker.sequence import Block, HostCandidates, IntArray, Sequence
from effuse.models.weights import load_model
from effuse.worker.messages import StartDecode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answered_checkpoint(tmp_path_factory.mktemp("llada21"))


def request(name: str, run: Answered) -> StartDecode:
    """The run as a request of an engine."""
    return make_request(
        name,
        run.prompt,
        max_tokens=run.gen,
        stop_token_ids=(run.stop,),
        sampling=Sampling(**run.sampling),
        algorithm="block_diffusion",
        denoising_steps=run.steps,
        confidence_threshold=run.threshold,
        editing_threshold=run.editing,
        max_post_steps=run.post_steps,
    )


def of_size(block: int) -> list[Answered]:
    return [run for run in edited() if run.block == block]


def answers(
    checkpoint: Path, runs: list[Answered], num_pages: int = 1024
) -> tuple[Rig, list[Answer]]:
    """One engine's answers to runs of one block size, all together."""
    torch.set_num_threads(1)
    rig = Rig(load_model(checkpoint, block_size=runs[0].block), num_pages=num_pages)
    found = [rig.start(request(str(number), run)) for number, run in enumerate(runs)]
    rig.run()
    return rig, found


def test_the_runs_are_of_every_kind() -> None:
    runs = edited()
    assert len(runs) == 72 and {run.block for run in runs} == {4, 8, 32}
    assert {run.post_steps for run in runs} == {0, 1, 4, 16}
    assert len({run.editing for run in runs}) == 5 and len({run.threshold for run in runs}) == 4
    assert sum(run.edits > 0 for run in runs) > 60 and any(run.edits > 500 for run in runs)
    drawn = [run for run in runs if run.sampling]
    stopped = [run for run in runs if run.stop in run.tokens]
    ragged = [run for run in runs if len(run.prompt) % run.block]
    assert min(map(len, (drawn, stopped, ragged))) > 12


@pytest.mark.parametrize("block", [4, 8, 32])
def test_answers_are_those_of_the_authors_code(checkpoint: Path, block: int) -> None:
    runs = of_size(block)
    _, found = answers(checkpoint, runs)
    for run, answer in zip(runs, found, strict=True):
        assert answer.token_ids == run.answer, run


def test_preempted_requests_give_the_same_answers(checkpoint: Path) -> None:
    runs = of_size(8)
    rig, found = answers(checkpoint, runs, num_pages=28)
    assert rig.engine.counters.preemptions > 0
    for run, answer in zip(runs, found, strict=True):
        assert answer.token_ids == run.answer, run


def test_log_probabilities_are_those_of_the_forward_that_wrote_or_edited(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    rig = Rig(load_model(checkpoint, block_size=8), num_pages=512)
    runs = [run for run in of_size(8) if not run.sampling and run.edits][:6]
    found = [
        rig.start(msgspec.structs.replace(request(str(number), run), num_logprobs=1))
        for number, run in enumerate(runs)
    ]
    rig.run()
    for run, answer in zip(runs, found, strict=True):
        told = [one for commit in answer.commits for one in commit.logprobs]
        assert tuple(one.top_token_ids[0] for one in told) == answer.token_ids == run.answer


def test_requests_that_edit_run_beside_those_in_slots_of_a_device(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = load_model(checkpoint, block_size=4)
    rig = DeviceRig(model, num_pages=512, page_size=16, budget=512, max_num_seqs=16)
    runs = [*of_size(4)[:6], *(run for run in answered() if run.block == 4 and run.margin > 3e-4)]
    found = [rig.start(request(str(number), run)) for number, run in enumerate(runs)]
    rig.run()
    for run, answer in zip(runs, found, strict=True):
        assert answer.token_ids == run.answer, run


def never(
    sequence: Sequence,
    block: Block,
    settings: DecodeSettings,
    positions: IntArray,
    candidates: HostCandidates,
) -> bool:
    block.edits_left = 0
    return False


def test_what_edits_nothing_is_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoise, "edit", never)
    runs = of_size(4)
    _, found = answers(checkpoint, runs)
    assert [answer.token_ids for answer in found] != [run.answer for run in runs]


STOP = 9


def sequence_of(max_tokens: int) -> Sequence:
    """Two tokens of a prompt and blocks of four, the prompt in the first of them."""
    return Sequence(
        [1, 1],
        origin=0,
        block_size=4,
        mask_token_id=99,
        stopping=Stopping(max_tokens=max_tokens, stop_token_ids=frozenset({STOP})),
    )


def step(
    sequence: Sequence, settings: DecodeSettings, tokens: list[int], confidence: float = 0.9
) -> denoise.StepOutcome:
    """A step in which every position that asks is proposed its token of `tokens`."""
    plan = denoise.open_step(sequence, settings)
    proposed = np.asarray([tokens[position % 4] for position in plan.candidates], dtype=np.int64)
    sure = np.full(len(proposed), confidence, dtype=np.float32)
    return denoise.apply_step(sequence, settings, plan, HostCandidates(proposed, sure, sure))


def editing(max_post_steps: int = 16) -> DecodeSettings:
    return DecodeSettings(
        algorithm="block_diffusion",
        denoising_steps=4,
        confidence_threshold=0.5,
        editing_threshold=0.7,
        max_post_steps=max_post_steps,
    )


def test_a_block_ends_with_the_first_step_that_changes_nothing() -> None:
    sequence = sequence_of(6)
    assert not step(sequence, editing(), [0, 0, 5, 6]).num_settled, "its masks are just written"
    outcome = step(sequence, editing(), [0, 0, 7, 6])
    assert not outcome.num_settled and [block.start for block in outcome.written] == [0]
    outcome = step(sequence, editing(), [0, 0, 8, 8], confidence=0.7)  # not above
    assert outcome.num_settled == 1 and outcome.tokens == (7, 6) and not outcome.written
    assert sequence.token_ids[:2].tolist() == [1, 1], "the prompt is nobody's to edit"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_block_that_changes_for_ever_ends_after_the_limit(most: int) -> None:
    sequence = sequence_of(2)
    settled = step(sequence, editing(most), [0, 0, 5, 6]).num_settled
    for number in range(most):
        assert not settled
        settled = step(sequence, editing(most), [0, 0, 10 + number, 6]).num_settled
    assert settled == 1 and sequence.token_ids[2] == (9 + most if most else 5)


def test_a_stop_that_is_edited_away_ends_nothing() -> None:
    sequence = sequence_of(6)
    step(sequence, editing(), [0, 0, STOP, 6])
    assert sequence.stop_seen
    step(sequence, editing(), [0, 0, 5, 6])
    assert not sequence.stop_seen
    outcome = step(sequence, editing(), [0, 0, 5, 6])
    assert outcome.tokens == (5, 6) and outcome.finish is None
    step(sequence, editing(), [5, 6, 7, STOP])
    outcome = step(sequence, editing(), [5, 6, 7, STOP])
    assert outcome.tokens == (5, 6, 7) and outcome.finish is denoise.AnswerEnd.STOP
