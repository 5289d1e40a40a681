"""Judging an answer and comparing two ways of decoding, by hand-made numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from effuse.cli.evaluate import Outcome, judge, paired_difference, table, worked_tokens
from effuse.problems.problem import Problem

ASKED = Problem(prompt="p", answer="2+2=4\nanswer: 4", kind="k", phrasing="f", steps=1)


def _decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def _ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_right_answer() -> None:
    ids = _ids(ASKED.answer)
    outcome = judge(ASKED, ids, [(4, 2), (8, 5), (len(ids), 7)], 9, _decode)
    assert outcome == Outcome(
        exact=True, final=True, tokens=15, forwards=9, worked_tokens=6, worked_forwards=5
    )


def test_a_right_final_answer_behind_other_steps() -> None:
    ids = _ids("1+3=4\nanswer: 4")
    outcome = judge(ASKED, ids, [(len(ids), 3)], 3, _decode)
    assert (outcome.exact, outcome.final) == (False, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("answer: 4", 0), ("a\nanswer: 4", 2), ("never ends", 10), ("the answer: 4", 13), ("", 0)],
)
def test_the_worked_part_ends_where_the_answer_line_begins(text: str, expected: int) -> None:
    assert worked_tokens(text, _ids(text), _decode) == expected


def _outcome(exact: bool) -> Outcome:
    return Outcome(exact, exact, 8, 4, 6, 3)


def test_the_paired_difference() -> None:
    base = [_outcome(True)] * 4
    ours = [_outcome(True)] * 3 + [_outcome(False)]
    mean, low, high = paired_difference(ours, base)
    assert mean == -25.0
    assert (low, high) == pytest.approx((-74.0, 24.0))  # 1.96 * 50 / 2 to either side


def test_the_table() -> None:
    base, ours = [_outcome(True)] * 4, [_outcome(True)] * 3 + [_outcome(False)]
    lines = table([("one", base), ("two", ours)]).splitlines()
    assert lines[1].split() == ["one", "100.00", "%", "100.00", "%", "2.00", "2.00"]
    assert lines[2].split()[-3:] == ["-25.00", "[-74.00,", "+24.00]"]
