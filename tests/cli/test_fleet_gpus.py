"""The GPUs of a fleet's workers by its flags, and in the environment of each worker and engine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from checkpoints import write_tiny_checkpoint
from e2e.processes import restart

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.up import parse

# Ids that no GPU has: each worker finds none behind its own and computes on the CPU.
FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000001", "MIG-2"


def _seen(fleet: Fleet, name: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of a process and of those that it has started."""
    process = psutil.Process(fleet.processes[name].pid)
    found = [process, *process.children(recursive=True)]
    return [one.environ().get("CUDA_VISIBLE_DEVICES") for one in found]


def test_each_worker_and_its_engine_see_their_gpu_also_when_they_come_back(tmp_path: Path) -> None:
    config = FleetConfig(
        model=write_tiny_checkpoint(tmp_path / "model", "sdar"),
        gpus=(FIRST, SECOND),
        worker_flags=("--num-pages", "64"),
        env={"CUDA_VISIBLE_DEVICES": "of all"},  # an assignment is the stronger word
        log_dir=tmp_path / "logs",
    )
    with Fleet(config) as fleet:
        assert _seen(fleet, "router") == ["of all"]
        assert _seen(fleet, "prefill-0") == [FIRST, FIRST]
        assert _seen(fleet, "decode-0") == [SECOND, SECOND]
        fleet.processes["decode-0"].clear()
        restart(fleet, "decode-0")
        assert _seen(fleet, "decode-0") == [SECOND, SECOND]
    log = (tmp_path / "logs/decode-0.log").read_text()
    assert log.count(f"decode-0 starts on {SECOND}\n") == 2


def test_workers_that_share_a_gpu_are_told_their_part_of_it(tmp_path: Path) -> None:
    config = FleetConfig(
        prefill=0,
        decode=2,
        model=write_tiny_checkpoint(tmp_path / "model", "sdar"),
        gpus=(FIRST,),
        gpu_sharing=True,
        worker_flags=("--num-pages", "64", "--gpu-memory-utilization", "0.8"),
    )
    with Fleet(config) as fleet:
        for name in ("decode-0", "decode-1"):
            assert _seen(fleet, name) == [FIRST, FIRST]
            words = psutil.Process(fleet.processes[name].pid).cmdline()
            assert words[-2:] == ["--gpu-memory-utilization", "0.4"]


def test_prefill_workers_that_cut_prompts_get_gpus_for_all_parts() -> None:
    cut = ("--tensor-parallel-size", "2", "--prefill-context-parallel-size", "2")
    config = FleetConfig(gpus=tuple("01234"), prefill_flags=cut)
    assert {name: one.gpu for name, one in config.assignments().items()} == {
        "prefill-0": "0,1,2,3",
        "decode-0": "4",
    }


def test_stages_get_gpus_of_their_own() -> None:
    of_decode = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    config = FleetConfig(gpus=tuple("01234"), decode_flags=of_decode)
    found = {name: one.gpu for name, one in config.assignments().items()}
    assert found == {"prefill-0": "0", "decode-0": "1,2,3,4"}
    flags = ["--device", "cpu", "--decode-pipeline-parallel-size", "2"]
    config, _ = parse([*flags, "--prefill-pipeline-parallel-size", "3"])
    assert config.decode_flags[-2:] == ("--pipeline-parallel-size", "2")
    assert config.prefill_flags[-2:] == ("--pipeline-parallel-size", "3")


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ("--prefill-tensor-parallel-size 1", "prefill-0:4 decode-0:5"),
        ("--prefill-tensor-parallel-size 2", "prefill-0:4,5 decode-0:6"),
        ("--prefill-pipeline-parallel-size 2", "prefill-0:4,5 decode-0:6"),
        ("--prefill-context-parallel-size 2", "prefill-0:4,5 decode-0:6"),
        ("--decode-tensor-parallel-size 2", "prefill-0:4 decode-0:5,6"),
        ("--decode-pipeline-parallel-size 2", "prefill-0:4 decode-0:5,6"),
        ("--data-parallel-size 2", "prefill-0:4 decode-0:5,6"),
        (
            "--prefill-tensor-parallel-size 1 --decode-tensor-parallel-size 2",
            "prefill-0:4 decode-0:5,6",
        ),
        (
            "--tensor-parallel-size 2 --decode-context-parallel-size 2",
            "prefill-0:4,5 decode-0:6,7",
        ),
        ("--data-parallel-size 1", "worker-0:4 worker-1:5 worker-2:6 worker-3:7"),
    ],
)
def test_a_flag_that_sizes_one_role_names_a_role(
    sizes: str, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So --gpus limits only the choice of GPUs."""
    monkeypatch.setattr("effuse.cli.up.gpus_here", lambda: tuple("01234567"))
    config, _ = parse(["--gpus", "4,5,6,7", *sizes.split()])
    found = config.assignments().items()
    assert " ".join(f"{name}:{one.gpu}" for name, one in found) == places


def test_stages_of_a_role_are_checked_before_a_process_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--decode-pipeline-parallel-size", "2", "--data-parallel-size=2"])
    assert "2: expected --data-parallel-size 1 with it, got 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--kv-offloading-dir .", "2: expected no --kv-offloading-dir with it"),
        ("--kv-pool mooncake://127.0.0.1:1/x", "2: expected no --kv-pool with it"),
        ("--workers 1", "expected 1 for a worker that both computes prompts for others and"),
    ],
)
def test_flags_that_a_cut_of_prompts_excludes_are_refused_before_a_process_starts(
    capsys: pytest.CaptureFixture[str], flags: str, told: str
) -> None:
    cut = ["--device", "cpu", "--prefill-context-parallel-size", "2", "--kv-offloading-size", "1"]
    with pytest.raises(SystemExit):
        parse([*cut, *flags.split()])
    assert told in capsys.readouterr().err


def test_a_mode_that_needs_a_pool_is_refused_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--kv-mode", "pool"])
    assert "--kv-mode pool: expected --kv-pool with it" in capsys.readouterr().err
    pool = ["--kv-pool", "lmcache://127.0.0.1:1/x", "--kv-offloading-size", "1"]
    assert parse(["--device", "cpu", "--kv-mode", "pool", *pool])[0].router_flags[:2] == (
        *("--kv-mode", "pool"),
    )


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_worker_of_both_roles_has_one_size(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    def flags(prefill: int, decode: int) -> list[str]:
        sizes = (("prefill", prefill), ("decode", decode))
        own = [f"--{role}-{kind}-parallel-size={size}" for role, size in sizes]
        return ["--device", "cpu", "--workers", "1", *own]

    with pytest.raises(SystemExit):
        parse(flags(4, 1))
    told = f"--{kind}-parallel-size: expected one size of both roles, because --workers have both"
    assert f"{told}, got 1 and 4" in capsys.readouterr().err
    assert parse(flags(2, 2))[0].workers == 1
