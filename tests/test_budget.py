"""The limits this code keeps: how long files and functions are, and which words it uses."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_MEAN_LINES = 15.0

# A block is a span of tokens, never memory and never a tile; the group of workers is a fleet.
BANNED = {
    r"\bkv[ _-]?blocks?\b": "page",
    r"\bblock[ _]tables?\b": "page table",
    r"\b(physical|memory|cache) blocks?\b": "page",
    r"\bBLOCK_[A-Z]\b": "TILE_",
    r"\b(worker|decode|prefill) pools?\b": "fleet",
    r"^\s*(import|from) pickle\b|torch\.load\(": "a schema: nothing is unpickled",
}
DRAWERS = {"utils", "util", "common", "misc", "helpers"}


def _tracked(*patterns: str) -> list[Path]:
    told = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [ROOT / name for name in told.splitlines() if (ROOT / name).is_file()]


def _written(*patterns: str) -> list[Path]:
    """Files that people wrote: generated stubs are left out."""
    return [path for path in _tracked(*patterns) if "_pb2" not in path.name]


def _is_test(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests")


def _functions(path: Path) -> list[tuple[str, int]]:
    """Name and length of each function, decorators and docstrings included."""
    tree = ast.parse(path.read_text())
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", _lines(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_file_is_long() -> None:
    long = {str(path): count for path in _written("*.py") if (count := _count(path)) > MOST_LINES}
    assert not long


def _count(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_functions_are_short() -> None:
    source = [path for path in _written("*.py") if not _is_test(path)]
    functions = [
        one for path in source if path.parent.name != "kernels" for one in _functions(path)
    ]
    assert not [name for name, lines in functions if lines > MOST_FUNCTION_LINES]
    assert sum(lines for _, lines in functions) / len(functions) <= MOST_MEAN_LINES


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in _written("*.py")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent


@pytest.mark.parametrize("pattern", BANNED)
def test_words(pattern: str) -> None:
    used = [
        f"{path.relative_to(ROOT)}:{at}: {line.strip()}"
        for path in _written("*.py", "*.proto", "*.md", "*.lua")
        if path != Path(__file__)
        for at, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line, re.IGNORECASE if pattern.islower() else 0)
    ]
    assert not used, f"say {BANNED[pattern]}"


def test_there_are_no_drawers() -> None:
    names = {path.stem for path in _written("*.py")} | {path.parent.name for path in _written()}
    assert not names & DRAWERS


def test_folders_are_flat() -> None:
    deep = [
        str(path.relative_to(ROOT))
        for path in _written("*.py")
        if not _is_test(path) and len(path.relative_to(ROOT).parts) > 2
    ]
    wire = {f"protos/effuse/{name}/__init__.py" for name in ("compat", "v1")}
    assert set(deep) <= wire | {"src/effuse/__init__.py"}
