"""Runs one of the programs beside this file in a process of its own and returns its JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT = 280.0


def json_lines(module: str, group: str, **environment: str) -> list[dict[str, object]]:
    """What ``python -m module group`` prints; AssertionError with its stderr if it fails.

    It fails, too, where a launch leaves Triton a choice that it warns will be made otherwise.
    """
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, group],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "error:TRITON_DEFAULT_FP_FUSION",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{module} {group} failed:\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]
