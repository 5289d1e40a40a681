"""The tables of RESULTS.md are those of the JSON files that they name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from effuse.benchmarks import results
from effuse.benchmarks.results import MARKED, PAGE, ROOT, filled, main


def _read(name: str) -> Any:
    return json.loads((ROOT / name).read_text())


def test_no_table_is_stale() -> None:
    assert main(["--check"]) == 0
    marks = MARKED.findall(PAGE.read_text())
    assert {kind for _, kind, _ in marks} == results.KINDS.keys()


def test_a_changed_figure_is_found_and_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "RESULTS.md"
    before = PAGE.read_text()
    assert before.count("| 82 of 82 |") == 1
    page.write_text(before.replace("| 82 of 82 |", "| 83 of 83 |"))
    monkeypatch.setattr(results, "PAGE", page)
    assert main(["--check"]) == 1 and "is stale" in capsys.readouterr().err
    assert main([]) == 0 and page.read_text() == before
    assert len(before.splitlines()) <= 250


def test_a_request_counts_if_it_met_both_objectives() -> None:
    """Counted here by hand, from the requests themselves."""
    content = _read("gpu_fleet_h100.json")
    table = results.arriving(content).splitlines()
    gaps = [
        sorted(gap for one in fleet["alone"]["2048/128"] for gap in one["gaps"])
        for fleet in (*content["split"], *content["colocated"])
        if "2048/128" in fleet["alone"]
    ]
    unloaded = min(one[len(one) // 2] for one in gaps)
    load = next(one for one in content["split"][0]["arriving"] if one["rate"] == 16)
    kept = 0
    for one in load["each"]:
        short = [gap for gap in one["gaps"] if gap <= 2 * unloaded]
        in_time = not one["failure"] and one["first_s"] is not None and one["first_s"] <= 1
        kept += in_time and len(short) == len(one["gaps"])
    assert re.split(r" *\| *", table[2])[4] == f"{kept} of {len(load['each'])}"


def test_text_outside_of_tables_stays() -> None:
    page = "a\n\n<!-- arriving of gpu_fleet_h100.json -->\n| old |\n\nb | c\n"
    made = filled(page, _read)
    assert made.startswith("a\n\n<!-- arriving of gpu_fleet_h100.json -->\n| met two gaps")
    assert made.endswith("|\n\nb | c\n") and "old" not in made
