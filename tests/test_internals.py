"""The site's pages about folders of code: each folder and each file, and what imports what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import internals
    return internals.pages(ROOT)


def test_the_navigation_has_a_page_for_each_folder(pages: dict[str, str]) -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r"docs/internals/\S+", text)) == pages.keys()
    packages = {one.parent.name for one in ROOT.glob("*/__init__.py")} - {"tests"}
    assert pages.keys() == {f"docs/internals/{one}.md" for one in packages | {"README"}}


def test_a_page_has_every_file_and_its_purpose(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        rows = re.findall(r"^\| \[`([\w./]+)`\]\((\S+)\) \| (.*) \|$", page, re.MULTILINE)
        assert rows and all(purpose for _, _, purpose in rows), name
        if name.endswith("README.md"):
            continue
        folder = ROOT / Path(name).stem
        files = {one.name for one in folder.glob("*.py")} - {"__init__.py"}
        assert {file for file, _, _ in rows} == files, name
        assert all((ROOT / "docs/internals" / link).resolve().exists() for _, link, _ in rows)


def test_imports_are_listed_on_both_pages(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import internals
    for name, body in {"one": "from effuse.two.code import x", "two": "import json"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'"""The {name} | folder."""\n')
        (tmp_path / name / "code.py").write_text(f'"""Holds\nx | y.\n\nMore."""\n{body}\n')
    made = internals.pages(tmp_path)
    one, two = made["docs/internals/one.md"], made["docs/internals/two.md"]
    assert "- Imports: [two](two.md)" in one and "- Imported by: no other folder" in one
    assert "- Imports: no other folder" in two and "- Imported by: [one](one.md)" in two
    assert "| Holds x \\| y. |" in one, "the first paragraph"
