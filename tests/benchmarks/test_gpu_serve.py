"""The serving benchmark on a tiny model: its script, its lengths, and that it counts rightly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from effuse.benchmarks import gpu_serve
from effuse.benchmarks.gpu_engines import decode_engine, paged
from effuse.benchmarks.gpu_lengths import read_lengths
from effuse.benchmarks.gpu_load import ClosedLoad, requests
from effuse.benchmarks.gpu_models import TINY, random_model
from effuse.benchmarks.gpu_pace import LEAST, MEAN, MOST
from effuse.benchmarks.gpu_serve import Bench, HandedOver
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_stepper import make_stepper
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.step_slots import Column, RecordColumn

CPU = torch.device("cpu")
LENGTHS = [5, 40, 70, 12, 33, 64]


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    return Bench(random_model(TINY, CPU, torch.float32), 4, max(LENGTHS), 1e12)


@pytest.mark.parametrize("window", [2, 4])
def test_every_step_of_a_request_takes_what_the_script_gives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    written: list[int] = []
    read = bench.stepper.read

    def watch() -> Integers:
        records = read()
        stepped = records[records[:, RecordColumn.STEPPED] == 1]
        # The end of an answer, with fewer masks than the script's tokens, proves nothing.
        many = stepped[stepped[:, Column.NUM_MASKS] > MOST]
        written.extend(many[:, RecordColumn.NUM_WRITTEN].tolist())
        return records

    monkeypatch.setattr(bench.stepper, "read", watch)
    result = bench.measure("x", LENGTHS, window)
    assert set(written) == set(range(LEAST, MOST + 1))
    assert np.mean(written) == pytest.approx(MEAN, abs=0.15)
    assert result.tokens_per_forward == pytest.approx(MEAN, abs=0.25)
    assert bench.paged.memory.num_pages > 0


def test_it_counts_the_products_that_the_requests_need(bench: Bench) -> None:
    """A window of 1 has a block in flight and at times a settled one."""
    result = bench.measure("x", LENGTHS, 1)
    size = TINY.block_size
    assert result.requests == len(LENGTHS)
    assert size <= result.rows <= 2 * size * len(LENGTHS)
    assert result.prompt_len == np.mean(LENGTHS)
    assert 0 < result.first_block_s[0] <= result.latency_s[0] <= result.latency_s[1]
    assert result.prefill_forwards >= 1


def test_the_command_serves_every_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_serve, "MAX_TOKENS", 40)
    dataset = tmp_path / "few.json"
    dataset.write_text(json.dumps(LENGTHS))
    path = tmp_path / "serve.json"
    asked = ["--model", "tiny", "--dataset", str(dataset), "--requests", "8", "--json", str(path)]
    assert gpu_serve.main([*asked, "--shape", "32x2", "--shape", "16x2"]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["block_size"], r["window"]) for r in results] == [(32, 2), (16, 2)]
    assert all(r["dataset"] == "few" and r["requests"] == 8 for r in results)
    assert "characters / 3.6" in capsys.readouterr().out


def test_lengths_of_texts_and_of_lists(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": "x" * n}) for n in (1, 36, 37)) + "\n")
    assert read_lengths(texts) == [1, 10, 11]
    listed = tmp_path / "listed.json"
    listed.write_text("[3, 4]")
    assert read_lengths(listed) == [3, 4]
    listed.write_text("[]")
    with pytest.raises(ValueError, match="expected prompt lengths above 0"):
        read_lengths(listed)


def test_one_engine_after_the_other_steps_by_the_same_stepper() -> None:
    model = random_model(TINY, CPU, torch.float32)
    parts = paged(model, 2048, page_size=32)
    limits = DecodeLimits(
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        max_model_len=160,
        num_pages=parts.memory.num_pages,
        page_size=32,
        block_size=TINY.block_size,
    )
    stepper = make_stepper(model, parts.memory.layer_views(), limits)
    steps = []
    for _ in range(2):
        engine = decode_engine(parts, limits, stepper, HandedOver(model, 8))
        load = ClosedLoad(engine, requests(TINY, [8] * 8, 1, 128), most=0)
        load.begin(range(0, 16, 2))
        while not load.is_done and engine.counters.steps < 1000:
            load.step()
        assert load.is_done
        steps.append(engine.counters.steps)
    assert steps[0] == steps[1]
