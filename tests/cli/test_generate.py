"""`effuse generate` reads prompts from its arguments and from standard input."""

from __future__ import annotations

import io
import sys

import pytest

from effuse.cli.generate import parse


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a file"))
    assert parse(["typed", "-"]).prompts == ("typed", "from a file")


def test_other_bytes_on_standard_input_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff"))
    with pytest.raises(SystemExit) as ended:
        parse(["-"])
    assert ended.value.code == 2
    assert "expected UTF-8 text on standard input" in capsys.readouterr().err


def test_one_id_names_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["a", "b", "--request-id", "mine"])
    assert "--request-id: expected one prompt, got 2" in capsys.readouterr().err
