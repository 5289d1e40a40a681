"""`effuse bench` reads datasets and flags strictly and tells what it has, broken off or not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from effuse.cli import bench
from effuse.cli.figures import Run, Sample, ServiceGoals
from effuse.cli.load import Tally


def test_a_dataset_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {n}", "answer": "1"}) for n in range(3)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines))
    assert bench.read_prompts(path) == ["question 0", "question 1", "question 2"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected one JSON object a line, found none"),
        ('{"prompt": "a"}\nnot json', ":2: expected a JSON object, got 'not json'"),
        ('{"question": "a"}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": ""}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": "\\ud800"}', ':1: expected {"prompt": "..."}'),
        ("[1]", ':1: expected {"prompt": "..."}'),
    ],
)
def test_a_bad_dataset_names_its_line(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(bench.DatasetError) as refused:
        bench.read_prompts(path)
    assert told in str(refused.value)


def test_a_dataset_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(bench.DatasetError, match="expected UTF-8 text"):
        bench.read_prompts(path)


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', newline="")
    assert bench.read_prompts(path) == ["a\u2028b", "c"]


def test_a_knob_that_the_baselines_lack_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--window", "2"]
    assert bench.parse(flags).baseline
    with pytest.raises(SystemExit):
        bench.parse([*flags, "--temperature", "0.5", "--stop-token-id", "3"])
    assert "got --stop-token-id, --temperature too" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--model-dir", str(tmp_path)]
    assert bench.main(flags) == 2
    assert f"effuse bench: {tmp_path} has no tokenizer.json" in capsys.readouterr().err


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return path


def test_flags_of_a_sweep(dataset: Path, tmp_path: Path) -> None:
    flags = ["--dataset", str(dataset), "--limit", "5", "--rate", "2", "--sweep"]
    goals = ["--total-within", "3", "--gap-within", "0.5", "--plot", str(tmp_path / "a.svg")]
    job = bench.parse([*flags, *goals])
    assert job.traffic.prompts == ("a", "b", "a", "b", "a")
    assert (job.rate, job.sweep, job.goals) == (2.0, True, ServiceGoals(gap_s=0.5, total_s=3.0))
    assert math.isinf(job.goals.first_block_s)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rate", "0"], "expected a number in (0, infinity), got 0"),
        (["--sweep", "--rate", "1"], "--sweep: expected --rate and an objective"),
        (["--sweep", "--total-within", "1"], "--sweep: expected --rate and an objective"),
        (["--gap-within", "0"], "--gap-within: expected a number in (0, 604800]"),
        (["--plot", "figures.txt"], "expected a name that ends with .svg, .png or .pdf"),
    ],
)
def test_bad_flags(
    flags: list[str], told: str, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parse(["--dataset", str(dataset), *flags])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_is_broken_off_is_told_as_far_as_it_came(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once a rate is done and another one begun, Ctrl-C leaves figures, a file and a plot."""
    rates: list[float] = []

    async def send(traffic: object, rate: float, seed: int, tally: Tally) -> None:
        rates.append(rate)
        tally.add(Sample(4, 2, 0.1, 0.2, (0.1,)))
        if len(rates) == 2:
            tally.add("UNAVAILABLE: gone")
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "send_as_they_arrive", send)
    out, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    flags = ["--dataset", str(dataset), "--rate", "4", "--sweep", "--total-within", "0.2"]
    assert bench.main([*flags, "--json", str(out), "--plot", str(drawn)]) == 130
    told = capsys.readouterr()
    assert "fleet, 4/s" in told.out and "fleet, 8/s" in told.out
    assert "the knee is at 4 requests/s" in told.out
    assert "1 x UNAVAILABLE: gone" in told.err and "broken off" in told.err
    assert [
        (one["rate"], one["samples"], one["failed"]) for one in json.loads(out.read_text())
    ] == [
        (4.0, 1, 0),
        (8.0, 1, 1),
    ]
    assert drawn.read_text().startswith("<?xml")


def test_figures_are_told_though_their_file_cannot_be_written(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def send(traffic: object, concurrency: int, tally: Tally) -> None:
        tally.add(Sample(4, 2, 0.1, 0.2, (0.1,)))

    monkeypatch.setattr(bench, "send_in_turn", send)
    assert bench.main(["--dataset", str(dataset), "--json", "/dev/full"]) == 1
    told = capsys.readouterr()
    assert "tokens/s" in told.out and bench.RULE in told.out
    assert "effuse bench: [Errno 28] No space left on device" in told.err


def test_a_plot_of_one_way_beside_another(tmp_path: Path) -> None:
    from effuse.cli.plots import plot

    runs = [Run("fleet", 1.0, [Sample(4, 2, 0.1, 0.2, (0.1,))]), Run("alone", 2.0, [])]
    plot(runs, tmp_path / "runs.svg")
    assert "between blocks, seconds" in (tmp_path / "runs.svg").read_text()
