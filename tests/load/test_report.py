"""The verdict over a ghz report: every way in which a run is not good is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from load import report

from effuse.v1 import generation_pb2  # noqa: F401  registers the messages


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


@pytest.mark.parametrize("name", ["unary", "stream"])
def test_the_configurations_call_what_exists(name: str) -> None:
    told = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    method = descriptor_pool.Default().FindMethodByName(told["call"])
    assert method.server_streaming == (name == "stream")
    for data in told["data"]:
        message = GetMessageClass(method.input_type)()
        assert ParseDict(data, message).ByteSize()
