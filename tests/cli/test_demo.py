"""The demo as a person runs it, on problems that stay the same, and what it says of wrong ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from effuse.cli.demo import apology, parse


def test_it_solves_problems_on_a_fleet_of_its_own() -> None:
    command = [sys.executable, "-P", "-m", "effuse.cli", "demo", "--seed", "1", "--problems", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines.count("right") == 2
    assert lines[-1] == "2 of 2 answers are right."
    assert {"redis", "router", "prefill-0", "decode-0"} <= {line.split(" ")[0] for line in lines}
    assert sum("KV bytes over zmq" in line for line in lines) == 2


def test_one_wrong_answer_is_the_models() -> None:
    told = apology(1, 7)
    assert "1 in 700" in told
    assert "--seed 7" in told
    assert "exit status is 1" in told
    assert "fault" not in told


def test_more_of_them_are_suspect() -> None:
    assert "suspect a fault in effuse" in apology(2, 7)


def test_the_seed_that_it_names_is_taken() -> None:
    assert parse(["--seed", "7"]).seed == 7
    assert parse([]).seed != parse([]).seed


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--problems", "0"], "expected a whole number of 1 or more, got 0"),
        (["--seed", "-1"], "expected a whole number of 0 or more, got -1"),
        (["--sede", "1"], "unrecognized arguments: --sede 1"),
    ],
)
def test_bad_flags(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
