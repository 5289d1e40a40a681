"""The GPU of each worker, and which GPUs count as this machine's."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effuse.cli.gpus import (
    Assignment,
    assign,
    fleet_gpus,
    gpu_list,
)
from effuse.worker.gpus import check_device, gpus_here, visible

ID = "GPU-4a1b9c3e-0000-1111-2222-333344445555"


def _places(assigned: dict[str, Assignment]) -> str:
    return " ".join(f"{name}:{one.gpu}" for name, one in assigned.items())


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "places"),
    [
        (1, 1, "0 1", "prefill-0:0 decode-0:1"),
        (1, 1, "3 1 2", "prefill-0:3 decode-0:1"),
        (0, 2, "0 1", "decode-0:0 decode-1:1"),
        (2, 2, "4 5 6 7", "prefill-0:4 prefill-1:5 decode-0:6 decode-1:7"),
        (1, 1, f"MIG-7 {ID}", f"prefill-0:MIG-7 decode-0:{ID}"),
    ],
)
def test_workers_take_the_gpus_in_order(prefill: int, decode: int, gpus: str, places: str) -> None:
    assigned = assign(prefill, decode, gpus=gpus.split())
    assert _places(assigned) == places
    assert all(one.share == 1 for one in assigned.values())


def test_a_roles_own_list_comes_first_and_the_rest_take_what_is_left() -> None:
    assigned = assign(1, 2, gpus=["0", "1", "2"], prefill_gpus=["1"])
    assert _places(assigned) == "prefill-0:1 decode-0:0 decode-1:2"
    assigned = assign(2, 1, gpus=["0", "1", "2"], prefill_gpus=["2", "0"], decode_gpus=["1"])
    assert _places(assigned) == "prefill-0:2 prefill-1:0 decode-0:1"


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "sizes", "places"),
    [
        (1, 1, "0 1 2 3", (2, 2), "prefill-0:0,1 decode-0:2,3"),
        (1, 1, "0 1 2", (1, 2), "prefill-0:0 decode-0:1,2"),
        (0, 2, "4 5 6 7", (1, 2), "decode-0:4,5 decode-1:6,7"),
        (2, 1, "0 1 2 3", (1, 2), "prefill-0:0 prefill-1:1 decode-0:2,3"),
    ],
)
def test_a_worker_of_several_gpus_gets_neighbours(
    prefill: int, decode: int, gpus: str, sizes: tuple[int, int], places: str
) -> None:
    assigned = assign(
        prefill, decode, gpus=gpus.split(), prefill_size=sizes[0], decode_size=sizes[1]
    )
    assert _places(assigned) == places


def test_a_roles_list_names_the_gpus_of_each_worker_in_turn() -> None:
    assigned = assign(0, 2, gpus=None, decode_gpus=["3", "1", "2", "0"], decode_size=2)
    assert _places(assigned) == "decode-0:3,1 decode-1:2,0"


def test_groups_share_gpus_if_they_may() -> None:
    assigned = assign(1, 1, gpus=["0", "1"], prefill_size=2, decode_size=2, sharing=True)
    assert _places(assigned) == "prefill-0:0,1 decode-0:0,1"
    assert {one.share for one in assigned.values()} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"gpus": ["0", "1", "2"], "decode_size": 3}, "need 4 GPUs by their parallel sizes"),
        ({"gpus": ["0", "1"], "decode_size": 3, "sharing": True}, "need 3 GPUs"),
        (
            {"gpus": ["0", "1", "2"], "prefill_gpus": ["1"], "decode_size": 2},
            "decode-0: expected 2 free GPUs side by side among 3 GPUs (0, 1, 2)",
        ),
        (
            {"gpus": ["0", "1", "2"], "decode_gpus": ["1"], "decode_size": 2},
            "--decode-gpus: expected 2, 2 for each decode worker, got 1 GPU (1)",
        ),
    ],
)
def test_gpus_that_do_not_suffice_for_groups_are_refused(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        assign(1, 1, **arguments)


def test_lists_for_both_roles_need_no_other() -> None:
    assigned = assign(1, 1, gpus=None, prefill_gpus=["5"], decode_gpus=["3"])
    assert _places(assigned) == "prefill-0:5 decode-0:3"


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "places"),
    [
        (1, 1, "0", "prefill-0:0/2 decode-0:0/2"),
        (1, 2, "0 1", "prefill-0:0/2 decode-0:1/1 decode-1:0/2"),
        (2, 2, "0 1", "prefill-0:0/2 prefill-1:1/2 decode-0:0/2 decode-1:1/2"),
        (0, 4, ID, f"decode-0:{ID}/4 decode-1:{ID}/4 decode-2:{ID}/4 decode-3:{ID}/4"),
        (1, 1, "0 1", "prefill-0:0/1 decode-0:1/1"),
    ],
)
def test_sharing_spreads_workers_and_divides_the_memory(
    prefill: int, decode: int, gpus: str, places: str
) -> None:
    assigned = assign(prefill, decode, gpus=gpus.split(), sharing=True)
    told = [f"{name}:{one.gpu}/{round(1 / one.share)}" for name, one in assigned.items()]
    assert " ".join(told) == places


def test_named_gpus_count_where_others_are_added() -> None:
    assigned = assign(1, 2, gpus=["0", "1"], prefill_gpus=["0"], sharing=True)
    assert assigned == {
        "prefill-0": Assignment("0", 0.5),
        "decode-0": Assignment("1", 1.0),
        "decode-1": Assignment("0", 0.5),
    }


def test_how_an_assignment_reads() -> None:
    assert str(Assignment("0", 1.0)) == "GPU 0"
    assert str(Assignment("0", 1 / 3)) == "GPU 0 (1/3 of its memory)"
    assert str(Assignment(ID, 1.0)) == ID
    assert str(Assignment("2,3", 1.0)) == "GPUs 2,3"


@pytest.mark.parametrize(
    ("assigned", "told"),
    [
        (
            lambda: assign(1, 1, gpus=["0"]),
            "2 workers (1 prefill, 1 decode) on 1 GPU (0): each worker needs its own GPU; "
            "start fewer workers, or let them share GPUs and memory with --gpu-sharing",
        ),
        (
            lambda: assign(2, 3, gpus=["0", "1"], decode_gpus=["0", "1", "0"]),
            "5 workers (2 prefill, 3 decode) on 2 GPUs (0, 1): each worker needs",
        ),
        (
            lambda: assign(0, 1, gpus=[], sharing=True),
            "1 worker (0 prefill, 1 decode) on 0 GPUs: each worker needs",
        ),
        (
            lambda: assign(1, 1, gpus=None, prefill_gpus=["0"]),
            "2 workers (1 prefill, 1 decode) on 1 GPU (0): each worker needs",
        ),
        (
            lambda: assign(1, 1, gpus=["0", "1"], prefill_gpus=["1"], decode_gpus=["1"]),
            "GPU 1 is given to prefill-0 and decode-0; --gpu-sharing lets workers share",
        ),
        (
            lambda: assign(1, 2, gpus=["0", "1", "2"], decode_gpus=["1"]),
            "--decode-gpus: expected 2, one for each decode worker, got 1 GPU (1)",
        ),
        (
            lambda: assign(0, 1, gpus=["0"], prefill_gpus=["0"]),
            "--prefill-gpus: expected 0, one for each prefill worker, got 1 GPU (0)",
        ),
        (
            lambda: assign(1, 1, gpus=["0", "1"], prefill_gpus=["7"]),
            "GPU 7 is not one of the fleet's GPUs: 0, 1",
        ),
        (lambda: assign(1, 1, gpus=["0", "0"]), "--gpus: GPU 0 is named twice"),
        (
            lambda: assign(1, 1, gpus=["0", ID]),
            f"expected GPUs by number or by id, not both, got 2 GPUs (0, {ID})",
        ),
    ],
)
def test_what_cannot_be_says_why(assigned: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError) as failed:
        assigned()
    assert told in str(failed.value)


def test_a_fleet_uses_what_is_asked_for_or_all() -> None:
    here = ("0", "1", "2")
    assert fleet_gpus(here, None, ()) == here
    assert fleet_gpus(here, None, ("2",)) == here
    assert fleet_gpus(here, ("2", "0"), ()) == ("2", "0")


def test_ids_pass_where_gpus_are_known_by_number_only() -> None:
    assert fleet_gpus(("0", "1"), (ID,), ()) == (ID,)
    assert fleet_gpus(("0", "1"), None, (ID, "MIG-7")) == (ID, "MIG-7")
    assert fleet_gpus((ID, "GPU-2"), ("GPU-2",), ()) == ("GPU-2",)


@pytest.mark.parametrize(
    ("here", "gpus", "named", "told"),
    [
        ("0 1", ("0", "2"), (), "GPU 2 is not on this machine, which has 0, 1"),
        ("0 1", None, ("5",), "GPU 5 is not on this machine, which has 0, 1"),
        (ID, ("GPU-2",), (), f"GPU-2 is not on this machine, which has {ID}"),
        (ID, ("0",), (), f"GPU 0 is not on this machine, which has {ID}"),
    ],
)
def test_gpus_that_are_not_here_are_refused(
    here: str, gpus: tuple[str, ...] | None, named: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ValueError) as failed:
        fleet_gpus(here.split(), gpus, named)
    assert told in str(failed.value)


@pytest.mark.parametrize(
    ("count", "variable", "left"),
    [
        (2, None, ("0", "1")),
        (4, "2,3", ("2", "3")),
        (4, " 3 , 1", ("3", "1")),
        (2, "1,7,0", ("1",)),  # CUDA stops at the first that does not exist
        (2, "-1", ()),
        (2, "", ()),
        (2, "NoDevFiles", ()),
        (2, f"{ID},MIG-7/1/0", (ID, "MIG-7/1/0")),
        (2, "0,0,1", ("0", "1")),
        (0, None, ()),
        (0, "0", ()),
    ],
)
def test_the_environment_narrows_what_is_visible(
    count: int, variable: str | None, left: tuple[str, ...]
) -> None:
    assert visible(count, variable) == left


@pytest.mark.parametrize("text", ["0", "0,1", f"{ID},MIG-GPU-1/2/3"])
def test_lists_of_gpus(text: str) -> None:
    assert ",".join(gpu_list(text)) == text


@pytest.mark.parametrize("text", ["", "0,", "a", "0 1", "-1", "GPU-", "cuda:0"])
def test_bad_lists_of_gpus(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected GPUs such as 0,1"):
        gpu_list(text)


def _machine(root: Path, *, files: str = "", driver: int = 0) -> Path:
    (root / "dev").mkdir()
    for name in files.split():
        (root / "dev" / name).touch()
    for at in range(driver):
        (root / "proc/driver/nvidia/gpus" / f"0000:{at:02x}:00.0").mkdir(parents=True)
    return root


LISTING = f"""GPU 0: NVIDIA H200 (UUID: {ID})
  MIG 1g.18gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H200 (UUID: GPU-2)
"""


def test_the_drivers_own_list_is_asked_first(tmp_path: Path) -> None:
    machine = _machine(tmp_path, files="nvidia0 nvidia1 nvidia2", driver=4)
    assert gpus_here(machine, {}, lambda: LISTING) == ("0", "1")
    assert gpus_here(machine, {"CUDA_VISIBLE_DEVICES": "1"}, lambda: LISTING) == ("1",)


def test_device_files_tell_what_a_container_got(tmp_path: Path) -> None:
    """Numbered as on its host; CUDA numbers them anew."""
    files = "nvidia2 nvidia3 nvidiactl nvidia-uvm nvidia-uvm-tools nvidia-modeset nvidia-caps"
    assert gpus_here(_machine(tmp_path, files=files, driver=8), {}, str) == ("0", "1")


def test_the_driver_tells_of_the_machine_where_nothing_else_does(tmp_path: Path) -> None:
    assert gpus_here(_machine(tmp_path, driver=2), {}, str) == ("0", "1")


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    machine = _machine(tmp_path, files="null nvidia-uvm")
    assert gpus_here(machine, {"CUDA_VISIBLE_DEVICES": "0"}, str) == ()


@pytest.mark.parametrize(
    ("script", "count"),
    [
        (f'test "$1" = -L && cat <<E\n{LISTING}E', 2),
        ("echo 'GPU 0: of a driver that failed'; exit 9", 0),
        (None, 0),
    ],
)
def test_the_drivers_command_is_run_where_there_is_one(
    script: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    if script is not None:
        command = tmp_path / "bin/nvidia-smi"
        command.write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert len(gpus_here(_machine(tmp_path), {})) == count


def test_a_driver_that_hangs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr("subprocess.run", hang)
    assert gpus_here(_machine(tmp_path, driver=1), {}) == ("0",)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effuse.worker.gpus.gpus_here", lambda **_: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_device("cpu")
    check_device("auto")
    with pytest.raises(ValueError, match=r"--device cuda: no GPU was found .*DEVICES is ''"):
        check_device("cuda")


def test_the_driver_is_not_asked_if_device_files_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def here(**given: object) -> tuple[str, ...]:
        asked.append(given)
        return ("0",)

    monkeypatch.setattr("effuse.worker.gpus.gpus_here", here)
    check_device("cuda")
    assert asked == [{"listing": str}]
