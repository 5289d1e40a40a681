"""Makes the pages of docs/internals/, one for each folder of code, while MkDocs builds the site.

A page has the folder's sentence, the first paragraph of each file's docstring, and the folders that
it imports and that import it. The pages are in no commit, so that none can be stale.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

HEAD: Final = (
    "This page is made from the docstrings and the imports of the code. "
    "[DESIGN.md](../../DESIGN.md) has the reasons, [CONTRIBUTING.md](../../CONTRIBUTING.md) the "
    "place of each part.\n"
)
PACKAGE: Final = "effuse."


def pages(root: Path) -> dict[str, str]:
    """Every page by its path in the repository, as Markdown; README.md there lists the folders."""
    folders = {one.parent.name: one.parent for one in sorted(root.glob("*/__init__.py"))}
    folders.pop("tests", None)
    uses = {name: _imports(folder) & folders.keys() - {name} for name, folder in folders.items()}
    written = {
        f"docs/internals/{name}.md": _page(name, folder, uses) for name, folder in folders.items()
    }
    rows = [f"| [`{name}/`]({name}.md) | {_sentence(one)} |" for name, one in folders.items()]
    table = "\n".join(["| folder | purpose |", "|---|---|", *rows])
    return {"docs/internals/README.md": f"# Folders\n\n{HEAD}\n{table}\n", **written}


def _page(name: str, folder: Path, uses: dict[str, set[str]]) -> str:
    users = sorted(one for one, theirs in uses.items() if name in theirs)
    rows = [
        f"| [`{file.name}`](../../{name}/{file.name}) | {_cell(file)} |"
        for file in sorted(folder.glob("*.py"))
        if file.name != "__init__.py"
    ]
    return "\n".join(
        [
            f"# {name}\n\n{_sentence(folder)}\n\n{HEAD}",
            f"- Imports: {_links(sorted(uses[name]))}",
            f"- Imported by: {_links(users)}\n",
            "| file | purpose |\n|---|---|",
            *rows,
            "",
        ]
    )


def _links(names: Sequence[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in names) or "no other folder"


def _imports(folder: Path) -> set[str]:
    """The folders that a folder's files import, wherever in a file that is."""
    return {name for file in folder.glob("*.py") for name in _imported(file)}


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.startswith(PACKAGE):
                yield name.removeprefix(PACKAGE).split(".")[0]


def _cell(file: Path) -> str:
    return _docstring(file).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _sentence(folder: Path) -> str:
    return _docstring(folder / "__init__.py").replace("\n", " ")


def _docstring(file: Path) -> str:
    """Every file has one: the linter requires it."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
