"""Holds the project's prose to plain English: at most `MOST` odd turns in 1,000 words of a kind.

`python tests/plain_english.py` checks each folder of the repository, except for `NOT_HELD`, and the
files beside the folders. With places as arguments it checks these, and prints each turn that it
finds. Text is Markdown outside of code, docstrings, comments, messages
(strings that are raised, logged or printed, and help texts), and comments of protos.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
NOT_HELD: Final = {
    "benchmarks/history": "dated records, which stay as they were written",
}
"""Places that need not keep the limit, and why."""
MOST: Final = 3.0

_SUBJECTLESS: Final = r"(?:^|[.;:,(]\s+|\b(?:and|as|by|for|from|if|of|than|that|to|with)\s+)"
TURNS: Final = {
    name: re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for name, pattern in {
        "a process that tells, says or hears": (
            r"\b(?:tell|say|hear)(?:s|ing)?\b|\b(?:told|said|heard)\b"
        ),
        "a bare who": rf"{_SUBJECTLESS}who(?:ever|se)?\b",
        "a person for a process": r"\b(?:he|him|his|himself|(?:no|some|any|every)body)\b",
        "alone for only": r"\b(?!(?:go|goes|leave|let|run|runs|stand) )\w+ alone\b",
        "a clause with what": (
            rf"(?:{_SUBJECTLESS}|\b(?:is|are|gives?|keeps?|returns?|takes?)\s)"
            r"what (?:is|are|was|has|have|it|they|a|the|can|may|\w+s)\b"
        ),
        "where for if": r"\bwhere (?:it|there|they|that|none|no|nothing|one)\b",
        "as for because": r", as (?:a|an|it|its|no|one|that|the|there|they|this|each)\b",
        "a rare turn": r"\b(?:alike|all the same|but for|thereof|whereby)\b",
    }.items()
}
_STRING_OR_COMMENT: Final = re.compile(  # in a tenth of the time that `tokenize` takes
    r"""(?s)(?P<three>["']{3})(?:\\.|.)*?(?P=three)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"|(?P<comment>#[^\r\n]*)"
)
_SPOKEN: Final = {
    "debug",
    "info",
    "warning",
    "error",
    "critical",
    "exception",
    "print",
    "add_argument",
}


def main(arguments: Sequence[str]) -> int:
    """Checks each place. Returns 1 if a kind of text in one has too many odd turns, otherwise 0."""
    is_bad = False
    for place, paths in _places(arguments):
        for kind, (words, count) in sorted(_counts(paths, shows=bool(arguments)).items()):
            is_over = count > max(1.0, MOST * words / 1000)  # one turn in a short text is no habit
            is_bad = is_bad or is_over
            if is_over or arguments:
                rate = 1000 * count / max(1, words)
                print(f"{place}, {kind}: {rate:.1f} odd turns in 1,000 of {words} words")
    return int(is_bad)


def _counts(paths: Sequence[Path], shows: bool) -> dict[str, tuple[int, int]]:
    """Words and odd turns by kind of text; with `shows` each turn is printed."""
    counts: dict[str, tuple[int, int]] = {}
    for path in paths:
        for kind, text in texts(path):
            turns = list(find(text))
            for name, around in turns if shows else ():
                print(f"{path}: {name}: {around}")
            words, count = counts.get(kind, (0, 0))
            counts[kind] = words + len(re.findall(r"[A-Za-z']+", text)), count + len(turns)
    return counts


def find(text: str) -> Iterator[tuple[str, str]]:
    """Each odd turn of a text: its name, and the words around it."""
    for name, pattern in TURNS.items():
        for match in pattern.finditer(text):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            yield name, " ".join(around.split())


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """The prose of a file, by kind."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        yield "documents", re.sub(r"`[^`]*`|\]\([^)]*\)", "", fenced)
    elif path.suffix == ".proto":
        yield "protos", "\n".join(re.findall(r"//\s?(.*)", text))
    elif path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        yield "docstrings and comments", "\n".join([*_docstrings(nodes), *_comments(text)])
        yield "messages", "\n".join(_messages(nodes))


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def _comments(text: str) -> Iterator[str]:
    for match in _STRING_OR_COMMENT.finditer(text):
        comment = match["comment"]
        if comment and not comment.startswith(("# noqa", "# type", "# fmt")):
            yield comment.lstrip("#! ")


def _messages(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The strings of errors, log lines, prints and help texts."""
    for node in nodes:
        is_call = isinstance(node, ast.Call) and _name(node.func) in _SPOKEN
        is_flag = isinstance(node, ast.Subscript) and _name(node.value) == "Annotated"
        if is_call or is_flag or isinstance(node, ast.Raise):
            found = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
            yield from (one for one in found if isinstance(one, str) and " " in one)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _places(arguments: Sequence[str]) -> Iterator[tuple[str, Sequence[Path]]]:
    """Each place with its tracked files: the arguments, or the folders of the repository."""
    if arguments:
        for place in arguments:
            yield place, _files(place)
        return
    folders: dict[str, list[Path]] = {}
    for path in _files("."):
        name = path.relative_to(ROOT)
        if not any(name.is_relative_to(one) for one in NOT_HELD):
            folders.setdefault(name.parts[0] if name.parts[1:] else ".", []).append(path)
    yield from sorted(folders.items())


def _files(place: str) -> list[Path]:
    """The tracked files below a place, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--", place], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines() if "_pb2" not in name]
    return [one for one in paths if one.suffix in (".md", ".py", ".proto") and one.is_file()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
