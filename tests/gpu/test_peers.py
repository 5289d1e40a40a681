"""Sums over the memory of other GPUs: eager, in graphs, with a late rank, without a rank."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from operators.child import environment_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
JOBS = ("eager", "replays", "planted")
RUN_S = 120.0


@contextlib.contextmanager
def ranks_of(size: int, home: Path, *jobs: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of a group; each one's output goes to a file of its number."""
    ranks = []
    for rank in range(size):
        command = [sys.executable, "-P", "-m", "operators.peer_ranks", str(rank), str(size)]
        with (home / str(rank)).open("wb") as output:
            own = subprocess.Popen(
                [*command, str(home / "meeting"), *jobs],
                env=environment_of(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        ranks.append(own)
    try:
        yield ranks
    finally:
        for own in ranks:
            own.kill()
            own.wait(10)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_fp64_and_each_other(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices")
    deadline = time.monotonic() + RUN_S
    with ranks_of(size, tmp_path, *JOBS) as ranks:
        while any(statuses := [rank.poll() for rank in ranks]) or None in statuses:
            if any(statuses) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    outputs = [(tmp_path / str(rank)).read_text() for rank in range(size)]
    print(*outputs, sep="\n")
    assert statuses == [0] * size, outputs
    assert [output.count(" passed in ") for output in outputs] == [len(JOBS)] * size, outputs


def test_killing_a_process_ends_a_kernel_that_waits(tmp_path: Path) -> None:
    with ranks_of(2, tmp_path, "alone") as ranks:
        deadline = time.monotonic() + RUN_S
        while "queued" not in (output := (tmp_path / "0").read_text()):
            assert ranks[0].poll() is None and time.monotonic() < deadline, output
            time.sleep(0.1)
        time.sleep(0.5)
        for rank in ranks:
            assert rank.poll() is None
            rank.kill()
            assert rank.wait(10) == -signal.SIGKILL
    begin = time.monotonic()
    assert int(torch.ones(1 << 20, device="cuda:0").sum()) == 1 << 20
    assert time.monotonic() - begin < 20
