"""Hand-computed cases of the loops, and planted bugs that each of them must catch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
import pytest

from oracle import rules
from oracle.decode import denoise_blocks, denoise_canvas, new_canvas
from oracle.rules import Block, Canvas, State
from oracle.settings import Candidate, OracleResult, Settings

MASK = 99
STOP = 7
HALF = 0.5  # exact in fp32, so that strict and not strict differ

# Per forward: position -> (token, confidence). Other positions offer token 100 + position at 0.1.
Script = Sequence[Mapping[int, tuple[int, float]]]


def scripted(script: Script) -> Callable[[list[int], dict[int, int]], dict[int, Candidate]]:
    forwards = iter(script)

    def predict(token_ids: list[int], wanted: dict[int, int]) -> dict[int, Candidate]:
        said = next(forwards, {})
        found = {p: said.get(p, (100 + p, 0.1)) for p in wanted}
        return {p: Candidate(token, c, c) for p, (token, c) in found.items()}

    return predict


class Knobs(TypedDict, total=False):
    """Settings that more than one run has."""

    algorithm: str
    denoising_steps: int
    max_tokens: int


def run(
    script: Script,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    origin: int | None = None,
    block: int = 4,
    **knobs: object,
) -> OracleResult:
    """Blocks start at the prompt's end unless an origin is given; thresholds are one half."""
    values = {"confidence_threshold": HALF, "block_add_threshold": HALF} | knobs
    settings = Settings(**values)  # type: ignore[arg-type]
    start = len(prompt) if origin is None else origin
    canvas = new_canvas(list(prompt), start, block, settings.max_tokens)
    return denoise_blocks(scripted(script), canvas, settings, (STOP,), MASK)


def sure(*positions: int) -> dict[int, tuple[int, float]]:
    return {p: (10 + p, 0.9) for p in positions}


def case_threshold_is_strict() -> None:
    """Two candidates exactly at the threshold: only the fallback writes, the lower position."""
    result = run([{3: (13, HALF), 4: (14, HALF)}], max_tokens=4)
    assert result.steps[0].writes == {3: 13}


def case_blocks_settle_in_order() -> None:
    """The second block is complete first; it waits, and the text comes in order."""
    result = run([sure(3, 4), sure(7, 8, 9, 10), sure(6)], max_tokens=8, window=2)
    assert result.steps[1].writes == {5: 105, 7: 17, 8: 18, 9: 19, 10: 20}
    assert [step.settled for step in result.steps] == [(), (), (3, 7)]
    assert [step.emitted for step in result.steps[:2]] == [(), ()]
    assert result.token_ids == (13, 14, 105, 16, 17, 18, 19, 20)
    assert result.occurred.blocks_waiting == 1
    assert result.occurred.steps_settling_several == 1


def case_semi_active_blocks_have_no_fallback() -> None:
    """Half of block 1 appends block 2, which writes only what passes until block 1 is complete."""
    result = run([sure(3, 4), {8: (18, 0.6)}, {}, {}], max_tokens=8)
    second = result.steps[1]
    assert [(b.start, b.full) for b in second.blocks] == [(3, True), (7, False)]
    assert second.writes == {5: 105, 8: 18}
    assert result.steps[2].writes == {6: 106}
    assert result.steps[3].blocks[-1].full
    assert result.occurred.semi_active_writes == 1


def case_appending_needs_at_least_the_threshold() -> None:
    """1 of 10 is progress 0.1: reached, though fp32 and fp64 disagree about 0.1."""
    result = run(
        [sure(6), {}], prompt=range(6), origin=0, block=16, max_tokens=40, block_add_threshold=0.1
    )
    assert [len(step.blocks) for step in result.steps[:2]] == [1, 2]


def case_progress_counts_masks_at_birth() -> None:
    """Ten masks beside six prompt tokens: four written are 0.4, not ten of sixteen."""
    knobs = {"prompt": range(6), "origin": 0, "block": 16, "max_tokens": 40}
    result = run([sure(6), sure(7), sure(8), sure(9)], block_add_threshold=0.4, **knobs)  # type: ignore[arg-type]
    assert [len(step.blocks) for step in result.steps[:5]] == [1, 1, 1, 1, 2]


def case_one_block_a_step_within_the_window() -> None:
    """All candidates pass at once, still one block is appended a step, and two fly at most."""
    everything = {p: (10 + p, 0.9) for p in range(3, 40)}
    result = run([everything] * 9, max_tokens=12)
    assert [len(step.blocks) for step in result.steps] == [1, 1, 1]
    slow = run([sure(3, 4), sure(7, 8), sure(11, 12)], max_tokens=16, window=2)
    assert max(len(step.blocks) for step in slow.steps) == 2


def case_a_stop_ends_appending_not_the_request() -> None:
    """A stop written in block 2 while block 1 has masks: nothing is appended, both finish."""
    stop = {7: (17, 0.9), 8: (STOP, 0.9), 9: (19, 0.9)}
    result = run([sure(3, 4), stop, {}, {}, {}, {}], max_tokens=40)
    assert max(b.start for step in result.steps for b in step.blocks) == 7
    assert (result.token_ids, result.finish) == ((13, 14, 105, 106, 17), "stop")
    assert result.occurred.stops_behind_unfinished == 1
    assert result.steps[-1].emitted == (17,)


def case_prompt_tail_is_immutable_and_never_a_stop() -> None:
    """Blocks of 4 from 0: the first holds two prompt tokens, one of them a stop id."""
    result = run([sure(6, 7), sure(8, 9)], prompt=[1, 2, 3, 4, 5, STOP], origin=0, max_tokens=4)
    assert result.steps[0].blocks[0].start == 4 and result.steps[0].blocks[0].masks == 2
    assert (result.token_ids, result.finish) == ((16, 17, 18, 19), "length")
    assert (result.occurred.ragged_tails, result.occurred.prompts_shorter_than_block) == (1, 0)
    assert run([], prompt=[1], origin=0, max_tokens=3).occurred.prompts_shorter_than_block == 1


def case_text_is_cut_at_max_tokens() -> None:
    """Six tokens of two blocks of four; a stop beyond the sixth is no stop."""
    beyond = sure(7, 8, 10) | {9: (STOP, 0.9)}
    result = run([sure(3, 4, 5, 6), beyond], max_tokens=6)
    assert (result.token_ids, result.finish) == ((13, 14, 15, 16, 17, 18), "length")
    assert result.occurred.cut_last_blocks == 1


def case_the_fallback_breaks_ties_to_the_left() -> None:
    result = run([{4: (14, 0.3), 5: (15, 0.3)}], max_tokens=4)
    assert result.steps[0].writes == {4: 14}


def case_full_counts_masks_at_birth() -> None:
    """A ragged first block of two masks is half done by one of them."""
    result = run(
        [sure(6), {}], prompt=range(6), origin=0, max_tokens=8, full_activation_threshold=HALF
    )
    assert [b.full for b in result.steps[1].blocks] == [True, True]
    assert result.steps[1].writes == {7: 107, 8: 108}


def case_schedule_spreads_masks_evenly() -> None:
    """Eight positions over three steps are 3, 3, 2, even if a prompt has three of them."""
    knobs: Knobs = {"algorithm": "block_diffusion", "denoising_steps": 3, "max_tokens": 5}
    static = run([], prompt=range(3), origin=0, block=8, remasking="sequential", **knobs)
    assert [list(step.writes) for step in static.steps] == [[3, 4, 5], [6, 7]]
    scores = {3: (13, 0.1), 4: (14, 0.4), 5: (15, 0.2), 6: (16, 0.45), 7: (17, 0.3)}
    best = run(
        [scores] * 3, prompt=range(3), origin=0, block=8, remasking="low_confidence_static", **knobs
    )
    assert [list(step.writes) for step in best.steps] == [[6, 4, 7], [5, 3]]


def case_dynamic_takes_all_that_pass_if_they_suffice() -> None:
    knobs: Knobs = {"algorithm": "block_diffusion", "denoising_steps": 2, "max_tokens": 4}
    plenty = run([sure(3, 4, 5), {}], **knobs)
    assert [list(step.writes) for step in plenty.steps] == [[3, 4, 5], [6]]
    at_threshold = {3: (13, HALF), 4: (14, HALF)}
    none_passes = run([at_threshold], **(knobs | Knobs(denoising_steps=4)))
    assert list(none_passes.steps[0].writes) == [3]
    short = run([sure(5), {}], **knobs)
    assert [sorted(step.writes) for step in short.steps] == [[3, 5], [4, 6]]


def case_entropies_are_bounded_together() -> None:
    knobs: Knobs = {"algorithm": "block_diffusion", "denoising_steps": 4, "max_tokens": 4}
    scores = {3: (13, -0.25), 4: (14, -0.5), 5: (15, -0.125), 6: (16, -0.5)}
    for bound, writes in ((0.0, [5]), (0.375, [5]), (0.4, [5, 3]), (1.0, [5, 3, 4])):
        found = run([scores], remasking="entropy_bounded", entropy_bound=bound, **knobs)
        assert list(found.steps[0].writes) == writes


def case_block_diffusion_has_one_block_in_flight() -> None:
    everything = {p: (10 + p, 0.9) for p in range(3, 40)}
    result = run([everything] * 4, max_tokens=12, algorithm="block_diffusion", window=1)
    assert [[b.start for b in step.blocks] for step in result.steps] == [[3], [7], [11]]


def case_vanilla_takes_the_most_confident_of_the_whole_canvas() -> None:
    settings = Settings(algorithm="vanilla", max_tokens=5, tokens_per_step=2)
    said = {3: (13, 0.1), 4: (14, 0.9), 5: (STOP, 0.2), 6: (16, 0.9), 7: (17, 0.3)}
    result = denoise_canvas(scripted([said] * 3), [1, 2, 3], settings, (STOP,), MASK)
    assert [list(step.writes) for step in result.steps] == [[4, 6], [7, 5], [3]]
    assert (result.token_ids, result.finish, result.forwards) == ((13, 14), "stop", 3)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_case(case: Callable[[], None]) -> None:
    case()


def _settle_out_of_order(canvas: Canvas, index: int) -> bool:
    return not canvas.masks(canvas.blocks[index])


def _all_full(canvas: Canvas, settings: Settings) -> None:
    for block in canvas.blocks:
        block.full = True


def _forget_full(canvas: Canvas, settings: Settings) -> None:
    for index, block in enumerate(canvas.blocks):
        block.full = index == 0


def _cut_with_prompt(canvas: Canvas, block: Block, stops: Sequence[int]) -> tuple[list[int], bool]:
    text = canvas.tokens[block.start : min(block.end, canvas.limit)]
    return (text[: text.index(STOP)], True) if STOP in text else (text, False)


def _cut_nowhere(canvas: Canvas, block: Block, stops: Sequence[int]) -> tuple[list[int], bool]:
    text = canvas.tokens[max(block.start, canvas.prompt_len) : block.end]
    return (text[: text.index(STOP)], True) if STOP in text else (text, False)


def _append_whatever_was_written(canvas: Canvas, settings: Settings) -> bool:
    active = [block for block in canvas.blocks if block.state is State.ACTIVE]
    return len(active) < settings.window and not canvas.is_complete()


def _append_despite_the_window(canvas: Canvas, settings: Settings) -> bool:
    last = canvas.blocks[-1] if canvas.blocks else None
    return not canvas.is_complete() and (
        last is None or rules.progress(canvas, last) >= settings.block_add_threshold
    )


def _rightmost(candidates: dict[int, Candidate], count: int) -> list[int]:
    return sorted(candidates, key=lambda p: (-candidates[p].score, -p))[:count]


def _progress_of_the_whole(canvas: Canvas, block: Block) -> float:
    return 1 - len(canvas.masks(block)) / (block.end - block.start)


def _not_strict(value: float, threshold: float) -> bool:
    return bool(np.float32(value) >= np.float32(threshold))


def _strict(value: float, threshold: float) -> bool:
    return bool(np.float32(value) > np.float32(threshold))


def _mixed_precision(value: float, threshold: float) -> bool:
    return value >= float(np.float32(threshold))


def _always_one(block: Block, settings: Settings) -> int:
    return 1


PLANTED: list[tuple[str, Callable[..., object], Callable[[], None]]] = [
    ("passes", _not_strict, case_threshold_is_strict),
    ("passes", _not_strict, case_dynamic_takes_all_that_pass_if_they_suffice),
    ("reached", _strict, case_appending_needs_at_least_the_threshold),
    ("reached", _mixed_precision, case_appending_needs_at_least_the_threshold),
    ("may_settle", _settle_out_of_order, case_blocks_settle_in_order),
    ("activate", _all_full, case_semi_active_blocks_have_no_fallback),
    ("activate", _forget_full, case_full_counts_masks_at_birth),
    ("progress", _progress_of_the_whole, case_progress_counts_masks_at_birth),
    ("wants_block", _append_whatever_was_written, case_a_stop_ends_appending_not_the_request),
    ("wants_block", _append_despite_the_window, case_one_block_a_step_within_the_window),
    ("wants_block", _append_despite_the_window, case_a_stop_ends_appending_not_the_request),
    ("cut", _cut_with_prompt, case_prompt_tail_is_immutable_and_never_a_stop),
    ("cut", _cut_nowhere, case_text_is_cut_at_max_tokens),
    ("best", _rightmost, case_the_fallback_breaks_ties_to_the_left),
    ("step_share", _always_one, case_schedule_spreads_masks_evenly),
]


@pytest.mark.parametrize(
    ("rule", "bug", "case"),
    PLANTED,
    ids=[f"{rule}-{case.__name__.removeprefix('case_')}" for rule, _, case in PLANTED],
)
def test_planted_bug_is_caught(
    rule: str,
    bug: Callable[..., object],
    case: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, rule, bug)
    with pytest.raises((AssertionError, ValueError)):
        case()
