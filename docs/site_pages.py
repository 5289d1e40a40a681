"""MkDocs' hooks: every page of the site has the path that it has in the repository.

So README.md, DESIGN.md and others stay outside of docs/, and links between pages need no change.
A link to any other file of the repository becomes a link to the file in the repository's web view.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import internals
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The pages and pictures of docs/, the pages outside of it that the navigation names, and those
    about the folders of code."""
    theirs = [one for one in files if one.src_dir != config.docs_dir]
    inside = [f"docs/{one.src_uri}" for one in files if one.src_dir == config.docs_dir]
    outside = [name for name in _named(config.nav) if not name.startswith("docs/")]
    ours = [
        File(name, str(ROOT), config.site_dir, config.use_directory_urls)
        for name in [*outside, *inside]
        if not name.endswith(".py")
    ]
    made = [
        File.generated(config, name, content=text) for name, text in internals.pages(ROOT).items()
    ]
    return Files([*theirs, *ours, *made])


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files that are not pages at the repository. A missing file stays unchanged,
    and MkDocs reports it.
    """

    def moved(link: re.Match[str]) -> str:
        folder = os.path.dirname(page.file.src_uri)  # noqa: PTH120
        name = os.path.normpath(os.path.join(folder, unquote(link["path"])))  # noqa: PTH118
        if files.get_file_from_path(name) is not None or not (ROOT / name).exists():
            return link[0]
        kind = "tree" if (ROOT / name).is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{name}{link['anchor'] or ''}"

    return LINK.sub(moved, markdown)


def _named(entry: Any) -> Iterator[str]:
    """The paths in a navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from _named(one)
