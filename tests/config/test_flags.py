"""Flags from fields: every type, every default, and errors that name the accepted form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from effuse.config import flags


@dataclass(frozen=True, kw_only=True)
class Example:
    """One field of each kind."""

    name: Annotated[str, "a name"] = "plain"
    count: Annotated[int, "how many"] = 3
    share: Annotated[float, "100 % is 1"] = 0.5
    is_loud: Annotated[bool, "say more"] = False
    mode: Annotated[Literal["fast", "safe"], "how"] = "safe"
    limit: Annotated[int | None, "at most"] = None
    where: Annotated[Path | None, "a place"] = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--count: expected 1 or more, got {self.count}")


@dataclass(frozen=True, kw_only=True)
class Undescribed:
    """A field without help."""

    name: str = "x"


def parse(*argv: str) -> Example:
    return flags.parse(Example, argv, prog="example", about="An example.")


def test_without_flags_every_default_holds() -> None:
    assert parse() == Example()


def test_every_kind_of_flag() -> None:
    found = parse(
        *("--name", "a b", "--count", "7", "--share=0.25", "--is-loud"),
        *("--mode", "fast", "--limit", "9", "--where", "/x/y"),
    )
    assert found == Example(
        name="a b", count=7, share=0.25, is_loud=True, mode="fast", limit=9, where=Path("/x/y")
    )


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--cou", "7"], "unrecognized arguments: --cou 7; did you mean --count?"),
        (["--IS_LOUD"], "unrecognized arguments: --IS_LOUD; did you mean --is-loud?"),
        (["--mode", "fsat"], "'fsat' (choose from fast, safe); did you mean fast?"),
        (["--name", "x", "a\nb\x1b"], "unrecognized arguments: a\\nb\\x1b"),
        (["extra"], "unrecognized arguments: extra"),
        (["--count", "x"], "argument --count: expected a whole number, got 'x'"),
        (["--share", "half"], "argument --share: expected a number, got 'half'"),
        (["--mode", "slow"], "argument --mode: invalid choice: 'slow' (choose from fast, safe)"),
        (["--limit"], "argument --limit: expected one argument"),
        (["--count", "0"], "--count: expected 1 or more, got 0"),
    ],
)
def test_wrong_flags_end_with_status_2(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith("example: ") and told in line
    assert hint == "try 'example --help'"


def test_an_error_that_quotes_a_long_value_stays_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--count", "x" * 100_000)
    assert len(capsys.readouterr().err) < 1100


def test_a_flag_that_is_spelled_wrong_is_named_where_it_is_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = flags.make_parser("example", "")
    parser.add_argument("--dataset", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--datset=x", "--", "--dataset"])
    line, _ = capsys.readouterr().err.splitlines()
    assert line.endswith("are required: --dataset; did you mean --dataset?")


def test_a_file_that_is_not_named_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--config")
    told = capsys.readouterr().err
    assert told == "example: argument --config: expected one argument\ntry 'example --help'\n"


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--count N how many (default: 3)", "--share X 100 % is 1", "{fast,safe}"):
        assert part in text


def test_a_field_without_help_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="name has no help text"):
        flags.parse(Undescribed, [], prog="example", about="")


class Whole:
    """A number that is no int, such as numpy's."""

    def __index__(self) -> int:
        return 7


def test_values_from_python_get_the_types_of_their_fields() -> None:
    given = {"count": Whole(), "share": 2, "is_loud": True, "mode": "fast", "limit": None}
    found = flags.from_python(Example, {**given, "where": "/x/y"})
    assert Example(**found) == Example(
        count=7, share=2.0, is_loud=True, mode="fast", where=Path("/x/y")
    )
    assert [type(found[name]) for name in ("count", "share")] == [int, float]


@pytest.mark.parametrize(
    ("name", "form", "others"),
    [
        ("name", "a string", (3, b"x", None, Path("x"))),
        ("count", "a whole number", ("8", 2.5, True, None, [8], float("nan"))),
        ("share", "a number", ("0.5", True, None, [0.5])),
        ("is_loud", "True or False", ("no", 0, 1, None)),
        ("limit", "a whole number", ("8", 2.5, False, {})),
        ("where", "a path", (3, True, b"x", [])),
        ("mode", "one of fast, safe", ("slow", 3, None, [])),
    ],
)
def test_values_from_python_of_other_types_are_refused_by_name(
    name: str, form: str, others: tuple[object, ...]
) -> None:
    for other in others:
        told = re.escape(f"{name}: expected {form}, got {other!r}")
        with pytest.raises((TypeError, ValueError), match=told):
            flags.from_python(Example, {name: other})
