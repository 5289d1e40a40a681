"""The parts of the benchmark of sums that need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from effuse.benchmarks import gpu_sums
from effuse.benchmarks.gpu_sums import Result, aims, run_degree, table

RESULTS = [
    Result(2, 132, 2.5, {"nccl": 20.0, "ours one-shot 8": 9.0, "ours two-shot 8": 11.0}),
    Result(2, 4246, 80.0, {"nccl": 160.0}),
    Result(4, 132, 3.5, {"nccl": 20.0, "torch one-shot": 1.0, "ours one-shot 8": 12.5}),
]


def test_table_has_each_rival_and_the_ratio_of_our_faster_way() -> None:
    lines = [line.split() for line in table(RESULTS).splitlines()]
    assert ["nccl", "20.00", "160.00"] in lines
    assert ["ours", "one-shot", "8", "9.00", "-"] in lines
    assert ["ours", "/", "nccl", "0.45", "-"] in lines
    assert ["limit", "3.50"] in lines


def test_an_aim_holds_or_is_missed() -> None:
    two, four = aims(RESULTS)
    assert two == "2 GPUs, 132 rows: 0.45 of NCCL, aim 0.6 holds"
    assert four == "4 GPUs, 132 rows: 0.62 of NCCL, aim 0.6 is missed"


@pytest.mark.parametrize("code", ["sys.exit(3)", "time.sleep(60)"])
def test_ranks_that_fail_or_hang_end_the_run_and_earlier_results_stay(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(rank: int, degree: int, meeting: Path, rows: object) -> object:
        own = f"import sys, time, pathlib; flag = pathlib.Path({str(tmp_path / 'flag')!r})"
        if rank == 0:
            line = json.dumps(asdict(RESULTS[0]))
            own += f"; print({line!r}, flush=True); flag.touch(); time.sleep(60)"
        else:
            own += f"\nwhile not flag.exists(): time.sleep(0.01)\n{code}"
        return subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(gpu_sums, "_started", started)
    results, error = run_degree(2, [1], time.monotonic() + (60.0 if "exit" in code else 3.0))
    assert "2 ranks failed or took too long" in error
    assert results == RESULTS[:1]
