"""An engine made from a worker's config answers like the oracle; a bad config is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import EOS_TOKEN_ID, write_tiny_checkpoint
from decoding.engines import make_request, oracle_settings
from oracle.decode import decode

from effuse.decode_worker.build import build, denoises_on_device
from effuse.worker.config import DecodeConfig
from effuse.worker.messages import Committed

PROMPT = tuple(range(20, 33))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dream") / "model"
    ends = (EOS_TOKEN_ID, EOS_TOKEN_ID + 2)
    return write_tiny_checkpoint(path, "dream", seed=3, eos_token_ids=ends)


def test_a_built_engine_answers(directory: Path) -> None:
    engine = build(DecodeConfig(model=directory, connector="zmq", page_size=8), "life-1")
    request = make_request("a", PROMPT, max_tokens=20)
    engine.core.handle(request)
    while engine.core.step():
        pass
    said = engine.core.outbox()
    engine.core.close()
    tokens = [token for event in said if isinstance(event, Committed) for token in event.token_ids]
    assert tuple(tokens) == decode(directory, PROMPT, oracle_settings(request)).token_ids


def test_rows_that_no_request_can_have_are_not_asked_for(directory: Path) -> None:
    """Four blocks are in flight at most, and a fifth behind them: here none is that long."""
    config = DecodeConfig(
        model=directory, dtype="float32", num_pages=8, max_model_len=16, max_num_batched_tokens=16
    )
    assert build(config, "life", connects=False).core.load().total_pages == 8


def test_ready_describes_the_model_and_its_pages(directory: Path) -> None:
    config = DecodeConfig(model=directory, num_pages=9, served_model_name="tiny")
    engine = build(config, "life-1", connects=False)
    engine.core.close()
    ready = engine.ready
    assert (ready.model.name, ready.model.architecture) == ("tiny", "dream")
    assert (ready.model.block_size, ready.model.max_model_len) == (4, 1024)
    assert (ready.page_size, ready.total_pages) == (16, 9)
    assert dict(ready.fingerprint)["prompt_attention"] == "bidirectional"
    assert engine.core.load().total_pages == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"max_model_len": 4096}, "the model's 1024 positions", id="length"),
        pytest.param(
            {"max_num_batched_tokens": 7}, "--max-num-batched-tokens: .* 20, .* 7", id="budget"
        ),
        # Every request that leaves the window out would be refused for its default.
        pytest.param({"max_window": 3}, "max-window: expected at least 4, .* got 3", id="window"),
        pytest.param({"max_num_batched_tokens": 19}, "expected at least 20, .* 19", id="rows"),
        pytest.param({"max_stop_ids": 1}, "max-stop-ids: expected at least 2, .* 1", id="stops"),
    ],
)
def test_a_bad_config_is_named(directory: Path, changes: dict[str, int], said: str) -> None:
    config = DecodeConfig(model=directory, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        build(config, "life-1")


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {}, True),
        ("cpu", {}, False),
        ("cuda", {"enforce_eager": True}, False),
        ("cuda", {"attention": "flex"}, False),
        ("cuda", {"kv_layout": "distinct"}, True),
    ],
)
def test_a_gpu_denoises_by_itself_unless_told_otherwise(
    device: str, changes: dict[str, object], expected: bool
) -> None:
    config = DecodeConfig(**changes)  # type: ignore[arg-type]
    assert denoises_on_device(config, torch.device(device)) == expected
