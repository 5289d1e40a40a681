"""A dataset of `effuse bench`: one JSON object per line, with a prompt and perhaps a reference. And
whether an answer to a public benchmark's prompt is right.

GSM8K: the answer's last number equals the reference's. HumanEval: the program that the answer
completes passes its tests, in a sandbox (`sandbox.py`). Everything else is a function of text.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from effuse.cli.arguments import is_unicode
from effuse.cli.sandbox import passes
from effuse.config.flags import BadInput

_SHOWN = 8  # names that a line about many prompts lists

Scorer = Literal["gsm8k", "humaneval"]
Grader: TypeAlias = "Callable[[Item, str], bool]"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt. A field is empty if its line lacks it."""

    name: str  # the line's `task_id`, or "line 7"
    prompt: str
    answer: str = ""  # the reference, as in GSM8K
    test: str = ""  # Python code that defines `check`, as in HumanEval
    entry_point: str = ""  # the function under test by `check`


def read_items(path: Path) -> list[Item]:
    """Every line of the file that is not blank. Raises BadInput that names the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected UTF-8 text: {error}") from error
    items = [_item(line, at, path) for at, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise BadInput(f"{path}: expected one JSON object per line, found none")
    return items


def fits(prompt_len: int, max_tokens: int | None, max_model_len: int) -> bool:
    """Whether a router accepts a prompt of this length: explicit `max_tokens` must fit."""
    return prompt_len > 0 and prompt_len + (max_tokens or 1) <= max_model_len


def too_long(names: Sequence[str], taken: Sequence[bool], room: str) -> str:
    """One line that names the refused prompts; empty if there are none.

    room: the model's limit, in words.
    """
    refused = [one for one, is_taken in zip(names, taken, strict=True) if not is_taken]
    if not refused:
        return ""
    more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    shown = ", ".join(refused[:_SHOWN])
    return (
        f"{len(refused)} of {len(names)} prompts do not fit {room}; they count as failed: "
        f"{shown}{more}"
    )


def _item(line: str, at: int, path: Path) -> Item:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # including integers of thousands of digits
        raise BadInput(f"{path}:{at}: expected a JSON object, got {line[:40]!r}") from error
    fields = entry if isinstance(entry, dict) else {}
    if not _text(fields, "prompt"):
        raise BadInput(f'{path}:{at}: expected {{"prompt": "..."}}, got {line[:40]!r}')
    return Item(
        name=_text(fields, "task_id") or f"line {at}",
        prompt=_text(fields, "prompt"),
        answer=_text(fields, "answer") or _number(fields.get("answer")),
        test=_text(fields, "test"),
        entry_point=_text(fields, "entry_point"),
    )


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) and is_unicode(value) else ""


def _number(value: object) -> str:
    """A reference that is a JSON number, as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else ""


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
        head = rf"^(?:async )?def {re.escape(item.entry_point)}\b"
        before = re.split(head, stub, maxsplit=1, flags=re.MULTILINE)[0]  # imports and helpers
        solution = f"{before}\n{answer}"
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
    """Raises BadInput if a line lacks a field that a scorer needs."""
    if scorer == "gsm8k" and last_number(item.answer) is None:
        raise BadInput(f'--scorer gsm8k: {item.name}: expected an "answer" with a number')
    if scorer == "humaneval" and not (item.test and item.entry_point.isidentifier()):
        raise BadInput(f'--scorer humaneval: {item.name}: expected "test" and "entry_point"')


def grader(scorer: Scorer) -> Grader:
    if scorer == "gsm8k":
        return lambda item, text: last_number(text) == last_number(item.answer)
    return lambda item, text: passes(program(item, text))


def _fenced(text: str, name: str) -> str:
    """The fenced block that defines the function, otherwise the first block. A text that begins
    indented or has no fence is itself the code."""
    if text.lstrip("\n").startswith(("  ", "\t")):
        return text
    blocks = [found[1] for found in _FENCE.finditer(text)]
    defining = [block for block in blocks if is_defined(name, block)]
    return (defining or blocks or [text])[0]


def _is_code(stub: str) -> bool:
    """Whether this is Python code that lacks the body of its last function."""
    try:
        tree = ast.parse(f"{stub}\n    pass\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(tree.body) and isinstance(tree.body[-1], ast.FunctionDef | ast.AsyncFunctionDef)
