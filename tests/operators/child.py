"""Runs the programs beside this file in processes of their own and returns their JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT = 280.0
Lines: TypeAlias = list[dict[str, object]]


@contextmanager
def running(
    module: str, groups: Iterable[str], **environment: str
) -> Iterator[Mapping[str, Future[Lines]]]:
    """`json_lines` of each group, as many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {group: pool.submit(json_lines, module, group, **environment) for group in groups}
        pool.shutdown(cancel_futures=True)


def json_lines(module: str, group: str, **environment: str) -> Lines:
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
