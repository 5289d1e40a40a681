"""The prefill benchmark on a tiny model: its rival computes the same K and V; it runs whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from auditing import audit

from effuse.benchmarks import gpu_prefill
from effuse.benchmarks.gpu_models import TINY, random_model
from effuse.benchmarks.gpu_prefill import Bench, compute, forget
from effuse.benchmarks.prefill_rivals import PlainPrefill

CPU = torch.device("cpu")


def test_plain_pytorch_computes_what_the_engine_computes() -> None:
    torch.set_num_threads(1)
    bench = Bench("tiny", CPU, 200)
    messages = bench._messages(2, 70)
    compute(bench.engine, messages)
    pages = {name: prompt.pages for name, prompt in bench.engine.table.prompts.items()}
    handoffs = bench.engine._sender._handoffs.values()
    states = [handoff.boundary() for handoff in handoffs if handoff.boundary is not None]
    hidden = [state.hidden for state in states if state is not None]
    token_ids = torch.tensor([message.prompt_token_ids for message in messages])
    stored, last = PlainPrefill(bench.model, 2, 70).run(token_ids)
    for row, message in enumerate(messages):
        held = [page.page_id for page in pages[message.attempt.transfer_id]]
        for layer, expected in zip(bench.paged.memory.layers(), stored, strict=True):
            for pages_kv, kv in zip(layer, expected, strict=True):
                found = pages_kv[held].transpose(0, 1).flatten(1, 2)[:, :70]
                torch.testing.assert_close(found, kv[row])
        boundary = torch.frombuffer(bytearray(hidden[row] or b""), dtype=torch.float32)
        torch.testing.assert_close(boundary, last[row])
    forget(bench.engine, messages)
    audit(bench.engine)
    assert bench.engine.load().free_pages == bench.paged.memory.num_pages
    bench.engine.close()


def test_a_shape_is_drawn_alike_each_time() -> None:
    one, other = (random_model(TINY, CPU, torch.float32).weights for _ in range(2))
    assert torch.equal(one.layers[1].down, other.layers[1].down)


def test_the_command_measures_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_prefill, "CASES", ((1, 40, 2), (3, 70, 2)))
    path = tmp_path / "out" / "prefill.json"
    assert gpu_prefill.main(["--model", "tiny", "--profile", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["prompts"], r["length"]) for r in results] == [(1, 40), (3, 70)]
    for result in results:
        assert result["ratio"] == result["engine_ms"] / result["floor_ms"]
        assert min(result["engine_ms"], result["forward_ms"], result["plain_ms"]) > 0
    assert "3 x 70" in capsys.readouterr().out
