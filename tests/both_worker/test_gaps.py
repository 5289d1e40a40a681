"""Prompts for other workers leave room in the gaps of answers, and none waits for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from both_worker.test_engine import Both, Two, asked_of
from checkpoints import write_tiny_checkpoint

from effuse.decode_worker.room import PATIENCE_S
from effuse.kvtransfer.messages import AttemptId
from effuse.models.part import Part, PartResult
from effuse.worker import messages
from effuse.worker.messages import Abort, StartPrefill


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """Two workers with 128 pages each."""
    both = Two(write_tiny_checkpoint(tmp_path / "model", "sdar", seed=3), 128)
    yield both
    for one in both.each:
        one.engine.close()


class Slow:
    """A runner that takes 10 ms, and 1 ms more for each token of a prompt, on a fake clock."""

    def __init__(self, one: Both) -> None:
        self._one, self._inner = one, one.runner
        self.prompts: list[int] = []  # tokens of prompts in each forward

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self.prompts.append(sum(len(part.token_ids) for part in parts if not part.candidates))
        self._one.clock.now += 0.01 + 0.001 * self.prompts[-1]
        return self._inner.run(parts)


@pytest.mark.parametrize("gap_s", [0.1, None])
def test_prompts_for_others_leave_room_in_the_gaps_of_answers(
    two: Two, gap_s: float | None
) -> None:
    one, _ = two.each
    one.runner = slow = Slow(one)  # type: ignore[assignment]
    answer = msgspec.structs.replace(asked_of("a", max_tokens=120), gap_s=gap_s)
    one.handle(answer)
    commits: list[float] = []
    for at in range(200):
        if len(commits) > 4 and at % 8 == 0:
            attempt = AttemptId(f"p{at}", 1, f"p{at}")
            prompt = tuple(100 + at % 50 + place % 40 for place in range(64))
            one.handle(StartPrefill(attempt=attempt, prompt_token_ids=prompt))
            one.handle(Abort(attempt=AttemptId(f"p{at - 24}", 1, f"p{at - 24}")))
        one.step()
        told = len(one.all_of(answer.attempt.transfer_id, messages.Committed))
        commits += [one.clock.now] * (told - len(commits))
        if one.said(answer.attempt, messages.Finished):
            break
    gaps = [later - earlier for earlier, later in pairwise(commits)]
    assert max(slow.prompts[10:]) > 0, "it computed prompts beside the answer"
    if gap_s is None:
        assert max(slow.prompts[10:]) == 64
    else:
        assert max(gaps) <= gap_s * 1.001 and max(slow.prompts[10:]) < 64


def test_a_long_prompt_for_another_worker_does_not_wait_for_shorter_ones(tmp_path: Path) -> None:
    """It is bidirectional, and never fits into a gap; each of the others does."""
    two = Two(write_tiny_checkpoint(tmp_path / "model", "llada", seed=3), 256)
    one, _ = two.each
    one.runner = slow = Slow(one)  # type: ignore[assignment]

    def answer(name: str) -> None:
        one.handle(msgspec.structs.replace(asked_of(name, max_tokens=160), gap_s=0.06))

    def prompt(name: str, length: int) -> None:
        attempt = AttemptId(name, 1, name)
        one.handle(StartPrefill(attempt=attempt, prompt_token_ids=tuple(range(20, 20 + length))))

    for at in range(4):
        answer(f"a{at}")
    for _ in range(40):
        one.step()
    prompt("long", 64)
    began_s, number = one.clock.now, 0
    while 64 not in slow.prompts[40:]:
        assert one.clock.now - began_s < PATIENCE_S + 0.5
        if one.clock.now - began_s > 0.1 * number:
            number += 1
            prompt(f"s{number}", 8)
            gone = AttemptId(f"s{number - 4}", 1, f"s{number - 4}")
            one.handle(Abort(attempt=gone))
            if number % 2:
                answer(f"b{number}")
        one.step()
    assert one.clock.now - began_s > PATIENCE_S, "answers went on"
    for each in two.each:
        each.engine.close()
