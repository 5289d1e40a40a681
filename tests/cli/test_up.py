"""`effuse up`: the fleet from its flags, and when it gives up."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import socket
from dataclasses import fields
from pathlib import Path

import pytest
from checkpoints import write_tiny_checkpoint

from effuse.cli.commands import (
    FleetConfig,
    longest_end_s,
    longest_start_s,
    member_commands,
    value_of,
)
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.screen import workers_text
from effuse.cli.up import main, parse
from effuse.config import flags as config_flags
from effuse.config.flags import flag_of
from effuse.router.config import RouterConfig
from effuse.router.config import parse as router_config
from effuse.worker.config import BothConfig, DecodeConfig, PrefillConfig, WorkerConfig

TWO = ("0", "1")


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no GPU unless a test lists some."""
    here: tuple[str, ...] = getattr(request, "param", ())
    monkeypatch.setattr("effuse.cli.up.gpus_here", lambda: here)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


HTTP = ("--http-port", "8000")


def test_the_port_of_http() -> None:
    def port(*flags: str) -> str | None:
        return value_of(parse(flags)[0].router_flags, "--http-port")

    assert port("--http-port", "9000") == "9000" and port("--no-http") is None
    free = [port("--port", "0"), port("--http-port", "0")]
    assert all(one is not None and int(one) > 1024 and one != "8000" for one in free)


def test_defaults() -> None:
    config, view = parse([])
    assert config == FleetConfig(port=50051, router_flags=HTTP)
    assert (view.quiet, view.verbose, view.page_port) == (False, False, 0)


def test_its_own_flags_and_the_workers(tmp_path: Path) -> None:
    config, view = parse(
        [
            *("--prefill", "0", "--decode", "3", "--connector", "nixl", "--port", "0", "--quiet"),
            "--no-page",
            *("--model", str(tmp_path), "--max-num-seqs", "4", "--page-size=8"),
        ]
    )
    assert (config.prefill, config.decode, config.connector, config.port) == (0, 3, "nixl", 0)
    assert config.model == tmp_path
    assert config.worker_flags == ("--max-num-seqs", "4", "--page-size=8")
    assert (view.quiet, view.verbose, view.page_port) == (True, False, None)


def test_a_roles_flags_go_to_that_role_alone() -> None:
    config, _ = parse(
        [
            *("--handoff-lease-s=9", "--max-num-seqs", "4", "--default-algorithm"),
            *("block_diffusion", "--reservation-s", "8", "--batch-invariant"),
        ]
    )
    assert config.worker_flags == ("--max-num-seqs", "4", "--batch-invariant")
    assert config.prefill_flags == ("--reservation-s", "8")
    assert config.decode_flags == (
        *("--handoff-lease-s=9", "--default-algorithm", "block_diffusion"),
    )


def test_the_routers_flags_go_to_the_router() -> None:
    config, _ = parse(
        [
            *("--max-concurrent-requests", "4", "--max-queue=0", "--num-pages", "64"),
            *("--metrics-port", "9090", "--health-port", "9091"),
        ]
    )
    assert config.router_flags == (
        *("--max-concurrent-requests", "4", "--max-queue=0", "--metrics-port", "9090"),
        *("--health-port", "9091"),
        *HTTP,
    )
    assert config.worker_flags == ("--num-pages", "64")
    assert router_config(config.router_flags).max_concurrent_requests == 4


def test_a_fleet_has_as_long_as_its_processes() -> None:
    """For start and end, from their own command lines."""
    config, _ = parse(["--startup-timeout-s", "900", "--drain-s=75"])
    assert longest_start_s(config) > 900
    assert longest_end_s(config, "router") > 75
    assert longest_end_s(config, "decode") > 75
    assert longest_start_s(FleetConfig()) > WorkerConfig().startup_timeout_s
    assert longest_end_s(FleetConfig(), "router") > RouterConfig().drain_s
    assert longest_end_s(FleetConfig(decode_flags=("--drain-s", "90")), "decode") > 90


def test_flags_that_all_have_go_to_all() -> None:
    config, _ = parse(["--log-level", "debug", "--max-request-s=60", "--max-losses", "1"])
    assert config.router_flags == (
        *("--log-level", "debug", "--max-request-s=60", "--max-losses", "1"),
        *HTTP,
    )
    assert config.worker_flags == ("--log-level", "debug", "--max-request-s=60")


def test_every_flag_of_a_process_is_taken_or_given() -> None:
    """A user of a fleet can set every flag of a router or worker."""
    shown = set(re.findall(r"--[a-z-]+", _help()))
    given = {
        *("--worker-id", "--ready-file", "--advertise-host", "--connector-host", "--share-port"),
        *("--nnodes", "--node-rank", "--master-addr", "--master-port"),
    }
    for config in (RouterConfig, DecodeConfig, PrefillConfig):
        assert {flag_of(one.name) for one in fields(config)} - given <= shown
    assert not given & shown


def _help() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    return told.getvalue()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--decode", "0"], "expected 1 to 64, got 0"),
        (["--connector", "http"], "invalid choice: 'http'"),
        (["--model", "/no/such"], "expected a directory, got '/no/such'"),
        (["--max-num-seqs", "0"], "--max-num-seqs: expected 1 or more, got 0"),
        (["--handoff-lease-s", "0"], "--handoff-lease-s: expected seconds above 0, got 0"),
        (["--min-handoff-gbps", "-1"], "--min-handoff-gbps: expected 0 or more GB/s, got -1"),
        (["--page-sise", "8"], "unrecognized arguments: --page-sise 8"),
        (["--prefil", "2"], "did you mean --prefill?"),
        (["--kv-layout", "paged"], "argument --kv-layout: invalid choice: 'paged'"),
        (["--redis-url", "http://x"], "expected redis://host:port/db, got 'http://x'"),
        (
            ["--worker-id=mine"],
            "--worker-id=mine: not a flag of `effuse up`, which sets it on its one host",
        ),
        (["--fleet", "a b"], "--fleet: fleet 'a b' is not a valid name: expected 1 to 128 letters"),
        (["--routers", "0"], "expected 1 to 16, got 0"),
        (["--no-http", "--http-port", "0"], "--http-port: expected only with --http"),
        (["--routers", "2", "--metrics-port", "9"], "expected 0 with several routers"),
        (["--max-queue", "-1"], "--max-queue: expected 0 to 1048576, got -1"),
        (["--max-losses", "many"], "argument --max-losses: expected a whole number, got 'many'"),
        (["--metrics-port", "70000"], "--metrics-port: expected 0 to 65535, got 70000"),
        (["--max-ques", "1"], "unrecognized arguments: --max-ques 1; did you mean --max-queue?"),
        (["--gpus", "a"], "argument --gpus: expected GPUs such as 0,1 or GPU-.., got 'a'"),
        (["--gpus", "0"], "--gpus: no GPU was found on this machine"),
        (["--decode-gpus", "0"], "--decode-gpus: no GPU was found on this machine"),
        (["--device", "cuda"], "--device cuda: no GPU was found on this machine"),
        (["--device", "cuda:7"], "argument --device: invalid choice: 'cuda:7'"),
    ],
)
def test_bad_flags(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(flags, told, capsys)


def _refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [TWO], indirect=True)
def test_each_worker_gets_a_gpu_of_its_own() -> None:
    config, _ = parse([])
    assert config == FleetConfig(port=50051, gpus=TWO, router_flags=HTTP)
    fleet = Fleet(config)
    assert {name: one.gpu for name, one in fleet.gpus.items()} == {
        "prefill-0": "0",
        "decode-0": "1",
    }
    assert workers_text(config, fleet.gpus, ()) == "prefill GPU 0; decode GPU 1"
    fleet.stop()


@pytest.mark.parametrize("gpus", [TWO], indirect=True)
def test_gpus_that_are_asked_for_are_used_or_the_workers_say_why_not() -> None:
    config, _ = parse(["--gpus", "1,0", "--max-num-seqs", "4"])
    assert config.gpus == ("1", "0")
    assert config.worker_flags == ("--device", "cuda", "--max-num-seqs", "4")
    config, _ = parse(["--prefill-gpus", "1", "--decode-gpus=0", "--device", "auto"])
    assert {name: one.gpu for name, one in config.assignments().items()} == {
        "prefill-0": "1",
        "decode-0": "0",
    }
    assert config.worker_flags == ("--device", "cuda", "--device", "auto")  # the last one holds


def test_a_context_is_cut_over_the_devices_of_decode_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = ["--device", "cpu", "--decode-context-parallel-size", "2"]
    config, _ = parse([*cut, "--decode-tensor-parallel-size", "4"])
    assert cut[2] in config.decode_flags and cut[2] not in config.prefill_flags
    with pytest.raises(SystemExit):
        parse(cut)
    assert "a divisor of --tensor-parallel-size 1, got 2" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [("0", "1", "2", "3")], indirect=True)
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--gpus 0,1", "worker-0 worker-1"),
        ("--gpus 0,1,2,3 --tensor-parallel-size 2", "worker-0 worker-1"),
        ("--gpus 0", "worker-0"),
        ("--workers 2", "worker-0 worker-1"),
        ("--gpus 0,1,2,3 --workers 1", "worker-0"),
        ("--workers 1 --prefill 1", "prefill-0 worker-0"),
        ("--workers 1 --decode 2", "decode-0 decode-1 worker-0"),
        ("--gpus 0,1 --prefill 1", "prefill-0 decode-0"),
        ("--gpus 0,1 --decode 1", "prefill-0 decode-0"),
        ("--prefill-gpus 0 --decode-gpus 1", "prefill-0 decode-0"),
        ("", "prefill-0 decode-0"),
    ],
)
def test_workers_do_both_where_no_role_is_named(flags: str, names: str) -> None:
    config, _ = parse(flags.split())
    assert " ".join(config.assignments()) == names
    commands = member_commands(config, 1, config.assignments(), lambda _: ())
    modules = {name: command[3] for name, command in commands.items() if "router" not in name}
    kinds = {"prefill": "prefill_worker", "decode": "decode_worker", "worker": "both_worker"}
    assert modules == {one: f"effuse.{kinds[one.split('-')[0]]}" for one in names.split()}


def test_workers_that_do_both_get_the_flags_of_both_kinds() -> None:
    config, _ = parse(
        ["--workers", "1", "--reservation-s", "5", "--max-window", "4", "--num-pages", "99"]
    )
    (command,) = (
        words for name, words in member_commands(config, 1, {}, lambda _: ()).items()
        if name == "worker-0"
    )  # fmt: skip
    taken = config_flags.parse(BothConfig, command[4:], prog="x", about="x")
    assert (taken.reservation_s, taken.max_window, taken.num_pages) == (5.0, 4, 99)
    assert taken.role == "both"


@pytest.mark.parametrize("gpus", [("0",)], indirect=True)
def test_workers_that_share_a_gpu_divide_what_they_may_use_of_it() -> None:
    fleet = Fleet(parse(["--gpu-sharing"])[0])
    assert _memory(fleet) == {"prefill-0": ["0.45"], "decode-0": ["0.45"]}
    half = "GPU 0 (1/2 of its memory)"
    shown = workers_text(fleet.config, fleet.gpus, ())
    assert shown == f"prefill {half}; decode {half}"
    fleet.stop()
    told = ["--prefill", "0", "--decode", "3", "--gpu-sharing", "--gpu-memory-utilization=0.6"]
    fleet = Fleet(parse(told)[0])
    assert _memory(fleet) == {f"decode-{at}": ["0.2"] for at in range(3)}
    fleet.stop()


@pytest.mark.parametrize("gpus", [TWO], indirect=True)
def test_a_gpu_that_is_not_shared_is_used_as_the_flags_say() -> None:
    fleet = Fleet(parse(["--decode", "2", "--gpu-sharing"])[0])
    assert _memory(fleet) == {"prefill-0": ["0.45"], "decode-0": [], "decode-1": ["0.45"]}
    fleet.stop()


def _memory(fleet: Fleet) -> dict[str, list[str]]:
    """The fleet's own memory share for each worker, after all other flags."""
    return {
        name: words[-1:] if words[-2] == "--gpu-memory-utilization" else []
        for name, words in member_commands(fleet.config, 1, fleet.gpus, lambda _: ()).items()
        if name in fleet.gpus
    }


@pytest.mark.parametrize("gpus", [("0",)], indirect=True)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "2 workers (1 prefill, 1 decode) on 1 GPU (0): each worker needs its own GPU; start"),
        (["--decode", "2"], "let them share GPUs and memory with --gpu-sharing"),
        (["--gpus", "0,3"], "GPU 3 is not on this machine, which has 0"),
        (["--prefill-gpus", "0,0"], "--prefill-gpus: expected 1, one for each prefill worker"),
        (
            ["--gpus", "0", "--device", "cpu", "--gpu-sharing"],
            "--device cpu: expected no GPU flags",
        ),
    ],
)
def test_gpus_that_do_not_suffice(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(flags, told, capsys)


@pytest.mark.parametrize("gpus", [("0",)], indirect=True)
def test_workers_on_the_cpu_get_no_gpu() -> None:
    config, _ = parse(["--device", "cpu", "--decode", "4"])
    cpu = ("--device", "cpu")
    assert config == FleetConfig(port=50051, decode=4, worker_flags=cpu, router_flags=HTTP)
    assert config.assignments() == {}


def test_sharing_asks_for_nothing_where_there_is_no_gpu() -> None:
    assert parse(["--gpu-sharing"])[0].assignments() == {}


def test_gpus_that_the_environment_hides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _refused(["--gpus", "0"], "on this machine (CUDA_VISIBLE_DEVICES is '')", capsys)


@pytest.mark.parametrize("case", [("taken", "File exists"), ("/proc", "No such file or directory")])
def test_a_log_directory_that_cannot_be_or_be_written_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[str, str],
) -> None:
    given, why = case
    (tmp_path / "taken").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["--port", "0", "--log-dir", str(tmp_path / given)]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert f"--log-dir {tmp_path / given}: {why}" in capsys.readouterr().err
    assert [left.name for left in tmp_path.iterdir()] == ["taken"]


def test_a_port_that_somebody_has_is_refused() -> None:
    """Routers share theirs, so two fleets would take turns there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fleet = Fleet(FleetConfig(port=taken.getsockname()[1]))
        with pytest.raises(FleetError, match=r"cannot listen on 127\.0\.0\.1:"):
            fleet.start()


@pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--health-port", "--page-port"])
def test_a_port_that_is_taken_is_told_before_anything_starts(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("effuse.cli.up.Fleet", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", "0", flag, port]) == 2
    assert f"effuse up: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_files_that_cannot_be_served_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("effuse.cli.up.Fleet", None)
    path = write_tiny_checkpoint(tmp_path / "model", "sdar")
    (path / "tokenizer.json").write_text("{}")
    for told in ("as a tokenizer", "neither model.safetensors nor"):
        assert main(["--port", "0", "--model", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("effuse up: ") and told in line
        (path / "model.safetensors").unlink(missing_ok=True)
    assert main(["--port", "0", "--default-algorithm", "fast_dllm_v2"]) == 2
    assert "fast_dllm_v2 needs a model that was tuned for it" in capsys.readouterr().err


def test_a_fleet_without_decode_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="decode must be 1 or more, got 0"):
        FleetConfig(decode=0)


def test_flags_of_prefill_workers_are_refused_in_a_fleet_without_them() -> None:
    rows = ("--prefill-context-parallel-size", "2")
    with pytest.raises(ValueError, match=f"{rows[0]}: expected a prefill worker"):
        FleetConfig(prefill=0, prefill_flags=rows)
    assert FleetConfig(prefill=0, decode=0, workers=1, prefill_flags=rows)


def test_a_fleet_that_names_gpus_for_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU workers get no GPU"):
        FleetConfig(gpus=TWO, decode_flags=("--device=cpu",))
