"""Values of flags: what is taken, and how a bad one is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from effuse.cli import arguments


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (arguments.whole(1), "0", "expected a whole number of 1 or more, got 0"),
        (arguments.whole(1), "two", "expected a whole number of 1 or more, got 'two'"),
        (arguments.whole(1, 64), "65", "expected 1 to 64, got 65"),
        (arguments.number(0, 1), "1.5", "expected a number in [0, 1], got 1.5"),
        (arguments.number(0, 1), "nan", "expected a number in [0, 1], got nan"),
        (arguments.number(0), "inf", "expected a number in [0, infinity), got inf"),
        (arguments.number(0, 1, open_left=True), "0", "expected a number in (0, 1], got 0"),
        (arguments.target, "localhost", "expected HOST:PORT, got 'localhost'"),
        (arguments.target, "host:70000", "expected HOST:PORT, got 'host:70000'"),
        (arguments.directory, "/no/such", "expected a directory, got '/no/such'"),
        (arguments.file, "/no/such", "expected a file, got '/no/such'"),
        (
            arguments.new_file,
            "/no/such/file",
            "expected a file in an existing directory, got '/no/such/file'",
        ),
        (arguments.text, "a\udcff", r"expected UTF-8 text, got 'a\udcff'"),
        (arguments.seconds, "0", "expected a number in (0, 604800], got 0"),
        (arguments.seconds, "1e300", "expected a number in (0, 604800], got 1e300"),
        (arguments.redis_url, "localhost", "expected redis://HOST:PORT/DB, got 'localhost'"),
        (
            arguments.redis_url,
            "redis://h:x/0",
            "expected redis://HOST:PORT/DB, got 'redis://h:x/0'",
        ),
    ],
)
def test_a_bad_value_names_the_accepted_form(
    parse: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parse(text)
    assert str(refused.value) == message


def test_good_values(tmp_path: Path) -> None:
    assert arguments.whole(0)("7") == 7
    assert arguments.number(0, 1)("0.25") == 0.25
    assert arguments.target("[::1]:50051") == "[::1]:50051"
    assert arguments.directory(str(tmp_path)) == tmp_path
    assert arguments.new_file(str(tmp_path / "new")) == tmp_path / "new"
    assert arguments.text("a\u2591") == "a\u2591"
    assert arguments.redis_url("redis://h:1/0") == "redis://h:1/0"


def test_flags_must_be_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments.command("x", "about")
    parser.add_argument("--window")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--win", "2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --win" in capsys.readouterr().err


def _token(flags: list[str]) -> str | None:
    parser = arguments.command("x", "about")
    arguments.add_credentials(parser)
    return arguments.credentials_of(parser, parser.parse_args(flags)).token


def test_a_token_has_no_end_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Secret has that was made of a file."""
    (tmp_path / "token").write_text("effuse-file\n")
    monkeypatch.setenv("EFFUSE_TOKEN", "effuse-environment\n")
    assert _token(["--token-file", str(tmp_path / "token")]) == "effuse-file"
    assert _token([]) == "effuse-environment"
    monkeypatch.setenv("EFFUSE_TOKEN", "\n")
    assert _token([]) is None


@pytest.mark.parametrize("held", [b"", b"effuse-a\neffuse-b\n", b"effuse-\x8c", "é".encode()])
def test_what_is_no_token_is_not_sent_and_not_told(
    held: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    path.write_bytes(held)
    with pytest.raises(SystemExit) as ended:
        _token(["--token-file", str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{path}: expected one token" in told and "effuse-" not in told
