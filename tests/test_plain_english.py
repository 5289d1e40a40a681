"""The checker of prose finds the turns that it exists for, and passes plain sentences."""

from __future__ import annotations

from pathlib import Path

import plain_english
import pytest


@pytest.mark.parametrize(
    "text",
    [
        "The router tells the worker.",
        "Ends, as it has no page.",
        "Who asks gets an answer.",
        "Known by who listens.",
        "Nobody waits.",
        "A worker alone answers.",
        "Returns what is final.",
        "It waits where there is none.",
        "All but for the last.",
    ],
)
def test_each_odd_turn_is_found(text: str) -> None:
    assert list(plain_english.find(text))


@pytest.mark.parametrize(
    "text",
    [
        "A worker that waits returns an error, because its lease ended.",
        "The router logs a line for each request that ended.",
        "If no page is free, the worker refuses the request.",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not list(plain_english.find(text))


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""A docstring."""\nx: Annotated[int, "a help text"] = 1  # a comment\n'
        'LOG.info("a line of the log")\nraise ValueError(f"an error of {x}")\n'
    )
    found = dict(plain_english.texts(module))
    assert found["docstrings and comments"] == "A docstring.\na comment"
    for text in ("a help text", "a line of the log", "an error of "):
        assert text in found["messages"]
    page = tmp_path / "page.md"
    page.write_text("Prose with `code that tells`.\n\n```sh\necho who tells\n```\n")
    assert not list(plain_english.find(dict(plain_english.texts(page))["documents"]))


def test_each_folder_keeps_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain_english.main([]) == 0, capsys.readouterr().out


def test_a_plain_folder_makes_up_for_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, odd = tmp_path / "plain.md", tmp_path / "odd.md"
    plain.write_text("A worker refuses the request. " * 1000)
    odd.write_text("Nobody waits. Nobody asks. " * 2)
    monkeypatch.setattr(
        plain_english, "_places", lambda arguments: [("plain", [plain]), ("odd", [odd])]
    )
    assert plain_english.main([]) == 1
    assert capsys.readouterr().out == "odd, documents: 500.0 odd turns in 1,000 of 8 words\n"
