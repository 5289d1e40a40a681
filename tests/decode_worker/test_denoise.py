"""The state machines against an independent replay and invariants, on random candidates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from decoding.invariants import Broken, decode, make_sequence
from decoding.replay import Replay
from decoding.scripts import Case, random_case

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker import d2f, denoise
from effuse.decode_worker.sequence import (
    Block,
    HostCandidates,
    IndexArray,
    Sequence,
)


def agrees(case: Case) -> bool:
    """True if machine and replay do the same, forward by forward."""
    machine, replay = decode(case), Replay(case).run()
    return (machine.forwards, machine.commits, machine.stopped) == (
        replay.forwards,
        replay.commits,
        replay.stopped,
    )


@pytest.mark.parametrize("first_seed", range(0, 600, 60))
def test_machine_agrees_with_the_replay(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 60):
        assert agrees(random_case(seed)), f"seed {seed}"


def test_the_random_cases_hold_what_matters() -> None:
    seen = dict.fromkeys(("semi", "double", "waiting", "ragged", "short", "stopped"), 0)
    for seed in range(200):
        case = random_case(seed)
        sequence = make_sequence(case)
        seen["ragged"] += sequence.first_block_start < sequence.prompt_len
        seen["short"] += sequence.first_block_start == 0
        finish = None
        while finish is None:
            plan = denoise.open_step(sequence, case.settings)
            candidates = case.script.candidates(
                plan.candidates.tolist(), plan.denoise_counts.tolist()
            )
            outcome = denoise.apply_step(sequence, case.settings, plan, candidates)
            seen["semi"] += any(not block.full for block in outcome.written)
            seen["double"] += outcome.num_settled > 1
            seen["waiting"] += sequence.stop_seen and outcome.finish is None
            finish = outcome.finish
        seen["stopped"] += finish is denoise.AnswerEnd.STOP
        end = sequence.prompt_len + outcome.token_offset + len(outcome.tokens)
        if finish is denoise.AnswerEnd.STOP:
            assert outcome.end_token_id == sequence.token_ids[end]
            assert outcome.end_token_id in sequence.stopping.stop_token_ids
        else:
            assert (outcome.end_token_id, end) == (None, sequence.answer_end)
    assert min(seen.values()) >= 10, seen


@pytest.mark.parametrize("first_seed", range(1000, 1200, 50))
def test_resume_at_every_commit_gives_the_same_answer(first_seed: int) -> None:
    resumed = 0
    for seed in range(first_seed, first_seed + 50):
        case = random_case(seed)
        whole = decode(case).tokens
        for point in resume_points(case):
            assert point.tokens + decode(case, point.sequence).tokens == whole, f"seed {seed}"
            resumed += 1
    assert resumed > 50


class Point:
    """A commit of a run and the sequence that another attempt would rebuild from it."""

    def __init__(self, case: Case, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.sequence = Sequence(
            case.prompt,
            origin=case.origin,
            block_size=case.block_size,
            mask_token_id=sequence.mask_token_id,
            stopping=sequence.stopping,
        ).resume(tokens, sequence.frontier())


def resume_points(case: Case) -> list[Point]:
    sequence = make_sequence(case)
    tokens: tuple[int, ...] = ()
    points: list[Point] = []
    finish = None
    while finish is None:
        plan = denoise.open_step(sequence, case.settings)
        candidates = case.script.candidates(plan.candidates.tolist(), plan.denoise_counts.tolist())
        outcome = denoise.apply_step(sequence, case.settings, plan, candidates)
        tokens += outcome.tokens
        finish = outcome.finish
        if outcome.num_settled and finish is None:
            points.append(Point(case, sequence, tokens))
            points[-1].sequence.store(points[-1].sequence.in_flight_start)
    return points


# Planted bugs: each must be noticed by the invariants or the replay.


def choose_at_threshold(
    block: Block, settings: DecodeSettings, candidates: HostCandidates
) -> IndexArray:
    above = np.flatnonzero(candidates.confidences >= settings.confidence_threshold)
    return above if len(above) or not block.full else candidates.best(1)


def choose_always_one(
    block: Block, settings: DecodeSettings, candidates: HostCandidates
) -> IndexArray:
    above = np.flatnonzero(candidates.confidences > settings.confidence_threshold)
    return above if len(above) else candidates.best(1)


def choose_never_one(
    block: Block, settings: DecodeSettings, candidates: HostCandidates
) -> IndexArray:
    return np.flatnonzero(candidates.confidences > settings.confidence_threshold)


def best_last_on_ties(self: HostCandidates, count: int) -> IndexArray:
    by_score = np.argsort(-self.scores[::-1], kind="stable")
    return np.sort(len(self.scores) - 1 - by_score[:count])


def wants_block_always(sequence: Sequence, settings: DecodeSettings) -> bool:
    return True


def wants_block_beyond_window(sequence: Sequence, settings: DecodeSettings) -> bool:
    return not sequence.blocks or sequence.blocks[-1].progress >= settings.block_add_threshold


def activate_not_sticky(sequence: Sequence, settings: DecodeSettings) -> None:
    previous: Block | None = None
    for block in sequence.blocks:
        block.full = previous is None or previous.end <= sequence.final_len
        previous = block


def may_append_after_stop(sequence: Sequence) -> bool:
    return sequence.in_flight_end < sequence.last_block_end


def settle_out_of_order(sequence: Sequence) -> int:
    settled = 0
    for block in sequence.blocks:
        if not block.masks_left and block.end > sequence.final_len:
            sequence.final_len = block.end
            settled += 1
    return settled


def settle_with_masks(sequence: Sequence) -> int:
    for block in sequence.blocks:
        if block.end > sequence.final_len:
            if block.progress < 0.5:
                break
            sequence.final_len = block.end
            return 1
    return 0


def share_without_remainder(block: Block, denoising_steps: int) -> int:
    return max(1, (block.end - block.start) // denoising_steps)


def emit_uncut(sequence: Sequence, offset: int) -> tuple[tuple[int, ...], denoise.AnswerEnd | None]:
    start = sequence.prompt_len + offset
    tokens = tuple(sequence.token_ids[start : max(start, sequence.final_len)].tolist())
    ended = sequence.final_len >= sequence.answer_end
    return tokens, denoise.AnswerEnd.LENGTH if ended else None


def append_over_the_tail(self: Sequence) -> Block:
    start = self.in_flight_end
    block = Block(start, start + self.block_size, self.block_size, self.block_size)
    self.masked[block.start : block.end] = True
    self.blocks.append(block)
    return block


MUTANTS: tuple[tuple[object, str, Callable[..., object]], ...] = (
    (d2f, "choose", choose_at_threshold),
    (d2f, "choose", choose_always_one),
    (d2f, "choose", choose_never_one),
    (d2f, "wants_block", wants_block_always),
    (d2f, "wants_block", wants_block_beyond_window),
    (d2f, "activate", activate_not_sticky),
    (denoise, "may_append", may_append_after_stop),
    (denoise, "_settle", settle_out_of_order),
    (denoise, "_settle", settle_with_masks),
    (denoise, "_emit", emit_uncut),
    (denoise, "step_share", share_without_remainder),
    (HostCandidates, "best", best_last_on_ties),
    (Sequence, "append_block", append_over_the_tail),
)


@pytest.mark.parametrize(
    ("owner", "name", "bug"), MUTANTS, ids=[bug.__name__ for _, _, bug in MUTANTS]
)
def test_a_planted_bug_is_noticed(
    owner: object, name: str, bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert not all(survives(seed) for seed in range(300))


def survives(seed: int) -> bool:
    try:
        return agrees(random_case(seed))
    except (Broken, AssertionError):
        return False
