"""`effuse up` refuses flags that do not fit each other, and names a flag that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.up import parse


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effuse.cli.up.gpus_here", lambda: ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--encrypt-pages --connector nixl", "--encrypt-pages: expected --connector zmq, got nixl"),
        ("--prefill-gpus 0", "--prefill-gpus: no GPU was found on this machine"),
        (
            "--prefill 0 --prefill-tensor-parallel-size 2",
            "--prefill-tensor-parallel-size: expected a prefill worker, but the fleet has none",
        ),
        (
            "--prefill 0 --prefill-pipeline-parallel-size 2",
            "--prefill-pipeline-parallel-size: expected a prefill worker, but the fleet has none",
        ),
        (
            "--prefill 0 --reservation-s=8 --prefill-tensor-parallel-size 2",
            "--reservation-s: expected a prefill worker, but the fleet has none",
        ),
    ],
)
def test_flags_that_do_not_fit_each_other(
    flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags.split())
    assert ended.value.code == 2
    assert f"effuse up: {told}" in capsys.readouterr().err


def test_a_log_directory_is_one_running_fleets_alone(tmp_path: Path) -> None:
    """Lines of two fleets would be mixed in the same files."""
    config = FleetConfig(log_dir=tmp_path)
    first = Fleet(config)
    with pytest.raises(OSError, match=f"--log-dir {tmp_path}: another fleet writes there"):
        Fleet(config)
    first.stop()
    Fleet(config).stop()
    assert not [*tmp_path.iterdir()]
