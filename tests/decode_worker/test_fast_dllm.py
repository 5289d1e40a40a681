"""Fast-dLLM's rules: which masks are proposed for, and which are sure enough."""

from __future__ import annotations

import numpy as np
import pytest

from effuse.config.decoding import Cache, DecodeSettings, Stopping
from effuse.decode_worker import canvas
from effuse.decode_worker.sequence import (
    CanvasStep,
    FloatArray,
    HostCandidates,
    IntArray,
    Sequence,
)

PROMPT_LEN = 3
# In float32 these equal their decimal form.
CONFIDENCES = np.array([0.25, 0.75, 0.5, 0.875, 0.75, 0.125, 0.5, 0.25, 0.0, 0.625], np.float32)


def no_noise(positions: IntArray, step: int) -> FloatArray:
    raise AssertionError("nothing is drawn by lot")


def step_of(
    cache: Cache, *, shifts: bool, threshold: float = 0.5, length: int = 4, factor: float = 0.0
) -> CanvasStep:
    sequence = Sequence(
        [1] * PROMPT_LEN,
        origin=PROMPT_LEN,
        block_size=8,
        mask_token_id=99,
        stopping=Stopping(max_tokens=len(CONFIDENCES)),
        is_canvas=True,
    )
    settings = DecodeSettings(
        algorithm="fast_dllm",
        denoising_steps=4,
        cache=cache,
        block_length=length,
        confidence_threshold=threshold,
        factor=factor,
    )
    canvas.append_blocks(sequence)
    return CanvasStep(sequence, settings, no_noise, shifts)


def fill(step: CanvasStep) -> tuple[list[list[int]], list[list[int]]]:
    """Offsets in the answer that each step proposes for, and those that it writes."""
    sequence, proposed, written = step.sequence, list[list[int]](), list[list[int]]()
    while sequence.final_len < sequence.last_block_end:
        plan = canvas.open_step(step, has_cache=canvas.is_begun(step))
        offsets = plan.candidates - PROMPT_LEN
        scores = CONFIDENCES[offsets]
        before = sequence.masked.copy()
        canvas.apply_step(step, plan, HostCandidates(np.full(len(scores), 7), scores, scores))
        proposed.append(offsets.tolist())
        written.append((np.flatnonzero(before & ~sequence.masked) - PROMPT_LEN).tolist())
    return proposed, written


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_block_gives_all_above_the_threshold_or_its_best_one(cache: Cache) -> None:
    proposed, written = fill(step_of(cache, shifts=False))
    assert written == [[1, 3], [2], [0], [4], [6], [7], [5], [9], [8]]
    assert proposed[:3] == [[0, 1, 2, 3], [0, 2], [0]]


def test_ties_of_the_best_go_to_the_first_and_the_threshold_is_strict() -> None:
    _, written = fill(step_of("none", shifts=False, threshold=0.75, length=16))
    assert written[:4] == [[3], [1], [4], [9]]


@pytest.mark.parametrize(
    ("factor", "first"),
    [
        (0.25, [3]),  # the second would need 0.917
        (0.75, [1, 3]),  # 0.75 is enough for the second, the third would need 0.8125
        (1000.0, list(range(10))),
    ],
)
def test_a_factor_asks_more_of_each_further_mask(factor: float, first: list[int]) -> None:
    """The k-th of the surest needs 1 - factor / (k + 1), the first one nothing."""
    _, written = fill(step_of("none", shifts=False, length=16, factor=factor))
    assert written[0] == first
    assert sum(map(len, written)) == 10


def test_the_last_mask_of_a_block_goes_with_the_one_before_it() -> None:
    """Of two the first is not checked, so both are written, like in the authors' code."""
    _, written = fill(step_of("none", shifts=False, length=2, factor=0.25))
    assert written == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_shifting_model_writes_a_blocks_first_token_as_it_fills_the_cache(cache: Cache) -> None:
    proposed, written = fill(step_of(cache, shifts=True))
    assert written == [[0], [1, 3], [2], [4], [6], [7], [5], [8], [9]]
    assert proposed[:2] == [[0], [1, 2, 3]] and proposed[-2:] == [[8], [9]]


def test_a_shifting_model_without_a_cache_has_a_budget_instead_of_blocks() -> None:
    """Four more in each step; unsure ones are added to the next ones."""
    proposed, written = fill(step_of("none", shifts=True))
    assert proposed[0] == list(range(10))
    assert written == [[1, 3, 4, 9], [2], [6], [0], [7], [5], [8]]


def test_plans_read_from_pages_what_the_rows_leave_out() -> None:
    for cache, filling, cached in (
        ("prefix", (0, 13, 3, range(0), 0), (3, 13, 0, range(0), 0)),
        ("dual", (0, 13, 9, range(3, 7), 0), (3, 7, 0, range(0), 6)),
    ):
        step = step_of(cache, shifts=False)  # type: ignore[arg-type]
        for has_cache, expected in ((False, filling), (True, cached)):
            plan = canvas.open_step(step, has_cache=has_cache)
            shape = plan.start, plan.end, plan.num_stored, plan.unstored, plan.num_behind
            assert shape == expected
            assert plan.candidates.tolist() == [3, 4, 5, 6]
        refill = canvas.open_refill(step)
        assert (refill.num_stored, refill.unstored) == filling[2:4]
        assert not len(refill.candidates)
