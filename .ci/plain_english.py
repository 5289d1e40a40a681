"""Holds the project's prose to plain English: at most `MOST` odd turns in 1,000 words of a kind.

`python .ci/plain_english.py` checks the places in `HELD`. With places as arguments it checks these,
and prints each turn that it finds. Text is Markdown outside of code, docstrings, comments, messages
(strings that are raised, logged or printed, and help texts), and comments of protos.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
HELD: Final = (
    "README.md", "CONTRIBUTING.md", "DESIGN.md", "benchmarks/RESULTS.md", "docs/clients.md",
    "docs/models.md", "docs/operations.md", "docs/request.md", "docs/security.md", "docs/using.md",
    "docs/words.md", "k8s/README.md", "models/bundled/README.md",
    "docs/pictures.py", ".ci/plain_english.py", "router/openai_api.py", "router/openai_requests.py",
    "router/http_server.py", "router/openai_answers.py",
    "docs/adding-a-model.md", "docs/adding-an-algorithm.md", "docs/reference.py",
    "docs/site_pages.py", "docs/internals.py", "docs/load-tests.md", "docs/several-gpus.md",
    "docs/openai-clients.md", ".ci/release_check.py",
)  # fmt: skip
"""Places that keep the limit. A folder joins once its text has been rewritten."""
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
    """Checks the places. Returns 1 if a kind of text has too many odd turns, otherwise 0."""
    totals: dict[str, list[int]] = {}
    for path in _files(arguments or HELD):
        for kind, text in texts(path):
            turns = list(find(text))
            total = totals.setdefault(kind, [0, 0])
            total[0] += len(re.findall(r"[A-Za-z']+", text))
            total[1] += len(turns)
            for name, around in turns if arguments else ():
                print(f"{path}: {name}: {around}")
    is_bad = False
    for kind, (words, count) in sorted(totals.items()):
        rate = 1000 * count / max(1, words)
        is_bad = is_bad or rate > MOST
        print(f"{kind}: {rate:.1f} odd turns in 1,000 of {words} words, at most {MOST:g}")
    return int(is_bad)


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
        yield "docstrings and comments", "\n".join([*_docstrings(text), *_comments(text)])
        yield "messages", "\n".join(_messages(text))


def _docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(
            ("# noqa", "# type", "# fmt")
        ):
            yield token.string.lstrip("#! ")


def _messages(text: str) -> Iterator[str]:
    """The strings of errors, log lines, prints and help texts."""
    for node in ast.walk(ast.parse(text)):
        is_call = isinstance(node, ast.Call) and _name(node.func) in _SPOKEN
        is_flag = isinstance(node, ast.Subscript) and _name(node.value) == "Annotated"
        if is_call or is_flag or isinstance(node, ast.Raise):
            found = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
            yield from (one for one in found if isinstance(one, str) and " " in one)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _files(places: Sequence[str]) -> Iterator[Path]:
    """The tracked files below the places, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *places], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".md", ".py", ".proto") and "_pb2" not in name and path.is_file():
            yield path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
