"""The demo as a user runs it, on fixed problems, and its output for wrong ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eventually import eventually

from effuse.cli.commands import FleetConfig
from effuse.cli.demo import explain_errors, fleet_of, parse
from effuse.cli.fleet import Fleet
from effuse.router.tenants import Tenant, line_of


def test_it_solves_problems_on_a_fleet_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the only GPU, by the driver's command; workers that find none go on without."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: One'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = [sys.executable, "-P", "-m", "effuse.cli", "demo", "--seed", "1", "--problems", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines.count("right") == 2
    partly = [line for line in lines if "░" in line and line.strip("|░")]
    assert len(partly) > 10, "answers are seen half denoised"
    assert sum(line.startswith("at full speed") for line in lines) == 2
    assert lines[-1] == "2 of 2 answers are right."
    assert {"redis", "router", "prefill-0", "decode-0"} <= {line.split(" ")[0] for line in lines}
    assert sum("KV bytes over nixl" in line for line in lines) == 2
    assert sum("on GPU 0 (1/2 of its memory)" in line for line in lines) == 2


def test_it_asks_a_fleet_that_runs_with_what_that_is_to_be_shown(tmp_path: Path) -> None:
    """Without the token it prints why, and with it only the demo starts."""
    keys, shown = tmp_path / "keys", tmp_path / "token"
    keys.write_text(line_of("effuse-mine", Tenant("mine")))
    shown.write_text("effuse-mine")
    config = FleetConfig(
        prefill=0,
        router_flags=("--keys", str(keys)),
        worker_flags=("--device", "cpu", "--num-pages", "64"),
    )
    with Fleet(config) as fleet:
        command = [sys.executable, "-P", "-m", "effuse.cli", "demo", "--seed", "1"]
        command += ["--problems", "1", "--target", fleet.address]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1 and "credentials" in refused.stderr
        command += ["--token-file", str(shown)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 answers are right."
    assert "pid" not in done.stdout


@pytest.mark.parametrize(
    ("here", "places"),
    [
        ((), []),
        (("0",), ["GPU 0 (1/3 of its memory)"] * 3),
        (("0", "1", "2"), ["GPU 0", "GPU 1", "GPU 2"]),
    ],
)
def test_it_takes_the_gpus_that_are_here(
    here: tuple[str, ...], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effuse.cli.demo.gpus_here", lambda: here)
    assigned = fleet_of(parse(["--decode", "2"])).assignments()
    assert list(map(str, assigned.values())) == places


def test_one_wrong_answer_is_the_models() -> None:
    told = explain_errors(1, 7)
    assert "1 in 700" in told
    assert "--seed 7" in told
    assert "exit status is 1" in told
    assert "fault" not in told


def test_more_of_them_are_suspect() -> None:
    assert "suspect a fault in effuse" in explain_errors(2, 7)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "effuse.cli", "demo"]
    child = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        asyncio.run(eventually(lambda: any(tmp_path.glob("effuse-*/redis.credentials"))))
        child.send_signal(number)
        while number == signal.SIGHUP and child.poll() is None:
            child.send_signal(number)  # a shell passes it on that had it itself
            time.sleep(0.01)
        assert child.wait(60) == 130
    finally:
        child.kill()
        child.wait(10)
    assert not list(tmp_path.iterdir()), "its secrets are gone"
