"""`effuse bench` reads datasets and flags strictly and prints its results, interrupted or not."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from effuse.cli import bench
from effuse.cli.__main__ import main
from effuse.cli.dataset import read_items, too_long
from effuse.cli.figures import Run, Sample, ServiceGoals
from effuse.cli.load import Tally, parse
from effuse.config.flags import BadInput, CommandError
from effuse.protos.errors import Unavailable


def test_a_dataset_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {n}", "answer": "1"}) for n in range(3)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines))
    items = read_items(path)
    assert [one.prompt for one in items] == ["question 0", "question 1", "question 2"]
    assert [(one.name, one.answer) for one in items][1:] == [("line 2", "1"), ("line 3", "1")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected one JSON object per line, found none"),
        ('{"prompt": "a"}\nnot json', ":2: expected a JSON object, got 'not json'"),
        (f'{{"prompt": "a", "answer": {"9" * 5000}}}', ":1: expected a JSON object, got"),
        ('{"question": "a"}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": ""}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": "\\ud800"}', ':1: expected {"prompt": "..."}'),
        ("[1]", ':1: expected {"prompt": "..."}'),
    ],
)
def test_a_bad_dataset_names_its_line(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput) as refused:
        read_items(path)
    assert told in str(refused.value)


def test_a_dataset_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="expected UTF-8 text"):
        read_items(path)


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', newline="")
    assert [one.prompt for one in read_items(path)] == ["a\u2028b", "c"]


def test_a_mark_at_the_beginning_and_lines_without_text_are_no_items(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "c"}\n \n')
    assert [(one.name, one.prompt) for one in read_items(path)] == [
        ("line 1", "a"),
        ("line 3", "c"),
    ]


def test_a_knob_that_the_baselines_lack_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--window", "2"]
    assert parse(flags).baseline
    with pytest.raises(SystemExit):
        parse([*flags, "--temperature", "0.5", "--stop-token-id", "3"])
    assert "got also --stop-token-id, --temperature" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--model-dir", str(tmp_path)]
    assert main(["bench", *flags]) == 2
    assert f"effuse bench: {tmp_path} has no tokenizer.json" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fleet runs beside these tests, and a port that is free may be another test's later."""

    def look(*_: object) -> None:
        raise Unavailable("no router answers")

    monkeypatch.setattr(bench, "look", look)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return path


def test_flags_of_a_sweep(dataset: Path, tmp_path: Path) -> None:
    flags = ["--dataset", str(dataset), "--limit", "5", "--rate", "2", "--sweep"]
    goals = ["--total-within", "3", "--gap-within", "0.5", "--plot", str(tmp_path / "a.svg")]
    job = parse([*flags, *goals])
    assert job.traffic.prompts == ("a", "b", "a", "b", "a")
    assert (job.rate, job.sweep, job.goals) == (2.0, True, ServiceGoals(gap_s=0.5, total_s=3.0))
    assert math.isinf(job.goals.first_block_s)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rate", "0"], "expected a number in (0, infinity), got 0"),
        (["--sweep", "--rate", "1"], "--sweep: expected --rate and an objective"),
        (["--sweep", "--total-within", "1"], "--sweep: expected --rate and an objective"),
        (["--d2f-repo", "."], "--d2f-repo: expected together with --baseline"),
        (["--model-dir", "."], "--model-dir: expected together with --baseline"),
        (["--adapter", "."], "--adapter: expected together with --baseline"),
        (["--scorer", "humaneval"], "--scorer humaneval: expected --run-model-code"),
        (["--gap-within", "0"], "--gap-within: expected a number above 0, at most 3600"),
        (["--plot", "figures.txt"], "expected a name that ends with .svg, .png or .pdf"),
    ],
)
def test_bad_flags(
    flags: list[str], told: str, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--dataset", str(dataset), *flags])
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
    assert "1 x UNAVAILABLE: gone" in told.err and "stopped early" in told.err
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
    from effuse.cli.figures import plot

    runs = [Run("fleet", 1.0, [Sample(4, 2, 0.1, 0.2, (0.1,))]), Run("alone", 2.0, [])]
    plot(runs, tmp_path / "runs.svg")
    assert "between blocks, seconds" in (tmp_path / "runs.svg").read_text()


def test_each_row_is_printed_once_it_is_measured_and_ctrl_c_keeps_what_there_is(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Broken off in the third row: the first is whole, the second has failed, of the third one
    answer is there."""
    printed: list[str] = []

    def whole(tally: Tally) -> None:
        tally.add(Sample(8, 4, 0.1, 0.2, prompt=0, text="36"))
        tally.add(Sample(8, 4, 0.1, 0.2, prompt=1, text="no"))

    def fails(tally: Tally) -> None:
        printed.append(capfd.readouterr().out)
        raise CommandError("no such module")

    def broken_off(tally: Tally) -> None:
        tally.add(Sample(4, 2, 0.1, 0.2, prompt=1, text="7"))
        raise KeyboardInterrupt

    def rows(*_: object) -> list[tuple[str, Callable[[Tally], None]]]:
        return [("first", whole), ("second", fails), ("third", broken_off)]

    monkeypatch.setattr(bench, "load_rivals", lambda _: Mock(described=lambda: "a rival, 1 thread"))
    monkeypatch.setattr(bench, "ways", rows)
    dataset.write_text('{"prompt": "a", "answer": "36"}\n{"prompt": "b", "answer": "7"}\n')
    out = tmp_path / "out.json"
    flags = ["--dataset", str(dataset), "--baseline", "--scorer", "gsm8k", "--json", str(out)]
    assert bench.main(flags) == 130
    assert "set.jsonl, 2 prompts, 8 at a time" in printed[0]
    assert "a rival, 1 thread" in printed[0]
    assert re.search(r"first +0\.\d\d \(1\.0x\) +\d+\.\d\d \(1\.0x\) .* 50\.0 %", printed[0])
    told = capfd.readouterr()
    assert "second: no such module" in told.err and "stopped early" in told.err
    assert re.search(r"third +1 +0", told.out)
    rows_of_file = json.loads(out.read_text())
    assert [(one["name"], one["samples"]) for one in rows_of_file] == [("first", 2), ("third", 1)]
    assert rows_of_file[0]["accuracy"] == 0.5 and rows_of_file[1]["accuracy"] is None
    assert [one["is_right"] for one in rows_of_file[0]["answers"]] == [True, False]


def test_a_sweep_that_is_broken_off_in_its_baseline_has_no_verdict(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken_off(tally: Tally) -> None:
        tally.add(Sample(4, 2, 0.1, 0.2, prompt=0, text="7"))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "load_rivals", lambda _: Mock(described=lambda: "a rival"))
    monkeypatch.setattr(bench, "ways", lambda *_: [("first", broken_off)])
    flags = ["--baseline", "--sweep", "--rate", "1", "--total-within", "5"]
    assert bench.main(["--dataset", str(dataset), *flags]) == 130
    assert "stopped early" in capfd.readouterr().err


def test_broken_off_before_anything_was_measured(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def send(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "send_in_turn", send)
    assert bench.main(["--dataset", str(dataset)]) == 130
    assert "stopped before the first measurement" in capsys.readouterr().err


def test_a_dataset_without_what_a_scorer_needs_is_refused(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--dataset", str(dataset), "--scorer", "gsm8k"]) == 2
    assert '--scorer gsm8k: line 1: expected an "answer" with a number' in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    lines = [json.dumps({"prompt": "a", "task_id": f"T/{number}"}) for number in range(12)]
    path.write_text("\n".join(lines))
    items = [one.name for one in read_items(path)]
    assert too_long(items, [True] * 12, "512 tokens") == ""
    assert too_long(items, [at % 2 == 0 for at in range(12)], "512 tokens") == (
        "6 of 12 prompts do not fit 512 tokens; they count as failed: T/1, T/3, T/5, T/7, T/9, T/11"
    )
    assert too_long(items, [False] * 12, "9 tokens").endswith("T/6, T/7 and 4 more")


def test_ctrl_c_in_a_terminal_keeps_the_row_that_is_whole(tmp_path: Path) -> None:
    """As a process, in the middle of the second row."""
    path, out = tmp_path / "set.jsonl", tmp_path / "out.json"
    path.write_text("".join(f'{{"prompt": "How much is {n} + {n}?"}}\n' for n in range(40)))
    flags = ["--baseline", "--concurrency", "1", "--max-tokens", "176", "--json", str(out)]
    nobody = ["--target", "127.0.0.1:1"]
    command = [sys.executable, "-m", "effuse.cli", "bench", "--dataset", str(path), *nobody, *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("base model"):
                child.send_signal(signal.SIGINT)
                break
        told = child.communicate(timeout=120)[0]
    finally:
        child.kill()
    assert child.returncode == 130
    assert "tokens/s" in told
    assert json.loads(out.read_text())[0]["samples"] == 40


def test_answers_to_humaneval_are_run_once_a_row_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = 'def one() -> int:\n    """ The number one."""\n'
    fields = {"test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"}
    lines = [{"task_id": f"T/{n}", "prompt": stub, **fields} for n in range(2)]
    dataset = tmp_path / "set.jsonl"
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def send(traffic: object, concurrency: int, tally: Tally) -> None:
        tally.add(Sample(4, 2, 0.1, 0.2, prompt=0, text="    return 1\n"))
        tally.add(Sample(4, 2, 0.1, 0.2, prompt=1, text="    return 2\n"))

    monkeypatch.setattr(bench, "send_in_turn", send)
    flags = ["--dataset", str(dataset), "--scorer", "humaneval"]
    assert bench.main([*flags, "--run-model-code"]) == 0
    assert " 50.0 %\n" in capsys.readouterr().out
    monkeypatch.setattr(bench, "works", lambda: False)
    assert main(["bench", *flags, "--run-model-code"]) == 2
    assert "a sandboxed Python program cannot run" in capsys.readouterr().err
