"""Answers to GSM8K and HumanEval are graded as their authors grade them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from effuse.cli.dataset import (
    Item,
    check_item,
    grader,
    last_number,
    program,
    read_items,
    stub_of,
)
from effuse.config.flags import BadInput


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 20 + 44 = 64, so 36 more.\n#### 36", "36"),
        ("The answer is $65,960.", "65960"),
        ("1,234,567.50 dollars", "1234567.50"),
        ("so -3", "-3"),
        ("it is 10-3", "3"),
        ("it fell to \u22127 degrees", "-7"),
        ("-$5", "-5"),
        ("$ 18.00", "18.00"),
        ("36.0", "36"),
        ("50%", "50"),
        (".5", "0.5"),
        ("36.", "36"),
        ("1,2345", "2345"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_values_not_spellings() -> None:
    item = Item(name="1", prompt="?", answer="20 and 45960 are\n#### 65,960")
    is_right = grader("gsm8k")
    assert is_right(item, "That makes $65960.00.")
    assert not is_right(item, "That makes 65,961.")
    assert not is_right(item, "I do not know.")


STUB = '''from typing import List


def twice(numbers: List[int]) -> List[int]:
    """ Double each.
    >>> twice([1])
    [2]
    """
'''
TEST = """
def check(candidate):
    assert candidate([1, 2]) == [2, 4]
    assert candidate([]) == []
"""
ITEM = Item(name="a", prompt=STUB, test=TEST, entry_point="twice")
WORDS = Item(
    name="b",
    prompt=f"You need to complete this code:\n{STUB}\n",
    test=TEST,
    entry_point="twice",
)
WHOLE = "def twice(numbers):\n    return [2 * one for one in numbers]\n"


@pytest.mark.parametrize("item", [ITEM, WORDS])
@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("    return [2 * one for one in numbers]\n", True),
        (
            "    return [2 * one for one in numbers]\n\ndef main(:\n",
            True,
        ),  # cut where the body ends
        ("    return [2 * one for one in numbers]\n```\nThis doubles each.", True),
        (f"Here it is:\n```python\n{WHOLE}```\nIt doubles.", True),
        (f"```\nprint('first')\n```\n```py\n{WHOLE}\n```", True),
        (WHOLE.replace("numbers):", "numbers: List[int]) -> List[int]:"), True),  # needs the import
        (f"```python\n{WHOLE}", True),  # cut off by its length
        ("    return numbers\n", False),
        ("    raise SystemExit(0)\n", False),
        ("    import os; os._exit(0)\n", False),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_humaneval_runs_the_tests(item: Item, answer: str, is_right: bool) -> None:
    assert grader("humaneval")(item, answer) == is_right


def test_words_before_the_code_are_left_out() -> None:
    assert stub_of(WORDS.prompt) == f"{STUB}\n"
    helpers = f"import math\n\ndef one():\n    return 1\n\n{STUB}"
    assert stub_of(helpers) == helpers
    item = Item(name="c", prompt=helpers, test=TEST, entry_point="twice")
    assert "def one" in program(item, WHOLE)


def test_a_line_without_what_a_score_needs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a", "answer": 36}\n{"task_id": "T/7", "prompt": "b"}\n')
    first, second = read_items(path)
    check_item("gsm8k", first)
    with pytest.raises(BadInput, match='T/7: expected an "answer" with a number'):
        check_item("gsm8k", second)
    with pytest.raises(BadInput, match='line 1: expected "test" and "entry_point"'):
        check_item("humaneval", first)
