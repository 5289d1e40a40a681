"""A file of flags is checked like flags, with errors for unknown ones, and typed flags have
precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from effuse.cli.up import parse as parse_up
from effuse.config import flags
from effuse.router.config import parse as parse_router


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """One field of each kind."""

    max_count: Annotated[int, "how many"] = 3
    share: Annotated[float, "of all"] = 0.5
    is_loud: Annotated[bool, "say more"] = False
    mode: Annotated[Literal["fast", "safe"], "how"] = "safe"
    where: Annotated[Path | None, "a place"] = None
    also: Annotated[tuple[str, ...], "further ones"] = ()


def _parse(tmp_path: Path, text: str, *argv: str) -> Kinds:
    path = tmp_path / "flags.toml"
    path.write_text(text)
    words = ["--config", str(path), *argv]
    return flags.parse(Kinds, words, prog="example", about="An example.")


def test_every_kind_of_value(tmp_path: Path) -> None:
    text = "max-count = -7\nshare = 0.25\nis-loud = true\nmode = 'fast'\nwhere = '/x y'"
    text += "\nalso = ['a:b=1,c=2', 'd']"
    found = Kinds(max_count=-7, share=0.25, is_loud=True, mode="fast", where=Path("/x y"),
                  also=("a:b=1,c=2", "d"))  # fmt: skip
    assert _parse(tmp_path, text) == found and _parse(tmp_path, "").also == ()
    assert _parse(tmp_path, "also = ['a']", "--also", "b").also == ("b",)
    assert _parse(tmp_path, "also = ['a']", "--also=b", "--also=c").also == ("b", "c")


def test_a_mark_at_the_beginning_is_no_part_of_the_file(tmp_path: Path) -> None:
    """Some editors write a byte-order mark, and line ends of their own."""
    assert _parse(tmp_path, "\ufeffmax-count = 3\r\nwhere = '/x'\r\n").max_count == 3


def test_the_line_wins_wherever_it_names_the_file(tmp_path: Path) -> None:
    text = "max-count = 7\nis-loud = true\nshare = 0.25"
    found = _parse(tmp_path, text, "--max-count=9", "--no-is-loud")
    assert found == Kinds(max_count=9, is_loud=False, share=0.25)
    before = ["--max-count=9", "--config", str(tmp_path / "flags.toml")]
    assert flags.parse(Kinds, before, prog="example", about="").max_count == 9


def test_what_is_off_in_a_file_can_be_turned_on(tmp_path: Path) -> None:
    assert not _parse(tmp_path, "is-loud = false").is_loud
    assert _parse(tmp_path, "is-loud = false", "--is-loud").is_loud


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-cuont = 1", "flags.toml: max-cuont: unknown flag; did you mean max-count"),
        ("max_count = 1", "max_count: unknown flag; did you mean max-count"),
        ("config = 'x'", "config: unknown flag"),
        ("[router]\nport = 1", "[router]: expected flags without a table around them"),
        ("mode = " + "[" * 5000, "flags.toml: not TOML"),
        ("is-loud = 1", "is-loud: expected true or false, got 1"),
        ("max-count = true", "max-count: expected a string, a number or a list, got True"),
        ("mode = {a = 1}", "mode: expected a string, a number or a list, got {'a': 1}"),
        ("max-count = 'x'", "argument --max-count: expected a whole number, got 'x'"),
        ("mode = 'slow'", "argument --mode: invalid choice: 'slow'"),
        ("max-count", "flags.toml: not TOML: Expected '=' after a key"),
    ],
)
def test_a_bad_file_is_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(tmp_path, text)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for name, why in (
        ("absent.toml", "No such file"),
        (".", "directory"),
        ("bytes.toml", "not TOML"),
    ):
        with pytest.raises(SystemExit):
            flags.parse(Kinds, ["--config", str(tmp_path / name)], prog="example", about="")
        assert why in capsys.readouterr().err


def test_processes_and_fleets_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = tmp_path / "router.toml"
    router.write_text("max-queue = 5\nfleet = 'ours'")
    config = parse_router(["--config", str(router), "--max-queue", "6"])
    assert (config.fleet, config.max_queue) == ("ours", 6)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        "prefill = 0\nmax-queue = 5\nmax-num-seqs = 4\ndevice = 'cpu'\nquiet = true\n"
        "default-algorithm = 'llada'"
    )
    up, view = parse_up(["--config", str(fleet), "--max-num-seqs", "8"])
    http = ("--http-port", "8000")
    assert (up.prefill, view.quiet, up.router_flags) == (0, True, ("--max-queue=5", *http))
    assert up.worker_flags == ("--max-num-seqs=4", "--device=cpu", "--max-num-seqs", "8")
    assert up.decode_flags == ("--default-algorithm=llada",)
    fleet.write_text("http-port = 9\npage = false")
    assert parse_up(["--config", str(fleet), "--no-http"])[0].router_flags == ()
    with pytest.raises(SystemExit):
        parse_up(["--config", str(fleet), "--page-port=9"])
    assert "--page-port: expected only with --page" in capsys.readouterr().err
    fleet.write_text("worker-id = 'mine'")
    with pytest.raises(SystemExit):
        parse_up(["--config", str(fleet)])
    assert "worker-id: unknown flag" in capsys.readouterr().err
