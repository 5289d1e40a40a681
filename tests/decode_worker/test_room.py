"""Decode workers that compute prompts: the room that gaps leave, as a rule and in an engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import pytest
from checkpoints import write_tiny_checkpoint
from decode_worker.test_engine_oracle import Twin
from decoding.engines import Rig, make_request

from effuse.decode_worker.room import (
    FIRST_PIECE,
    MARGIN,
    PATIENCE_S,
    SAFE,
    Gap,
    Launch,
    Room,
    StepTimes,
    room_s,
)
from effuse.models.part import Part, PartResult
from effuse.worker.messages import StartDecode, Verified


def times(steps: int = 4, step_s: float = 0.01, token_s: float = 1e-4) -> StepTimes:
    """Of an engine whose steps take so long at any batch."""
    found = StepTimes()
    for _ in range(40):
        found.note_gap(steps)
        for batch in (1, 8, 64):
            found.note_step(batch, 0, 0, step_s)
        for tokens in (64, 512):
            found.note_step(8, tokens, 1, step_s + tokens * token_s)
    return found


# What was measured.


def test_a_step_is_known_by_the_size_of_its_batch() -> None:
    found = StepTimes()
    assert found.step_s(8) == found.least_step_s == 0
    found.note_step(4, 0, 0, 0.02)
    found.note_step(64, 0, 0, 0.08)
    assert found.step_s(1) == found.step_s(7) == 0.02  # the next larger one that is known
    assert found.step_s(8) == found.step_s(1000) == 0.08
    assert found.least_step_s == 0.02


def test_a_piece_is_known_by_its_size() -> None:
    found = StepTimes()
    assert found.tokens_within(1.0) == FIRST_PIECE and found.tokens_within(0.0) == 0
    found.note_step(4, 0, 0, 0.02, rows=40)
    assert found.piece_s(100) == pytest.approx(0.05) and found.tokens_within(0.05) == 100
    found.note_step(4, 100, 1, 0.03)
    found.note_step(4, 2000, 2, 0.02 + 2 * 0.06)  # two pieces before one step of answers
    assert found.piece_s(100) == pytest.approx(0.01) and found.piece_s(50) == pytest.approx(0.005)
    assert found.piece_s(550) == pytest.approx(0.035) and found.piece_s(2000) == pytest.approx(0.12)
    draw = random.Random(1)
    for _ in range(100):
        tokens = draw.uniform(1, 5000)
        assert found.tokens_within(found.piece_s(tokens)) == pytest.approx(tokens)


def test_a_larger_piece_never_counts_as_faster() -> None:
    found = StepTimes()
    found.note_step(1, 100, 1, 0.05)
    found.note_step(1, 1000, 1, 0.02)
    assert found.piece_s(1000) == pytest.approx(0.05)
    assert found.tokens_within(0.049) < 100 and found.tokens_within(0.1) == pytest.approx(2000)


def test_prompts_without_answers_count_with_the_next_step_of_answers() -> None:
    room = Room(4096)
    room._launched += [Launch(0.0, 0, 100), Launch(0.1, 0, 60), Launch(0.3, 1, 0)]
    room.end(3, 0.5)
    assert room.times.piece_s(80) == pytest.approx(0.25)  # 0.5 s for two pieces of 80
    room._launched.append(Launch(0.5, 0, 100))
    room.end(4, 0.6)
    room._launched.append(Launch(0.6, 0, 0))
    room.rest(4, is_idle=True)  # the prompt was aborted
    room._launched.append(Launch(9.0, 1, 0))
    room.end(5, 9.2)
    assert room.times.step_s(1) == pytest.approx(0.2)


def test_two_steps_that_end_at_once_count_as_one() -> None:
    """A failed launch waits for all earlier ones (`Executor._launch_slots`)."""
    room = Room(4096)
    room._launched += [Launch(0.0, 4, 0, 16), Launch(0.1, 1, 0, 4)]
    room.end(2, 0.5)
    assert room.times.least_step_s == 0.5
    assert room.times.tokens_within(0.5) == pytest.approx(16)


# The rule.


@pytest.mark.parametrize(
    ("gaps", "ahead_s", "seconds"),
    [
        ([], 0.0, math.inf),  # no answer waits
        ([Gap(0.1)], 0.0, 0.09 - 0.04),
        ([Gap(0.1, 0.03, 3)], 0.0, 0.09 - 0.03 - 0.01),
        ([Gap(0.1, 0.06, 6)], 0.0, 0.09 - 0.06 - 0.01),  # one more step at least
        ([Gap(0.1, 0.2, 1)], 0.0, 0.0),  # it is late
        ([Gap(0.1), Gap(0.2, 0.1, 2), Gap(5.0)], 0.0, 0.05),  # the one with the least room
        ([Gap(0.1)], 0.02, 0.03),
        ([Gap(0.1)], 0.2, 0.0),
        ([Gap(0.04)], 0.0, math.inf),  # no batch keeps it, so it bounds nothing
        ([Gap(0.04), Gap(0.1)], 0.0, 0.05),
    ],
)
def test_the_room_in_gaps(gaps: list[Gap], ahead_s: float, seconds: float) -> None:
    assert room_s(gaps, times(), 8, ahead_s) == pytest.approx(seconds)


def test_a_large_batch_that_is_too_slow_leaves_no_room() -> None:
    found = times()
    for _ in range(100):
        found.note_step(64, 0, 0, 0.05)
    assert room_s([Gap(0.1)], found, 64) == 0 and room_s([Gap(0.1)], found, 8) > 0


def test_uncertain_steps_leave_less_room() -> None:
    found = StepTimes()
    for at in range(1000):
        found.note_gap(2 + 4 * (at % 2))
    assert found.gap_steps == pytest.approx(4 + MARGIN * 2, rel=0.1)


Rule = Callable[[Sequence[Gap], StepTimes, int], float]


def play(rule: Rule, seed: int, limits: Sequence[float]) -> tuple[float, int]:
    """The longest gap as a share of its objective, and the prompt tokens of 2000 steps in which
    there is always a prompt."""
    draw, found, now, tokens, worst = random.Random(seed), times(), 0.0, 0, 0.0
    began, steps = [0.0] * len(limits), [draw.randint(0, 3) for _ in limits]
    for _ in range(2000):
        gaps = [
            Gap(*each) for each in zip(limits, (now - one for one in began), steps, strict=True)
        ]
        piece = int(min(4096, found.tokens_within(rule(gaps, found, len(limits)))))
        tokens += piece
        now += 0.01 * draw.uniform(0.9, 1.05) + piece * 1e-4
        for at, limit_s in enumerate(limits):
            steps[at] += 1
            if steps[at] == 4:
                worst = max(worst, (now - began[at]) / limit_s)
                began[at], steps[at] = now, 0
    return worst, tokens


LIMITS = (0.1, 0.15, 0.15, 0.4, 5.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_keeps_every_gap_and_computes_prompts(seed: int) -> None:
    worst, tokens = play(room_s, seed, LIMITS)
    assert worst <= 1
    # The tightest objective leaves at most 0.05 s of prompts in each 0.09 s.
    assert tokens > 100_000


WRONG: dict[str, Rule] = {
    "the most patient answer": lambda gaps, found, batch: max(
        room_s([one], found, batch) for one in gaps
    ),
    "the mean room": lambda gaps, found, batch: (
        sum(room_s([one], found, batch) for one in gaps) / len(gaps)
    ),
    "no elapsed time": lambda gaps, found, batch: room_s(
        [one._replace(elapsed_s=0.0) for one in gaps], found, batch
    ),
    "no steps that are left": lambda gaps, found, batch: room_s(
        [one._replace(steps=4) for one in gaps], found, batch
    ),
    "as without objectives": lambda gaps, found, batch: math.inf,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str) -> None:
    assert play(WRONG[name], 0, LIMITS)[0] > 1


# In an engine.


STEP_S, TOKEN_S = 0.01, 1e-3


class Timed:
    """A forward that takes `STEP_S`, and `TOKEN_S` more for each prompt token, on a fake clock."""

    def __init__(self, rig: Rig) -> None:
        self._rig, self._inner = rig, rig.forward
        self.pieces: list[tuple[int, bool]] = []  # prompt tokens, beside answers

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        prompts = [len(part.token_ids) for part in parts if not part.candidates]
        self.pieces.append((sum(prompts), len(prompts) < len(parts)))
        self._rig.clock.now += STEP_S + TOKEN_S * sum(prompts)
        return self._inner.run(parts)


class Stream:
    """An engine whose answers' commits are timed."""

    def __init__(self, twin: Twin, gap_s: float | None) -> None:
        self.twin, self.gap_s = twin, gap_s
        self.rig = Rig(twin.model, budget=400, num_pages=512, caches=False)
        self.forward = Timed(self.rig)
        self.rig.forward = self.forward
        self.rig.connect(None)
        self.asked: list[StartDecode] = []
        self.commits: dict[str, list[float]] = {}

    def start(self, name: str, prompt_len: int, max_tokens: int = 32) -> None:
        prompt = [20 + at % 12 for at in range(prompt_len)]
        request = make_request(
            name, prompt, max_tokens=max_tokens, stop_token_ids=(), window=1,
            algorithm="block_diffusion", denoising_steps=2, confidence_threshold=1.0,
        )  # fmt: skip
        request = msgspec.structs.replace(request, gap_s=self.gap_s)
        self.asked.append(request)
        self.rig.start(request)

    def step(self) -> bool:
        has_moved = self.rig.step()
        for request in self.asked:
            name = request.attempt.transfer_id
            seen = self.commits.setdefault(name, [])
            seen += [self.rig.clock.now] * (len(self.rig.answers[name].commits) - len(seen))
        return has_moved

    def run(self) -> None:
        assert any(not self.step() for _ in range(5000)), "still busy"

    def longest_gap(self, name: str) -> float:
        seen = self.commits[f"transfer-{name}"]
        return max(later - earlier for earlier, later in pairwise(seen))

    def check_tokens(self) -> None:
        for request in self.asked:
            expected = self.twin.expected(msgspec.structs.replace(request, gap_s=None))
            assert self.rig.answers[request.attempt.transfer_id].token_ids == expected.token_ids


@pytest.fixture(scope="module", params=["llada", "sdar"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A bidirectional model, and a block-causal one."""
    directory = tmp_path_factory.mktemp(request.param)
    return Twin(write_tiny_checkpoint(directory / "model", request.param, seed=3))


def warmed(twin: Twin, gap_s: float | None, max_tokens: int = 120) -> Stream:
    """A stream whose engine has measured steps and pieces, with two answers under way."""
    stream = Stream(twin, gap_s)
    stream.start("warm", 60)
    stream.run()
    for name in ("a", "b"):
        stream.start(name, 12, max_tokens=max_tokens)
    while len(stream.commits.get("transfer-b", ())) < 4:
        stream.step()
    del stream.forward.pieces[:]
    return stream


def is_cut(twin: Twin) -> bool:
    return twin.model.config.prompt_attention == "causal_blocks"


def test_long_prompts_leave_the_gaps_of_answers_alone(twin: Twin) -> None:
    stream = warmed(twin, 0.1)
    for at in range(3):
        stream.start(f"p{at}", 40)
    stream.run()
    beside = [tokens for tokens, has_answers in stream.forward.pieces if tokens and has_answers]
    assert beside and max(stream.longest_gap(name) for name in "ab") <= 0.1 * 1.001
    assert sum(tokens for tokens, _ in stream.forward.pieces) >= 3 * 40 - 3 * 4
    if is_cut(twin):
        assert max(beside) <= (SAFE * 0.1 - 0.02) / TOKEN_S  # 0.02: the steps of one gap
    else:
        assert set(beside) == {40}
    assert stream.rig.engine.counters.prompts_overdue == 0
    stream.check_tokens()


def test_without_an_objective_a_prompt_takes_the_whole_step(twin: Twin) -> None:
    stream = warmed(twin, None)
    stream.start("p", 200)
    stream.run()
    assert (200, True) in stream.forward.pieces
    assert stream.longest_gap("a") > 0.2
    load = stream.rig.engine.load()
    assert (load.prompt_piece, load.prompt_rate) == (0, 0)
    stream.check_tokens()


def test_a_bidirectional_prompt_waits_until_nobody_does_or_for_its_patience(twin: Twin) -> None:
    """It is too long for any gap."""
    stream = warmed(twin, 0.1)
    stream.start("p", 200)
    began_s = stream.rig.clock.now
    stream.run()
    whole = [has_answers for tokens, has_answers in stream.forward.pieces if tokens == 200]
    if is_cut(twin):
        assert not whole and stream.longest_gap("a") <= 0.1 * 1.001
    else:
        has_waited = stream.commits["transfer-a"][-1] - began_s < PATIENCE_S
        assert whole == [not has_waited]
        assert stream.rig.engine.counters.prompts_overdue == (not has_waited)
    stream.check_tokens()


def test_no_prompt_waits_for_ever(twin: Twin) -> None:
    """Long answers leave no room for a piece."""
    stream = warmed(twin, 0.025, max_tokens=480)  # keeps two steps, and hardly a prompt token more
    stream.start("p", 200, max_tokens=4)
    began_s = stream.rig.clock.now
    while not stream.commits.get("transfer-p"):
        stream.step()
    assert PATIENCE_S <= stream.rig.clock.now - began_s < PATIENCE_S + 0.3
    assert len(stream.commits["transfer-a"]) < 120, "it has not ended"
    assert stream.rig.engine.counters.prompts_overdue == 1


def test_an_engine_offers_the_room_of_a_new_gap(twin: Twin) -> None:
    stream = warmed(twin, 0.1)
    load = stream.rig.engine.load()
    most = (SAFE * 0.1 - 0.02) / TOKEN_S
    assert 0.5 * most <= load.prompt_piece <= 1.01 * most
    assert load.prompt_rate == pytest.approx(load.prompt_piece / 0.1, rel=0.02)
    stream.run()
    stream.step()
    assert 0.5 * most <= stream.rig.engine.load().prompt_piece <= (SAFE * 0.1 - STEP_S) / TOKEN_S
    stream.gap_s = None  # nobody's gap has an objective now
    stream.start("c", 12)
    stream.run()
    free = stream.rig.engine.load()
    assert free.prompt_piece == 400  # a whole step
    assert free.prompt_rate == pytest.approx(1 / TOKEN_S, rel=0.3)


def test_an_answer_without_a_block_leaves_the_room_of_its_gaps_to_come(twin: Twin) -> None:
    """With more on offer, prompts would wait behind these gaps."""
    stream = warmed(twin, 0.1)
    stream.run()
    stream.start("c", 12)
    while stream.step() and len(stream.commits["transfer-c"]) < 2:
        assert stream.rig.engine.load().prompt_piece <= (SAFE * 0.1 - STEP_S) / TOKEN_S


def test_commits_report_the_time_for_prompts_and_the_batch(twin: Twin) -> None:
    stream = warmed(twin, None)
    begun = len(stream.commits["transfer-a"])
    for name, length in (("p", 40), ("s", 3)):
        stream.start(name, length)
    stream.run()
    costs = stream.rig.answers["transfer-a"].commits[begun:]
    moments = pairwise(stream.commits["transfer-a"][begun - 1 :])
    assert max(one.prompts_s for one in costs) == pytest.approx(40 * TOKEN_S, rel=0.2)
    for (before, after), cost in zip(moments, costs, strict=True):
        assert after - before - cost.prompts_s == pytest.approx(2 * STEP_S, rel=0.1)
    assert {one.batch for one in costs} <= {1, 2, 3, 4} and costs[0].batch >= 2
    for name, expected in (("p", 0.04), ("s", 0.0 if is_cut(twin) else 0.003)):
        (told,) = stream.rig.answers[f"transfer-{name}"].of(Verified)
        assert isinstance(told, Verified) and told.compute_s == pytest.approx(expected, 0.3, 0.002)


def test_counters_of_own_prompts(twin: Twin) -> None:
    stream = Stream(twin, 0.1)
    stream.start("a", 40)
    stream.run()
    computed = 40 if not is_cut(twin) else 40 // 4 * 4
    assert stream.rig.engine.load().prompt_tokens == computed


def test_a_long_prompt_does_not_wait_for_shorter_ones_that_keep_coming(twin: Twin) -> None:
    """Each of them fits into a gap, and the oldest prompt never does."""
    stream = warmed(twin, 0.1, max_tokens=480)
    stream.start("p", 200, max_tokens=4)
    began_s, number = stream.rig.clock.now, 0
    while not stream.commits.get("transfer-p"):
        assert stream.rig.clock.now - began_s < 2 * PATIENCE_S
        if stream.rig.clock.now - began_s > 0.2 * number:
            stream.start(f"s{number}", 16, max_tokens=4)
            number += 1
        stream.step()
    assert len(stream.commits["transfer-a"]) < 120, "it has not ended"
