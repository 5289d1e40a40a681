"""The numbered traps of block-parallel decoding, for the pure machines: one test or more for each.

The numbers are those of the project's reference note on diffusion engines; those that need a model
are in test_traps_engine.py. The fourth is about a prefix cache, and there is none.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from decoding.invariants import decode, make_sequence
from decoding.scripts import BY_BLOCKS, MASK_ID, STOP_ID, Case, Script, make_settings

from effuse.config.decoding import Algorithm, Stopping
from effuse.decode_worker import d2f, denoise
from effuse.decode_worker.denoise import AnswerEnd
from effuse.decode_worker.sequence import Block, HostCandidates, Sequence


def case(prompt_len: int = 8, *, origin: int | None = None, **changes: object) -> Case:
    values = {
        "prompt": tuple(range(10, 10 + prompt_len)),
        "origin": prompt_len if origin is None else origin,
        "block_size": 4,
        "max_tokens": 16,
        "settings": make_settings(),
        "script": Script(1, stop_share=0.0),
    } | changes
    return Case(**values)  # type: ignore[arg-type]


def candidates(confidences: list[float], tokens: list[int] | None = None) -> HostCandidates:
    values = np.asarray(confidences, dtype=np.float32)
    return HostCandidates(np.asarray(tokens or range(20, 20 + len(values))), values, values)


def test_trap_02_commit_order() -> None:
    """A finished block behind an unfinished one waits: it is neither emitted nor stored."""
    sequence = make_sequence(case())
    settings = make_settings(add=0.0)
    denoise.open_step(sequence, settings)
    sequence.step_open = False
    plan = denoise.open_step(sequence, settings)
    first, second = sequence.blocks
    outcome = denoise.apply_step(
        sequence, settings, plan, candidates([0.1, 0.2, 0.1, 0.1, 0.95, 0.95, 0.95, 0.95])
    )
    assert (first.masks_left, second.masks_left) == (3, 0)
    assert second in sequence.active and outcome.tokens == ()
    plan = denoise.open_step(sequence, settings)
    assert plan.num_stored == 0
    assert plan.candidates.tolist()[:3] == [8, 10, 11]


def test_trap_03_prompt_length_not_a_multiple_of_the_block() -> None:
    """sdar: the tail shares the first block and never changes; dream, llada: blocks start at P."""
    absolute, at_end = make_sequence(case(6, origin=0)), make_sequence(case(6))
    assert (absolute.first_block_start, absolute.last_block_end) == (4, 24)
    assert (at_end.first_block_start, at_end.last_block_end) == (6, 22)
    block = absolute.append_block()
    assert (block.start, block.end, block.masks_at_birth) == (4, 8, 2)
    assert absolute.masked[4:8].tolist() == [False, False, True, True]
    assert absolute.token_ids[:6].tolist() == list(range(10, 16))


def test_trap_05_literal_mask_id_in_prompt() -> None:
    """Masks are a bitmap: a prompt that holds the id is never written."""
    prompt = (MASK_ID, 9, MASK_ID, 9, 9, MASK_ID)
    for origin in (0, len(prompt)):
        held = case(origin=origin, prompt=prompt)
        sequence = make_sequence(held)
        assert len(decode(held, sequence).tokens) == 16
        assert sequence.token_ids[: len(prompt)].tolist() == list(prompt)


def test_trap_06_a_written_mask_id_is_a_token_not_a_mask() -> None:
    """The sampler excludes the id; if it occurs nevertheless, nothing loops or miscounts."""
    sequence = make_sequence(case(max_tokens=4))
    settings = make_settings()
    plan = denoise.open_step(sequence, settings)
    outcome = denoise.apply_step(
        sequence, settings, plan, candidates([1.0] * 4, tokens=[MASK_ID] * 4)
    )
    assert outcome.finish is AnswerEnd.LENGTH and outcome.tokens == (MASK_ID,) * 4


@pytest.mark.parametrize("algorithm", BY_BLOCKS)
def test_trap_07_thresholds_are_strict(algorithm: Algorithm) -> None:
    """Confidence 1.0 does not pass a threshold of 1.0; the float32 next above 0.9 passes 0.9."""
    rules = denoise.RULES[algorithm]
    block = Block(0, 4, masks_at_birth=4, masks_left=4, full=True)
    at_one = make_settings(algorithm, confidence=1.0)
    assert rules.choose(block, at_one, candidates([1.0, 1.0, 1.0, 1.0])).tolist() == [0]
    above = float(np.nextafter(np.float32(0.9), np.float32(1)))
    at_nine = make_settings(algorithm, confidence=0.9)
    chosen = rules.choose(block, at_nine, candidates([0.9, above, 0.9, above]))
    assert chosen.tolist() == [1, 3]


def test_trap_07_progress_is_compared_in_float32() -> None:
    block = Block(0, 10, masks_at_birth=10, masks_left=2)
    assert block.progress == make_settings(add=0.8).block_add_threshold


def test_trap_08_ties_go_to_the_lowest_position() -> None:
    tied = candidates([0.3, 0.5, 0.5, 0.5])
    assert tied.best(1).tolist() == [1]
    assert tied.best(2).tolist() == [1, 2]


def test_trap_10_a_stop_id_behind_masks_stops_appending_but_not_the_request() -> None:
    sequence = make_sequence(case(max_tokens=16))
    settings = make_settings(add=0.0)
    denoise.open_step(sequence, settings)
    sequence.step_open = False
    plan = denoise.open_step(sequence, settings)
    tokens = [20, 21, 22, 23, 30, STOP_ID, 31, 32]
    confidences = [0.1, 0.3, 0.2, 0.1, 0.95, 0.95, 0.95, 0.95]
    outcome = denoise.apply_step(sequence, settings, plan, candidates(confidences, tokens))
    assert outcome.finish is None and sequence.stop_seen
    while outcome.finish is None:
        plan = denoise.open_step(sequence, settings)
        assert len(sequence.blocks) == 2
        outcome = denoise.apply_step(
            sequence, settings, plan, candidates([0.5] * len(plan.candidates))
        )
    assert outcome.finish is AnswerEnd.STOP
    assert len(outcome.tokens) == 5 and outcome.tokens[-1] == 30


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("prompt_len", [3, 4, 6])
def test_trap_11_max_tokens_counts_tokens_of_the_answer(prompt_len: int, max_tokens: int) -> None:
    """Not allocated slots, not the prompt's tail; the remainder of a block is given, then cut."""
    for origin in (0, prompt_len):
        trace = decode(case(prompt_len, origin=origin, max_tokens=max_tokens))
        assert len(trace.tokens) == max_tokens and not trace.stopped


def test_trap_11_a_stop_id_beyond_the_cut_is_not_a_stop() -> None:
    sequence = make_sequence(case(max_tokens=2))
    settings = make_settings()
    plan = denoise.open_step(sequence, settings)
    tokens = [20, 21, STOP_ID, 22]
    outcome = denoise.apply_step(sequence, settings, plan, candidates([1.0] * 4, tokens))
    assert (outcome.tokens, outcome.finish) == ((20, 21), AnswerEnd.LENGTH)


def test_trap_18_confidences_stay_float32() -> None:
    settings = make_settings(confidence=0.1)
    assert settings.confidence_threshold == float(np.float32(0.1)) != 0.1
    block = Block(0, 1, masks_at_birth=1, masks_left=1)
    assert len(d2f.choose(block, settings, candidates([0.1]))) == 0


def test_the_sequence_takes_any_length() -> None:
    draw = random.Random(4)
    for _ in range(50):
        prompt_len, max_tokens = draw.randint(1, 40), draw.randint(1, 40)
        for origin in (0, prompt_len):
            sequence = Sequence(
                range(prompt_len),
                origin=origin,
                block_size=8,
                mask_token_id=MASK_ID,
                stopping=Stopping(max_tokens=max_tokens),
            )
            assert sequence.first_block_start <= prompt_len < sequence.first_block_start + 8
            assert sequence.last_block_start < sequence.answer_end <= sequence.last_block_end
