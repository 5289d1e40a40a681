"""A dataset of `effuse bench`: one JSON object per line, with a prompt and perhaps a reference.

Reads one file and does no other I/O. `graders.py` grades answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effuse.cli.arguments import is_unicode

_SHOWN = 8  # names that a line about many prompts lists


class DatasetError(Exception):
    """The dataset does not have the expected form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt. A field is empty if its line lacks it."""

    name: str  # the line's `task_id`, or "line 7"
    prompt: str
    answer: str = ""  # the reference, as in GSM8K
    test: str = ""  # Python code that defines `check`, as in HumanEval
    entry_point: str = ""  # the function under test by `check`


def read_items(path: Path) -> list[Item]:
    """Every line of the file that is not blank. Raises DatasetError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: expected UTF-8 text: {error}") from error
    items = [_item(line, at, path) for at, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise DatasetError(f"{path}: expected one JSON object per line, found none")
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
    except (json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{path}:{at}: expected a JSON object, got {line[:40]!r}") from error
    fields = entry if isinstance(entry, dict) else {}
    if not _text(fields, "prompt"):
        raise DatasetError(f'{path}:{at}: expected {{"prompt": "..."}}, got {line[:40]!r}')
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
