"""`effuse plan` from files, from a router's plans, and with wrong inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.looked_at import router

from effuse.cli.__main__ import main

TIMES = {
    "prompts": [{"tokens": 1000, "seconds": 0.05}],
    "answers": [
        {"batch": 1, "tokens_per_second": 640, "gap_s": 0.04},
        {"batch": 8, "tokens_per_second": 2560, "gap_s": 0.07},
        {"batch": 64, "tokens_per_second": 3840, "gap_s": 0.4},
    ],
}
LOAD = ("--rate", "30", "--prompt", "1000", "--output", "128")


@pytest.fixture
def times(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"times": TIMES}))
    return str(path)


def test_a_plan_of_measured_times_and_a_given_load(
    times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--times", times, *LOAD, "--workers", "6", "--gap-within", "0.08"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the plan:",
        "  load: 30 requests a second with prompts of 1,000 tokens and answers of 128",
        "  a worker computes a prompt in 50 ms: 20 a second",
        "  a decode worker answers 20 requests a second in batches of 8, with gaps of 70 ms, "
        "within 80 ms",
        "  decode workers compute no prompts, because 50 ms in one forward would lengthen gaps too "
        "much",
        "  3 prefill and 3 decode workers sustain 60 requests a second",
        "  the load needs 2 prefill and 2 decode workers, which sustain 40 requests a second",
    ]


def test_a_written_plan_is_read_again(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--json", "--gap-ratio", "2", "--first-block-within", "2", "--times"]
    assert main([*asked, times, *LOAD, "--workers", "4"]) == 0
    written = capsys.readouterr().out
    Path(times).write_text(written)
    assert main(["plan", "--json", "--times", times]) == 0
    assert capsys.readouterr().out == written
    assert main(["plan", "--json", "--times", times, "--rate", "300"]) == 0
    (more,) = json.loads(capsys.readouterr().out)
    assert more["workload"] == {"rate": 300.0, "prompt": 1000.0, "answer": 128.0}
    assert more["objectives"] == {"first_block_s": 2.0, "gap_s": None, "gap_ratio": 2.0}
    assert more["desired"]["prefill"] > 10 and more["desired"]["decode"] > 10


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "Input data was truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "expected at least one plan, got an empty list"),
        (b"[" * 100_000, ""),
        (b'{"prompts": []}', "missing required field `times`"),
        (b'{"times": {"prompts": [{"tokens": 0, "seconds": 1}]}}', "times.prompts[0].tokens"),
        (b'{"times": {"answers": [{"batch": 1}]}}', "tokens_per_second"),
        (b'{"times": {"answers": [], "prompt": []}}', "unknown field `prompt`"),
        (b'{"times": {"prompts": [{"tokens": 1, "seconds": NaN}]}}', "malformed"),
        (b'{"times": {}}', "at least one entry in prompts and one in answers"),
        (b'{"times": {}, "mode": "both"}', "mode"),
        (json.dumps({"times": TIMES}).encode(), "--rate, --prompt, --output: expected"),
    ],
)
def test_a_bad_file_is_one_line(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    assert main(["plan", "--times", str(path)]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("effuse plan: ") and error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rate", "-1"], "argument --rate: expected a number in [0"),
        (["--rate", "nan"], "argument --rate"),
        (["--prompt", "0"], "argument --prompt"),
        (["--workers", "0"], "argument --workers"),
        (["--gap-ratio", "0.5"], "argument --gap-ratio"),
    ],
)
def test_a_bad_flag_is_refused(
    flags: list[str], told: str, times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--times", times, *LOAD, *flags])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_load_that_no_number_of_workers_bears(
    times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "1e9", "--prompt", "1e6", "--output", "1e6")
    assert main(["plan", "--times", times, *load]) == 1
    assert capsys.readouterr().err == (
        "effuse plan: --rate 1,000,000,000: it needs more than 1,048,576 workers, the most that a "
        "plan has\n"
    )


def test_a_model_that_a_file_does_not_have_is_refused_with_those_that_it_has(
    times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sheets = [{"times": TIMES, "model": name} for name in ("b", "a")]
    Path(times).write_text(json.dumps(sheets))
    assert main(["plan", "--times", times, *LOAD, "--model", "foo"]) == 1
    assert capsys.readouterr().err == (
        f"effuse plan: --model: expected a model of {times} ('a', 'b'), got 'foo'\n"
    )


def test_a_router_s_plans_are_shown_as_it_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as target:
        assert main(["plan", "--target", target]) == 0
        assert capsys.readouterr().out == (
            "large:\n  as the router has it\n\nnew:\n  no plan yet: too few requests\n"
        )
        assert main(["plan", "--model", "large", "--json", "--target", target]) == 0
        (sheet,) = json.loads(capsys.readouterr().out)
    assert sheet["workers"] == 6 and sheet["roles"]["prefill"] == 3
    assert sheet["times"]["answers"][1]["tokens_per_second"] == 2560.0


def test_flags_replace_parts_of_a_router_s_load(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as target:
        at = ("--target", target)
        assert main(["plan", "--model", "large", "--prompt", "3000", *at]) == 0
        shown = capsys.readouterr().out
        assert "prompts of 3,000 tokens and answers of 128" in shown
        assert "4 prefill and 2 decode workers" in shown
        assert main(["plan", "--model", "none", *at]) == 1
        assert "expected a model that had requests, got 'none'" in capsys.readouterr().err
        assert main(["plan", "--model", "new", "--rate", "3", *at]) == 1
        assert "once it has answered some requests" in capsys.readouterr().err


def test_a_router_that_is_away_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target", "127.0.0.1:1", "--timeout", "5"]) == 1
    assert "effuse plan: UNAVAILABLE: no router answers" in capsys.readouterr().err
