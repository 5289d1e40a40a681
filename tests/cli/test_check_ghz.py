"""Verdicts on reports of ghz v0.121.0: every kind of bad report is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from effuse.cli.__main__ import main

GOOD = Path(__file__).parent / "ghz_good.json"  # 6 calls of a fleet on a CPU
LATE = Path(__file__).parent / "ghz_late.json"  # 6 calls with a deadline that none could meet


def test_a_good_report(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(GOOD.read_text())
    latency = {one["percentage"]: one["latency"] for one in told["latencyDistribution"]}
    limits = [f"--p{at}={latency[at] * 1.01e-9}" for at in (50, 90, 95, 99)]
    limits += [f"--average={told['average'] * 1.01e-9}", f"--slowest={told['slowest'] * 1.01e-9}"]
    assert (
        main(["check-ghz", str(GOOD), "--count", "6", f"--least-rps={told['rps'] * 0.99}", *limits])
        == 0
    )
    out = capsys.readouterr()
    assert not out.err
    assert out.out.startswith("6 calls, ") and f"p99 {latency[99] / 1e6:.0f} ms" in out.out


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        ("--p50=0.001", "p50 is "),
        ("--p99=0.001", "p99 is "),
        ("--average=0.001", "the average is "),
        ("--slowest=0.001", "the slowest is "),
        ("--least-rps=100000", "calls per second, expected at least 100000"),
        ("--count=7", "6 calls were made, expected 7"),
    ],
)
def test_each_limit_is_held(limit: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-ghz", str(GOOD), limit]) == 1
    assert fault in capsys.readouterr().err


def test_failed_calls_are_told_with_their_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-ghz", str(LATE), "--p99", "10"]) == 1
    told = capsys.readouterr().err
    assert "6 calls failed, 0 may: 6 with DeadlineExceeded; 5 x rpc error: code = Deadline" in told
    assert "p99 is not in the report" in told
    assert main(["check-ghz", str(LATE), "--errors", "6"]) == 1
    assert capsys.readouterr().err == "effuse check-ghz: no call succeeded\n"


def test_some_calls_may_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(GOOD.read_text())
    told["statusCodeDistribution"] = {"OK": 4, "Unavailable": 2}
    path = tmp_path / "told.json"
    path.write_text(json.dumps(told))
    assert main(["check-ghz", str(path), "--errors", "2"]) == 0
    assert main(["check-ghz", str(path), "--errors", "1"]) == 1
    assert "2 calls failed, 1 may: 2 with Unavailable" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"count": "6"}', b"\xff", b'{"count": 6',
                                     b'{"a":' * 100_000])  # fmt: skip
def test_what_is_no_report_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "told.json"
    path.write_bytes(content)
    assert main(["check-ghz", str(path)]) == 2
    assert "expected a ghz report in JSON" in capsys.readouterr().err
