"""`effuse up`: what its flags make, and when it gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.cli.fleet import FleetConfig
from effuse.cli.up import Endings, parse


def test_defaults() -> None:
    config, quiet = parse([])
    assert config == FleetConfig(port=50051)
    assert not quiet


def test_its_own_flags_and_the_workers(tmp_path: Path) -> None:
    config, quiet = parse(
        [
            *("--prefill", "0", "--decode", "3", "--connector", "nixl", "--port", "0", "--quiet"),
            *("--model", str(tmp_path), "--max-num-seqs", "4", "--page-size=8"),
        ]
    )
    assert (config.prefill, config.decode, config.connector, config.port) == (0, 3, "nixl", 0)
    assert config.model == tmp_path
    assert config.worker_flags == ("--max-num-seqs", "4", "--page-size=8")
    assert quiet


def test_a_roles_flags_go_to_that_role_alone() -> None:
    config, _ = parse(
        [
            *("--handoff-lease-s=9", "--max-num-seqs", "4", "--default-algorithm"),
            *("block_diffusion", "--reservation-s", "8", "--enforce-eager"),
        ]
    )
    assert config.worker_flags == ("--max-num-seqs", "4", "--enforce-eager")
    assert config.prefill_flags == ("--reservation-s", "8")
    assert config.decode_flags == (
        *("--handoff-lease-s=9", "--default-algorithm", "block_diffusion"),
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decode", "0"], "expected 1 to 64, got 0"),
        (["--connector", "http"], "invalid choice: 'http'"),
        (["--model", "/no/such"], "expected a directory, got '/no/such'"),
        (["--max-num-seqs", "0"], "--max-num-seqs: expected 1 or more, got 0"),
        (["--handoff-lease-s", "0"], "--handoff-lease-s: expected seconds above 0, got 0"),
        (["--page-sise", "8"], "unrecognized arguments: --page-sise 8"),
        (["--prefil", "2"], "[--prefill X]"),
        (["--kv-layout", "paged"], "argument --kv-layout: invalid choice: 'paged'"),
        (["--redis-url", "http://x"], "expected redis://HOST:PORT/DB, got 'http://x'"),
        (["--worker-id=mine"], "--worker-id=mine: the fleet gives each worker its own"),
    ],
)
def test_bad_flags(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_help_lists_its_own_flags_and_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("--prefill X", "--max-num-batched-tokens N"))
    assert "--worker-id" not in told


def test_it_gives_up_when_processes_keep_ending() -> None:
    endings = Endings()
    assert not any(endings.too_many(float(at)) for at in range(5))
    assert endings.too_many(5.0)


def test_endings_long_ago_are_forgiven() -> None:
    endings = Endings()
    assert not any(endings.too_many(at * 20.0) for at in range(50))


def test_a_fleet_without_decode_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="decode must be 1 or more workers, got 0"):
        FleetConfig(decode=0)
