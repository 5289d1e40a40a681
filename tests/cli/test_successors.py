"""A worker's successor: its command, and whether there is room for it beside the worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.cli.commands import has_room_beside, renamed
from effuse.cli.gpus import Assignment
from effuse.worker.gpus import Memory, memory_of

WHOLE, HALF = Assignment("0", 1.0), Assignment("0", 0.5)


def test_a_successor_has_an_id_and_a_ready_file_of_its_own() -> None:
    command = [
        "python",
        "--model",
        "decode-0",
        "--worker-id",
        "decode-0",
        "--ready-file",
        "/a.json",
    ]
    assert renamed(command, "decode-0.2", Path("/a.json"), Path("/b.json")) == [
        *("python", "--model", "decode-0", "--worker-id", "decode-0.2", "--ready-file", "/b.json")
    ]


@pytest.mark.parametrize(
    ("flags", "gpu", "here", "memory", "has_room"),
    [
        ((), None, (), None, True),  # no GPU is here
        (("--device", "cpu"), None, ("0",), None, True),
        ((), None, ("0",), None, False),  # which GPU it has is not known
        ((), WHOLE, ("0",), None, False),  # the driver does not report it
        ((), WHOLE, ("0",), Memory(81559, 7000), False),
        ((), WHOLE, ("0",), Memory(81559, 81000), True),
        (("--gpu-memory-utilization", "0.4"), WHOLE, ("0",), Memory(81559, 48000), True),
        (("--gpu-memory-utilization=0.4",), HALF, ("0",), Memory(81559, 33000), False),
    ],
)
def test_there_is_room_on_a_cpu_and_on_a_gpu_with_a_share_free(
    flags: tuple[str, ...],
    gpu: Assignment | None,
    here: tuple[str, ...],
    memory: Memory | None,
    has_room: bool,
) -> None:
    command = ["python", "-m", "effuse.decode_worker", *flags]
    found = has_room_beside(command, gpu, gpus=lambda: here, memory=lambda _: memory)
    assert found is has_room


@pytest.mark.parametrize(
    ("answer", "memory"),
    [
        ("echo '81559, 7000'", Memory(81559, 7000)),
        ("echo '[N/A], [N/A]'", None),
        ("echo 'No devices were found'; exit 6", None),
    ],
)
def test_the_driver_is_asked_for_one_gpu(
    answer: str, memory: Memory | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\necho "$@" >{asked}\n{answer}\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert memory_of("GPU-1") == memory
    assert "-i GPU-1" in asked.read_text()
