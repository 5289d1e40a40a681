"""Dream's schedule: its times are torch's to the bit, and each step writes its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from effuse.config.decoding import DecodeSettings, Stopping
from effuse.decode_worker import canvas, dream
from effuse.decode_worker.sequence import (
    CanvasStep,
    FloatArray,
    HostCandidates,
    IntArray,
    PositionNoise,
    Sequence,
)

MASK, PROMPT_LEN, LENGTH = 99, 3, 16


def halves(positions: IntArray, step: int) -> FloatArray:
    """A lot that chooses nothing before others."""
    return np.full(len(positions), 0.5)


def settings_of(**settings: object) -> DecodeSettings:
    return DecodeSettings(algorithm="dream", denoising_steps=4, **settings)  # type: ignore[arg-type]


def sequence_of() -> Sequence:
    return Sequence(
        [1] * PROMPT_LEN,
        origin=PROMPT_LEN,
        block_size=4,
        mask_token_id=MASK,
        stopping=Stopping(max_tokens=LENGTH),
        is_canvas=True,
    )


def fill(settings: DecodeSettings, noise: PositionNoise = halves) -> list[list[int]]:
    """Offsets in the answer that each step writes, if later positions score higher."""
    sequence, written = sequence_of(), list[list[int]]()
    canvas.append_blocks(sequence)
    step = CanvasStep(sequence, settings, noise)
    while sequence.final_len < sequence.last_block_end:
        plan = canvas.open_step(step, has_cache=False)
        scores = plan.candidates.astype(np.float32)
        before = sequence.masked.copy()
        found = HostCandidates(np.full(len(scores), 7), scores, scores)
        canvas.apply_step(step, plan, found)
        written.append((np.flatnonzero(before & ~sequence.masked) - PROMPT_LEN).tolist())
    return written


@pytest.mark.parametrize("eps", [1e-3, 0.1, 0.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 64, 257])
def test_the_rate_is_that_of_torchs_linspace(steps: int, eps: float) -> None:
    settings, times = settings_of(steps=steps, eps=eps), torch.linspace(1, eps, steps + 1)
    sequence = sequence_of()
    canvas.append_blocks(sequence)
    step = CanvasStep(sequence, settings, halves)
    for number in range(steps - 1):
        sequence.blocks[-1].denoise_count = number
        assert dream._transfer_rate(step) == (1 - times[number + 1] / times[number]).numpy()


def test_the_best_of_the_whole_answer_are_written_by_the_schedule() -> None:
    """A quarter of the time is 3.996 of 16 masks, a third of the rest is 4.32 of 13, half is 4.5
    of 9."""
    written = fill(settings_of(alg="entropy", steps=4))
    assert [len(step) for step in written] == [3, 4, 4, 5]
    assert sum(reversed(written), []) == list(range(LENGTH))  # noqa: RUF017


def test_more_steps_than_tokens_leave_some_without_a_write() -> None:
    written = fill(settings_of(alg="maskgit_plus", steps=40))
    assert len(written) == 40 and [] in written
    assert sorted(one for step in written for one in step) == list(range(LENGTH))


def test_origin_writes_whom_the_lot_chose_and_all_at_the_end() -> None:
    def noise(positions: IntArray, step: int) -> FloatArray:
        return np.where(positions % 4 == step, 0.2, 0.9)

    assert fill(settings_of(steps=4), noise) == [
        [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [0, 4, 8, 12]
    ]  # fmt: skip


def test_the_best_may_be_drawn_by_lot() -> None:
    """The random part outweighs scores at a high temperature and not at a low one."""

    def noise(positions: IntArray, step: int) -> FloatArray:
        return np.where(positions < PROMPT_LEN + 4, 0.999999, 0.5)

    hot = fill(settings_of(alg="entropy", steps=4, alg_temp=50.0), noise)
    cold = fill(settings_of(alg="entropy", steps=4, alg_temp=0.01), noise)
    assert hot[0] == [1, 2, 3] and cold[0] == [13, 14, 15]
