"""Writes the README into the package's metadata, with links that work outside of a checkout."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
RELATIVE = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<path>[^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    """A Markdown link or image to a file of the repository, as a link to its page there."""
    kind = "raw" if link["mark"] else "blob"
    return f"{link['mark']}[{link['text']}]({URL}/{kind}/main/{link['path']})"


setup(
    long_description=RELATIVE.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
