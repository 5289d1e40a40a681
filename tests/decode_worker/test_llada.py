"""LLaDA's schedule: how many masks of which block each step fills."""

from __future__ import annotations

import numpy as np
import pytest

from effuse.config.decoding import DecodeSettings, Stopping
from effuse.decode_worker import canvas
from effuse.decode_worker.sequence import CanvasStep, FloatArray, HostCandidates, IntArray, Sequence

MASK = 99


def no_noise(positions: IntArray, step: int) -> FloatArray:
    raise AssertionError("nothing is drawn by lot")


def fill(max_tokens: int, block_length: int, steps: int) -> list[list[int]]:
    """Offsets in the answer that each step writes, if later positions score higher."""
    settings = DecodeSettings(
        algorithm="llada", denoising_steps=4, block_length=block_length, steps=steps
    )
    stopping = Stopping(max_tokens=max_tokens)
    sequence = Sequence(
        [1, 2, 3], origin=3, block_size=4, mask_token_id=MASK, stopping=stopping, is_canvas=True
    )
    written: list[list[int]] = []
    canvas.append_blocks(sequence)
    step = CanvasStep(sequence, settings, no_noise)
    while sequence.final_len < sequence.last_block_end:
        plan = canvas.open_step(step, has_cache=False)
        assert (plan.start, plan.end, plan.num_stored) == (0, 3 + max_tokens, 0)
        assert set(plan.denoise_counts) == {len(written)}
        scores = plan.candidates.astype(np.float32)
        before = sequence.masked.copy()
        found = HostCandidates(np.full(len(scores), 7), scores, scores)
        canvas.apply_step(step, plan, found)
        written.append((np.flatnonzero(before & ~sequence.masked) - 3).tolist())
    return written


@pytest.mark.parametrize(
    ("max_tokens", "block_length", "steps", "expected"),
    [
        (4, 4, 4, [[3], [2], [1], [0]]),
        (4, 4, 3, [[2, 3], [1], [0]]),
        (8, 4, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 6, [[2, 3], [1], [0], [6, 7], [5], [4]]),
        (10, 10, 4, [[7, 8, 9], [4, 5, 6], [2, 3], [0, 1]]),  # blocks of 4 are the units of sending
    ],
)
def test_the_authors_split(
    max_tokens: int, block_length: int, steps: int, expected: list[list[int]]
) -> None:
    """A block's tokens over its steps, the remainder going first."""
    assert fill(max_tokens, block_length, steps) == expected


@pytest.mark.parametrize(
    ("max_tokens", "block_length", "steps", "shares"),
    [
        (5, 3, 0, [1, 1, 1, 1, 1]),  # one a token
        (5, 3, 1, [3, 2]),  # at least one step a block
        (5, 3, 3, [2, 1, 2]),  # the first block takes the step that is over
        (5, 3, 99, [1, 1, 1, 1, 1]),  # at most one a token
        (5, 64, 2, [3, 2]),  # a block longer than the answer
    ],
)
def test_lengths_and_steps_that_do_not_divide(
    max_tokens: int, block_length: int, steps: int, shares: list[int]
) -> None:
    written = fill(max_tokens, block_length, steps)
    assert [len(step) for step in written] == shares
    assert sorted(offset for step in written for offset in step) == list(range(max_tokens))
