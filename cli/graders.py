"""Whether an answer to a public benchmark's prompt is right.

GSM8K: the answer's last number equals the reference's. HumanEval: the program that the answer
completes passes its tests, in a sandbox (`sandbox.py`). Everything else is a function of text.
"""

import ast
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final, Literal

from effuse.cli.dataset import DatasetError, Item
from effuse.cli.sandbox import passes

Scorer = Literal["gsm8k", "humaneval"]
Grader = Callable[[Item, str], bool]
"""Whether an answer's text is right; the item has passed `check_item`."""

# A minus is a sign only if no operand precedes it.
_NUMBER: Final = re.compile(
    r"((?<![\w.)\]%])[-\u2212])?\$?\s?((?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)"
)
_FENCE: Final = re.compile(
    r"```[^\S\n]*(?:python3?|py)?[^\S\n]*\n(.*?)(?:\n[^\S\n]*```|\Z)", re.DOTALL
)
# Ends of a function's body: the stop strings of HumanEval's authors, and a fence.
_BODY_END: Final = re.compile(r"\n(?:class |def |#|@|if |print\(|print |```)")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without commas between thousands; None if it has none."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    value = Decimal(found[-1][2].replace(",", ""))
    return -value if found[-1][1] else value


def program(item: Item, text: str) -> str:
    """The Python source that runs an answer to a HumanEval prompt against its tests.

    The answer is the function's body or a whole function, with or without a fence.
    """
    stub = stub_of(item.prompt)
    answer = _fenced(text, item.entry_point)
    if is_defined(item.entry_point, answer):
        solution = f"{_before(item.entry_point, stub)}\n{answer}"
    else:
        solution = stub + _BODY_END.split(answer, maxsplit=1)[0]
    return f"{solution}\n\n{item.test}\n\ncheck({item.entry_point})\n"


def stub_of(prompt: str) -> str:
    """The code at the end of a prompt, without introductory words such as "Complete this code:"."""
    lines = prompt.splitlines(keepends=True)
    for at in range(len(lines)):
        if _is_code("".join(lines[at:])):
            return "".join(lines[at:])
    return prompt


def is_defined(name: str, code: str) -> bool:
    """Whether `code` defines this function at its top level."""
    return re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


def check_item(scorer: Scorer | None, item: Item) -> None:
    """Raises DatasetError if a line lacks a field that a scorer needs."""
    if scorer == "gsm8k" and last_number(item.answer) is None:
        raise DatasetError(f'--scorer gsm8k: {item.name}: expected an "answer" with a number')
    if scorer == "humaneval" and not (item.test and item.entry_point.isidentifier()):
        raise DatasetError(f'--scorer humaneval: {item.name}: expected "test" and "entry_point"')


def grader(scorer: Scorer) -> Grader:
    """A way to grade answers."""
    if scorer == "gsm8k":
        return lambda item, text: last_number(text) == last_number(item.answer)
    return lambda item, text: passes(program(item, text))


def _fenced(text: str, name: str) -> str:
    """The fenced block that defines the function, otherwise the first block. A text that begins
    indented or has no fence is itself the code.
    """
    if text.lstrip("\n").startswith(("  ", "\t")):
        return text
    blocks = [found[1] for found in _FENCE.finditer(text)]
    defining = [block for block in blocks if is_defined(name, block)]
    return (defining or blocks or [text])[0]


def _before(name: str, stub: str) -> str:
    """Imports and helpers of a stub before the function to be written."""
    return re.split(rf"^(?:async )?def {re.escape(name)}\b", stub, maxsplit=1, flags=re.MULTILINE)[
        0
    ]


def _is_code(stub: str) -> bool:
    """Whether this is Python code that lacks the body of its last function."""
    try:
        tree = ast.parse(f"{stub}\n    pass\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(tree.body) and isinstance(tree.body[-1], ast.FunctionDef | ast.AsyncFunctionDef)
