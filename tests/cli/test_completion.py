"""Completion offers each command's own flags and choices, found by bash itself."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from effuse.cli.__main__ import COMMANDS, find
from effuse.cli.completion import bash, fish, zsh

PARSERS = {name: find(name).make_parser() for name in COMMANDS}


def _completed(*words: str) -> list[str]:
    """Bash's offers for the last of the words after `effuse`."""
    typed = " ".join(shlex.quote(word) for word in ("effuse", *words))
    ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _effuse; echo "${{COMPREPLY[@]}}"'
    told = subprocess.run(
        ["bash", "--norc", "-c", f"{bash(PARSERS)}\n{ask}"],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert not told.stderr
    return told.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["co"], ["convert-tokenizer", "completion"]),
        (["--v"], ["--version"]),
        (["up", "--max-num"], ["--max-num-batched-tokens", "--max-num-seqs"]),
        (["up", "--connector", ""], ["auto", "nixl", "zmq"]),
        (["up", "--prefill", "2", "--device", "cu"], ["cuda"]),
        (["status", "--max-num"], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["generate", "--file", "x"], []),  # bash goes on with names of files
    ],
)
def test_bash_offers_what_fits(words: list[str], offered: list[str]) -> None:
    assert _completed(*words) == offered


def test_zsh_takes_the_same_function() -> None:
    written = zsh(PARSERS)
    assert "bashcompinit" in written.splitlines()[0]
    assert written.endswith(bash(PARSERS))


def test_fish_has_a_line_for_each_flag_of_each_command() -> None:
    lines = fish(PARSERS).splitlines()
    assert (
        "complete -c effuse -n '__fish_seen_subcommand_from up' -l connector -x -a 'auto nixl zmq'"
        in (lines)
    )
    for name, parser in PARSERS.items():
        seen = {line.split(" -l ")[1].split()[0] for line in lines
                if f"_from {name}'" in line and " -l " in line}  # fmt: skip
        flags = {one for action in parser._actions for one in action.option_strings}
        assert {f"--{one}" for one in seen} == {one for one in flags if one.startswith("--")}
    assert all(len(shlex.split(line)) > 4 for line in lines)
