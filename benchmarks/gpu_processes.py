"""Ranks as processes of a benchmark, on the GPUs of CUDA_VISIBLE_DEVICES in their order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_processes(
    degrees: Sequence[int], argv: Sequence[str], deadline: float, module: str
) -> list[dict[str, Any]]:
    """What the first ranks of groups of these degrees, side by side, have written to results.json
    in their `--home` before the deadline."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    with tempfile.TemporaryDirectory() as home:
        processes = []
        for degree in degrees:
            own, gpus = gpus[:degree], gpus[degree:]
            place = Path(home) / str(degree)
            place.mkdir()
            flags = ["--size", str(degree), "--home", str(place)]
            processes += [
                subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *argv, *flags, "--rank", str(rank)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)},
                )
                for rank in range(degree)
            ]
        _wait(processes, deadline)
        files = [Path(home) / str(degree) / "results.json" for degree in degrees]
        return [one for file in files if file.exists() for one in json.loads(file.read_text())]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended; kills the others if one fails, or at the deadline."""
    while time.monotonic() < deadline:
        ended = [process.poll() for process in processes]
        if None not in ended or any(ended):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
