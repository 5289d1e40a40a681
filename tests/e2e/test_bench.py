"""`effuse bench --baseline` beside a real fleet: one heading, the rows in their order, one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from effuse.cli import bench
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.problems.problem import check, problem


def test_a_table_beside_a_data_parallel_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [problem(5, number, "held_out") for number in range(2, 6)]
    lines = [{"prompt": each.prompt, "answer": each.answer} for each in problems]
    lines.append({"prompt": "word " * 400, "answer": "1", "task_id": "too/long"})
    dataset, out = tmp_path / "set.jsonl", tmp_path / "out.json"
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = FleetConfig(prefill=0, decode=2, worker_flags=("--device", "cpu"))
    flags = ["--baseline", "--max-tokens", "176", "--scorer", "gsm8k", "--json", str(out)]
    with Fleet(config) as fleet:
        status = bench.main(["--dataset", str(dataset), "--target", fleet.address, *flags])
    told = capsys.readouterr()
    assert status == 1  # for the prompt that does not fit
    head = told.out.splitlines()
    assert head[0].startswith("set.jsonl, 5 prompts, 8 at a time; bundled, algorithm d2f")
    assert "1 thread each; base model: block_diffusion" in head[1]
    assert (
        head[2] == "1 of 5 prompts do not fit 512 tokens with --max-tokens 176; they count as "
        "failed: too/long"
    )
    rows = json.loads(out.read_text())
    names = ["base model", "single-process D2F", "fleet 0P2D"]
    assert [one["name"] for one in rows] == names
    assert [line[:18].strip() for line in head[4:7]] == [name[:18] for name in names]
    assert all((one["samples"], one["failed"]) == (4, 1) for one in rows)
    for row in rows:
        right = [check(problems[one["prompt"]], one["text"]).final for one in row["answers"]]
        assert row["accuracy"] == pytest.approx(sum(right) / 5)
        assert sum(right) >= 2  # it was taught these
    texts = [sorted((one["prompt"], one["text"]) for one in row["answers"]) for row in rows]
    assert texts[1] == texts[2]  # the same engine, with and without a fleet
