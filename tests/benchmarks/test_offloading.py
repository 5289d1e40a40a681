"""The benchmark of host memory and files: every time is measured, and the rule takes each way."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.benchmarks import offloading


def test_every_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offloading, "ROUNDS", 1)
    monkeypatch.setattr(offloading, "WARM_UP", 0)
    benches: list[offloading.Bench] = []
    run = offloading.Bench.run

    def noted(bench: offloading.Bench) -> offloading.Times:
        benches.append(bench)
        return run(bench)

    monkeypatch.setattr(offloading.Bench, "run", noted)
    assert offloading.main(["--directory", str(tmp_path)]) == 0
    (bench,) = benches
    assert all(len(getattr(bench.times, name)) == 1 for name in offloading.Times.__slots__)
    read = bench.tiers.stores[0].counts.read
    assert read > 0 and bench.tiers.counts.loaded >= 2 * read
    assert "nan" not in capsys.readouterr().out
