"""Progress is logged occasionally and at the end, in its own units, with a given clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import write_tiny_checkpoint

from effuse.models.progress import EVERY_S, progress_log
from effuse.models.weights import load_model


def test_a_line_at_most_every_so_often_and_one_at_the_end() -> None:
    at, said = [0.0], list[str]()
    with progress_log(
        "weights", 8e9, unit="GB", per_unit=1e9, now=lambda: at[0], log=said.append
    ) as add:
        for _ in range(64):  # binary fractions, so that sums are exact
            at[0] += EVERY_S / 16
            add(1.25e8)
    assert said == [
        "weights: 2 of 8 GB after 2 s",
        "weights: 4 of 8 GB after 4 s",
        "weights: 6 of 8 GB after 6 s",
        "weights: 8 of 8 GB after 8 s",
        "weights: all 8 GB after 8.0 s",
    ]


def test_what_is_quick_has_one_line_and_what_fails_none() -> None:
    said: list[str] = []
    with progress_log("graphs", 3, now=lambda: 0.0, log=said.append) as add:
        add(1)
    assert said == ["graphs: all 3 after 0.0 s"]
    with pytest.raises(OSError), progress_log("graphs", 3, now=lambda: 0.0, log=said.append):
        raise OSError
    assert len(said) == 1


def test_loading_counts_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_checkpoint(tmp_path, "dream")
    done: list[float] = []
    totals: list[float] = []

    @contextmanager
    def counting(what: str, total: float, **others: object) -> Iterator[Callable[[float], None]]:
        totals.append(total)
        yield done.append

    monkeypatch.setattr("effuse.models.weights.progress_log", counting)
    load_model(path)
    assert len(done) > 20 and sum(done) == totals[0] > 1000


def test_a_worker_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "effuse.models.progress"):
        load_model(write_tiny_checkpoint(tmp_path, "sdar"))
    (line,) = caplog.messages
    assert line.startswith("weights: all ") and " GB after " in line
