"""Files and commands that the README and DESIGN name exist, and can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import effuse

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "DESIGN.md",
    "CONTRIBUTING.md",
    "k8s/README.md",
    "docs/adding-a-model.md",
    "docs/adding-an-algorithm.md",
    "docs/clients.md",
    "docs/decoding.md",
    "docs/failures.md",
    "docs/handoff.md",
    "docs/load-tests.md",
    "docs/openai-clients.md",
    "docs/several-gpus.md",
    "docs/operations.md",
    "docs/request.md",
    "docs/states.md",
    "docs/using.md",
    "docs/words.md",
    "benchmarks/RESULTS.md",
)
FOLDERS = (
    "benchmarks|cli|config|decode_worker|k8s|kernels|kvtransfer|models|placement|prefill_worker"
    "|client|docs|examples|offline|problems|training"
)
FILE = re.compile(rf"`((?:{FOLDERS}|protos|router|tests|worker)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_it_names_exists(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_readme_is_short_and_says_what_to_type() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 700
    assert "make demo" in readme and "make test" in readme
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "effuse.Client" in code and len(code.splitlines()) <= 6


def test_the_question_it_shows_is_answered() -> None:
    """By the bundled model, whose knowledge is narrow: 3 * 12 - 7 = 29."""
    (asked,) = re.findall(r'effuse generate --watch "(.+)"', (ROOT / "docs/using.md").read_text())
    with effuse.LLM(device="cpu") as llm:
        (answer,) = llm.generate(asked)
    assert answer.text.splitlines()[-1] == "answer: 29"


def test_every_step_in_the_life_of_a_request_names_a_file() -> None:
    life = (ROOT / "docs/request.md").read_text()
    steps = re.split(r"^\d+\. ", life, flags=re.MULTILINE)[1:]
    assert len(steps) == 8
    assert all(FILE.search(step) for step in steps)


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text())
        assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([a-z0-9-]+)", (ROOT / page).read_text())
        assert set(named) <= targets, page
