"""The verdict over a ghz report: every way in which a run is not good is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from load import report


def _write(folder: Path, **changes: object) -> report.Report:
    told = {
        "count": 10,
        "rps": 5.0,
        "statusCodeDistribution": {"OK": 10},
        "errorDistribution": {},
        "latencyDistribution": [
            {"percentage": at, "latency": at * 1_000_000} for at in (50, 95, 99)
        ],
    } | changes
    (folder / "told.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"call": "S.M", "total": 10}))
    return report.read(folder / "told.json", folder / "config.json")


def test_a_good_run(tmp_path: Path) -> None:
    run = _write(tmp_path)
    assert run.faults() == []
    assert run.line() == "S.M: 10 calls, 5.0 a second, p50 50 ms, p95 95 ms, p99 99 ms"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"statusCodeDistribution": {"OK": 9, "Unavailable": 1}},
            "1 calls ended with Unavailable",
        ),
        ({"errorDistribution": {"rpc error": 2}}, "2 x rpc error"),
        ({"count": 9}, "9 calls were made, 10 were asked for"),
    ],
)
def test_a_bad_run(changes: dict[str, object], fault: str, tmp_path: Path) -> None:
    assert fault in _write(tmp_path, **changes).faults()


def test_the_configurations_call_what_exists() -> None:
    folder = Path(__file__).parent
    calls = {
        json.loads((folder / f"{name}.json").read_text())["call"] for name in ("unary", "stream")
    }
    service = "effuse.v1.GenerationService"
    assert calls == {f"{service}.Generate", f"{service}.GenerateStream"}
