"""The problem generator: determinism, the split, ranges, language, and the answer checker."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from effuse.problems.problem import (
    HELD_OUT_ONE_IN,
    Problem,
    check,
    final_answer,
    is_held_out,
    problem,
    prompt_hash,
)

SAMPLE = [problem(5, index) for index in range(2_000)]
EQUATION = re.compile(r"(\d+) ([+*/-]) (\d+) = (\d+)")


def test_same_seed_and_index_give_the_same_problem() -> None:
    again = [problem(5, index) for index in range(50)]
    assert again == SAMPLE[:50]
    assert problem(6, 0) != SAMPLE[0]


def test_hash_does_not_change_between_versions() -> None:
    assert prompt_hash("2 + 2") == 11_266_878_079_279_583_276


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (0, -1)])
def test_negative_numbers_are_refused(seed: int, index: int) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        problem(seed, index)


def test_split_is_decided_by_the_prompt_alone() -> None:
    assert not any(is_held_out(each.prompt) for each in SAMPLE)
    held_out = [problem(5, index, "held_out") for index in range(30)]
    assert all(is_held_out(each.prompt) for each in held_out)
    assert all(prompt_hash(each.prompt) % HELD_OUT_ONE_IN == 0 for each in held_out)


def test_language_is_rich() -> None:
    assert len({each.phrasing for each in SAMPLE}) >= 40
    words = {word for each in SAMPLE for word in re.findall(r"[^\W\d]+", each.prompt)}
    assert len(words) >= 400
    kinds = {each.kind for each in SAMPLE}
    assert kinds == {"story", "compare", "products", "arithmetic", "list"}


def test_numbers_steps_and_lists_stay_in_range() -> None:
    numbers = [
        int(number) for each in SAMPLE for number in re.findall(r"\d+", each.prompt + each.answer)
    ]
    assert max(numbers) <= 9_999
    assert max(numbers) > 9_000
    lists = [each.steps for each in SAMPLE if each.kind == "list"]
    worked = [each.steps for each in SAMPLE if each.kind != "list"]
    assert (min(lists), max(lists)) == (3, 12)
    assert (min(worked), max(worked)) == (2, 6)


def test_every_worked_line_is_right_and_the_last_one_is_the_answer() -> None:
    for each in SAMPLE:
        equations = EQUATION.findall(each.answer)
        if each.kind != "list":
            assert len(equations) == each.steps, each
            assert final_answer(each.answer) == equations[-1][3]
        for left, sign, right, result in equations:
            a, b = int(left), int(right)
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
            assert value == int(result), each
            assert sign != "/" or a % b == 0, each


def _listed(text: str) -> list[str]:
    return re.findall(r"\w+(?=, )|(?<=, )\w+", text)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("sort/", lambda items: sorted(items, key=int)),
        ("sort_down/", lambda items: sorted(items, key=int, reverse=True)),
        ("alphabet/", sorted),
        ("reverse/", lambda items: items[::-1]),
        ("copy/", lambda items: items),
        ("largest/", lambda items: [max(items, key=int)]),
        ("smallest/", lambda items: [min(items, key=int)]),
    ],
)
def test_list_answers_are_right(form: str, expected: object) -> None:
    assert callable(expected)
    tasks = [each for each in SAMPLE if each.phrasing.startswith(form)]
    assert tasks
    for each in tasks:
        listed = re.sub(r"^.*smallest first|^.*largest first", "", each.prompt)
        answer = final_answer(each.answer)
        assert answer is not None
        assert answer.split(", ") == expected(_listed(listed)), each


def test_counts_are_running_counts() -> None:
    tasks = [each for each in SAMPLE if each.phrasing.startswith("count/")]
    for each in tasks:
        counts = [int(count) for count in re.findall(r"\w+ (\d+)", each.answer.splitlines()[0])]
        assert len(counts) == each.steps
        assert final_answer(each.answer) == str(counts[-1])
        if "odd numbers" in each.prompt:
            items = re.findall(r"\d+(?= \d)", each.answer.splitlines()[0])
            assert counts[-1] == sum(int(item) % 2 for item in items)


EXAMPLE = Problem("p", "start: 3\nadds 2: 3 + 2 = 5\nanswer: 5", "story", "x/0", 1)


@pytest.mark.parametrize(
    ("text", "exact", "final"),
    [
        (EXAMPLE.answer, True, True),
        (EXAMPLE.answer + "\n", False, True),
        ("start: 3\nanswer: 5", False, True),
        ("answer: 6\nanswer: 5", False, True),
        ("answer: 5\nanswer: 6", False, False),
        ("start: 3\nadds 2: 3 + 2 = 5\nanswer: 55", False, False),
        ("the answer: 5", False, False),
        ("", False, False),
    ],
)
def test_checker(text: str, exact: bool, final: bool) -> None:
    verdict = check(EXAMPLE, text)
    assert (verdict.exact, verdict.final) == (exact, final)


def test_checker_does_not_accept_a_missing_answer_on_both_sides() -> None:
    assert final_answer("no last line") is None
    assert not check(replace(EXAMPLE, answer="answer: 1"), "none").final
