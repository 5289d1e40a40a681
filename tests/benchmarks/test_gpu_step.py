"""The step's benchmark on a tiny model: the same steps twice, and requests that are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from effuse.benchmarks import gpu_step
from effuse.benchmarks.gpu_floor import Floor
from effuse.benchmarks.gpu_models import TINY, random_model
from effuse.benchmarks.gpu_serve import HandedOver, replacing
from effuse.benchmarks.gpu_step import Bench
from effuse.benchmarks.gpu_timing import Call, Marks, Stamp
from effuse.models.part import Part
from effuse.models.transformer import Transformer

CPU = torch.device("cpu")
CONTEXT = 32


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    return Bench("tiny", CPU, 2, CONTEXT)


def test_products_in_turns_are_those_of_the_rows_that_the_steps_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    asked: list[tuple[int, int]] = []
    forward, replay = Transformer.forward_unfinished, Floor.replay

    def watch(self: Transformer, token_ids: torch.Tensor, *rest: Any) -> None:
        ran.append(len(token_ids))
        forward(self, token_ids, *rest)

    def note(self: Floor, num_rows: int, num_head_rows: int) -> Call:
        asked.append((num_rows, num_head_rows))
        return replay(self, num_rows, num_head_rows)

    monkeypatch.setattr(Transformer, "forward_unfinished", watch)
    monkeypatch.setattr(Floor, "replay", note)
    result = bench.measure(2, CONTEXT, 4, 10, 4)
    assert [rows for rows, _ in asked] == ran[-10:], "the last ten steps were those in turns"
    assert len(set(asked)) > 1, "steps differ, or this shows nothing"
    assert (result.strayed, result.waits) == (0, 0)
    assert result.rows == np.mean([rows for rows, _ in asked])
    assert result.candidates == np.mean([masks for _, masks in asked])
    assert (result.alone.num_steps, result.turns.num_steps) == (10, 10)
    assert len(result.turns.step_ms) == 3
    assert result.ratio == result.turns.ratio
    assert result.alone.rows >= result.rows and result.alone.candidates >= result.candidates


def test_requests_end_one_after_the_other_and_are_replaced(bench: Bench) -> None:
    found = bench.arrivals(2, CONTEXT, 1, 16, 32)
    assert found.joined >= 1 and found.joined_profiled >= 1
    assert found.run.num_steps <= 32
    assert found.run.captures == 0 and found.waits == {}, "there is no device"


def test_lengths_of_requests_that_are_replaced() -> None:
    messages = replacing(TINY, 6, 4, CONTEXT, 4, 128)
    assert [message.stopping.max_tokens for message in messages] == [32, 64, 96, 128, 128, 128]
    assert all(len(message.prompt_token_ids) == CONTEXT for message in messages)
    assert len({message.attempt.transfer_id for message in messages}) == 6
    assert replacing(TINY, 3, 3, CONTEXT, 4, 2)[0].stopping.max_tokens == 1


def test_a_prompt_that_was_handed_over_brings_its_boundary() -> None:
    forward = HandedOver(random_model(TINY, CPU, torch.float32), CONTEXT)
    part = Part(token_ids=[0], start=0, pages=[0], num_stored=1, block_origin=0)
    results = forward.run([part, part])
    shapes = [None if each.boundary is None else each.boundary.shape for each in results]
    assert shapes == [(TINY.hidden_size,)] * 2


def test_idle_is_the_time_between_steps() -> None:
    def at(ms: float) -> Stamp:
        stamp = Stamp(CPU)
        stamp._host_s = ms / 1e3
        return stamp

    marks = Marks([at(10), at(32), at(50)], [at(30), at(45), at(60)])
    assert marks.idle_share == pytest.approx((2 + 5) / 50)


def test_the_command_measures_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_step, "BATCHES", ((1, 2, 1), (2, 2, 2), (64, 1, 1)))
    path = tmp_path / "out" / "step.json"
    asked = ["--model", "tiny", "--context", str(CONTEXT), "--batch", "1", "--batch", "2"]
    assert gpu_step.main([*asked, "--arrivals", "8", "--profile", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    found = [(result["kind"], result["batch"]) for result in results]
    assert found == [("Result", 1), ("Arrivals", 1), ("Result", 2), ("Arrivals", 2)]
    assert (tmp_path / "out" / "profile_tiny_1.txt").exists()
    said = capsys.readouterr().out
    assert "waits a step: none" in said and "every product by linear" in said
    with pytest.raises(SystemExit):
        gpu_step.main([*asked, "--arrivals", "641"])
