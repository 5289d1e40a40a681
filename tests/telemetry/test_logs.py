"""Log lines: figures beside a message, for people and as JSON, whatever happens in the process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from effuse.telemetry.logs import Figures, JsonLines, TextLines, figures

PROGRAM = """
import logging, sys, threading, warnings
from effuse.telemetry import logs
logs.set_up("decode", "info", "json")
log = logging.getLogger("a.b")
log.info("two\\nlines, %s", "told", extra=logs.figures({"tokens": 3, "time": "mine"}))
try:
    raise ValueError("logged")
except ValueError:
    log.exception("it failed")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("uncaught")
"""


def record(extra: Figures, message: str = "done") -> logging.LogRecord:
    return logging.getLogger("x").makeRecord(
        "x", logging.INFO, "", 0, message, (), None, extra=figures(extra)
    )


def test_every_line_of_a_process_is_an_object() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["level"] for one in said] == ["info", "error", "warning", "critical", "critical"]
    assert {one["process"] for one in said} == {"decode"}
    first = said[0]
    assert (first["message"], first["tokens"], first["logger"]) == ("two\nlines, told", 3, "a.b")
    assert first["time"].endswith("+00:00")
    assert "careful" in said[2]["message"]
    for one, text in zip(
        (said[1], *said[3:]), ("ValueError: logged", "ZeroDivisionError", "KeyError"), strict=True
    ):
        assert text in one["exception"] and one["exception"].startswith("Traceback")


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.123456, "0.1235"), (12, "12"), ("p0", "p0"), ("", '""'), ('a "b"', r'"a \"b\""')],
)
def test_people_read_figures_behind_the_message(value: str | int | float, told: str) -> None:
    line = TextLines("router").format(record({"one": value, "two": 2}))
    assert line.endswith(f" router x: done one={told} two=2")


def test_what_json_does_not_know_is_told_as_text() -> None:
    told = json.loads(JsonLines("router").format(record({"where": "é"}, "at %s" % {1, 2})))
    assert (told["where"], told["message"]) == ("é", "at {1, 2}")
