"""The parts of an engine: the forward that measures its memory, and forwards that show life."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpoints import TinySizes, write_tiny_checkpoint
from decoding.engines import layout_of, load_tiny

from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import KVPart, mismatch
from effuse.models.runner import ModelRunner
from effuse.placement.records import Role
from effuse.worker import rank_part
from effuse.worker.assembly import assemble
from effuse.worker.config import WorkerConfig
from effuse.worker.connectors import _check_reservable
from effuse.worker.engine_settings import Dtype
from effuse.worker.messages import Heartbeat
from effuse.worker.rank_part import warm_up
from effuse.worker.watchdog import Pulse


@pytest.mark.parametrize("num_rows", [4, 24, 25, 60])
def test_rows_to_warm_up_with_stay_within_the_models_positions(
    tmp_path: Path, num_rows: int
) -> None:
    """On a GPU a row beyond would read past the rotary table, without any error."""
    path = write_tiny_checkpoint(tmp_path, "dream", sizes=TinySizes(max_positions=24))
    model = load_tiny(path)
    memory = PageMemory(layout_of(model, 16), num_pages=1)
    runner = ModelRunner(model, memory.layer_views(), page_size=16, block_size=4)
    warm_up(runner, 24, num_rows)
    is_written = memory.tensor.abs().sum((0, 1, 2, 3, 4, 6)) > 0
    assert is_written.tolist() == [True, *[False] * 15]


def test_a_rotary_table_is_no_longer_than_what_is_served(tmp_path: Path) -> None:
    """A table of all positions would take 69 GB."""
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=TinySizes(max_positions=2**31 - 1))
    config = WorkerConfig(
        model=path, device="cpu", num_pages=40, max_model_len=600, max_num_batched_tokens=64
    )
    parts = assemble(config, "life-1", "decode", None, Pulse())
    assert parts.max_model_len == parts.model.config.max_position_embeddings == 600
    warm_up(parts.runner, 604, 604)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_layer_of_a_forward_is_a_sign_of_life(tmp_path: Path, role: Role) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    told: list[Heartbeat] = []
    hours = count(step=3600.0)
    # each layer takes long enough to be reported
    pulse = Pulse(told.append, now=lambda: next(hours))
    config = WorkerConfig(model=path, device="cpu", num_pages=4)
    parts = assemble(config, "life-1", role, None, pulse)
    assert [beat.marks for beat in told] == list(range(1, parts.model.config.num_layers + 1))
    warm_up(parts.runner, parts.max_model_len, 8)
    assert len(told) == 2 * parts.model.config.num_layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_layers_that_a_decode_worker_waits_for_are_signs_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_part, "_announce_compiling", lambda *_: None)  # for the whole process
    sizes = TinySizes(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32)
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=sizes)
    told: list[Heartbeat] = []
    hours = count(step=3600.0)
    pulse = Pulse(told.append, now=lambda: next(hours))
    config = WorkerConfig(model=path, device="cuda", num_pages=8, enforce_eager=True)
    parts = assemble(config, "life-1", "decode", None, pulse)
    assert parts.queued is not None

    def marks() -> int:
        assert parts.queued is not None
        torch.cuda.synchronize()  # a forward waits for its candidates only
        parts.queued.look()
        return told[-1].marks

    before = marks()
    assert before == parts.model.config.num_layers + 1  # of the first forward; it also drew
    warm_up(parts.runner, parts.max_model_len, 8)
    assert marks() == 2 * before


@pytest.mark.parametrize("connector", ["nixl", "zmq"])
def test_pages_leave_in_as_many_groups_as_the_connector_gains_from(
    tmp_path: Path, connector: Literal["nixl", "zmq"]
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=TinySizes(num_layers=16))
    config = WorkerConfig(model=path, device="cpu", num_pages=4, connector=connector)
    parts = assemble(config, "life-1", "prefill", None, Pulse(lambda _: None))
    assert parts.memory.layout.num_groups == {"nixl": 8, "zmq": 16}[connector]


@pytest.mark.parametrize(
    ("page_size", "max_model_len", "told"),
    [
        (1 << 20, None, "--page-size: expected at most 699050, .* takes 402653184"),
        (1, None, "--page-size: expected at least 2, .* a lower --max-model-len"),
        (1, 1 << 16, None),
    ],
)
def test_pages_that_no_reservation_can_name_are_refused_at_the_start(
    tmp_path: Path, page_size: int, max_model_len: int | None, told: str | None
) -> None:
    """A front counts an engine that reports them as broken, and replaces it at every request."""
    config = WorkerConfig(
        model=write_tiny_checkpoint(tmp_path, "sdar", sizes=TinySizes(max_positions=100_000)),
        device="cpu",
        num_pages=1,
        page_size=page_size,
        max_model_len=max_model_len,
    )
    parts = assemble(config, "life-1", "decode", None, Pulse())
    if told is None:
        parts.connect().close()
        return
    with pytest.raises(ValueError, match=told):
        parts.connect()


def test_pages_that_ranks_write_for_a_cut_context_are_limited_too() -> None:
    """A reservation counts the writer's pages, of which a page of the pool has several."""
    layout = KVLayout("unified", 1, 1, 4, 1, "float32", held=KVPart(0, 1, 0, 1, 0, 2))
    _check_reservable(layout, 1 << 16)
    with pytest.raises(ValueError, match="--page-size: expected at least 2"):
        _check_reservable(layout, (1 << 16) + 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_offloading_size": 1e-9}, "--kv-offloading-size: expected room for 1 pages of "),
        (
            {"kv_offloading_size": 1e-6, "page_size": 2},
            "--kv-offloading-size: expected room for 2 pages of ",
        ),
        (
            {"kv_offloading_size": 1e-5, "kv_unit_tokens": 64},
            "--kv-offloading-size: expected room for 4 pages of ",
        ),
        ({"kv_offloading_size": 1e6}, "--kv-offloading-size 1e.06: .*memory"),
        ({"kv_offloading_size": 1e30}, "--kv-offloading-size 1e.30: .*too large"),
        ({"kv_offloading_dir": Path("/dev/null/kv")}, "--kv-offloading-dir: .*Not a directory"),
    ],
)
def test_places_for_kept_kv_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    config = WorkerConfig(
        model=path, device="cpu", num_pages=4, **{"kv_offloading_size": 0.01, **changes}
    )
    with pytest.raises(ValueError, match=told):
        assemble(config, "life-1", "decode", None, Pulse())


def test_a_pool_for_which_the_machine_has_no_memory_is_refused_by_its_flag(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    for page_size in (1 << 30, 1 << 60):
        config = WorkerConfig(model=path, device="cpu", num_pages=1 << 20, page_size=page_size)
        with pytest.raises(ValueError, match=r"--num-pages: 1048576 pages of \d+ bytes: "):
            assemble(config, "life-1", "decode", None, Pulse())


def test_a_missing_package_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effuse.kvtransfer.mooncake_pool.find_spec", lambda _: None)
    config = WorkerConfig(
        model=tmp_path, device="cpu", kv_offloading_size=0.01, kv_pool="mooncake://localhost:1"
    )
    with pytest.raises(ValueError, match=r"--kv-pool: mooncake is needed: .*pip install"):
        assemble(config, "life-1", "decode", None, Pulse())


def test_files_of_another_model_are_not_found(tmp_path: Path) -> None:
    """Nor those of another size of pages or blocks."""
    for seed, page_size, block_size in ((1, 16, 4), (2, 16, 4), (1, 8, 4), (1, 16, 8)):
        path = write_tiny_checkpoint(tmp_path / f"{seed}-{block_size}", "sdar", seed=seed)
        config = WorkerConfig(
            model=path,
            device="cpu",
            num_pages=4,
            page_size=page_size,
            block_size=block_size,
            kv_offloading_size=0.01,
            kv_offloading_dir=tmp_path / "kv",
        )
        assert assemble(config, "life-1", "decode", None, Pulse()).tiers is not None
    assert len(list((tmp_path / "kv").iterdir())) == 4


def test_a_model_is_served_under_a_name_that_clients_may_ask_for(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "LLaDA 8B (instruct)", "sdar")
    config = WorkerConfig(model=path, device="cpu", num_pages=4)
    parts = assemble(config, "life-1", "prefill", None, Pulse(lambda _: None))
    assert parts.ready.model.name == "LLaDA-8B-instruct"


@pytest.mark.parametrize(("dtype", "told"), [("float32", "true"), ("bfloat16", "false")])
def test_on_a_cpu_float32_is_deterministic_with_or_without_the_flag(
    tmp_path: Path, dtype: Dtype, told: str
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    config = WorkerConfig(model=path, device="cpu", dtype=dtype, num_pages=4)
    plain = assemble(config, "life-1", "decode", None, Pulse())
    assert dict(plain.ready.fingerprint)["deterministic"] == told
    assert plain.ready.model.deterministic == (told == "true")
    config = replace(config, batch_invariant=True)
    if told == "true":
        assert assemble(config, "life-2", "decode", None, Pulse()).ready == plain.ready
        return
    with pytest.raises(ValueError, match="--batch-invariant: expected float32 on a CPU, got bf"):
        assemble(config, "life-2", "decode", None, Pulse())


@pytest.mark.parametrize(
    ("dtype", "generation", "is_refused"),
    [
        (torch.float32, 9, True),
        (torch.bfloat16, 8, True),
        (torch.float16, 10, True),
        (torch.bfloat16, 9, False),
        (torch.float16, 9, False),
    ],
)
def test_a_gpu_that_cannot_compute_rows_alike_is_refused(
    dtype: torch.dtype, generation: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the GPU")
    if not is_refused:
        rank_part.check_batch_invariant(torch.device("cuda", 0), dtype)
        return
    expected = "--batch-invariant: expected bfloat16 or float16 on a Hopper GPU, got .* on the GPU"
    with pytest.raises(ValueError, match=expected):
        rank_part.check_batch_invariant(torch.device("cuda", 0), dtype)


def test_the_tokens_of_a_unit_fill_pages_and_blocks_and_must_agree(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", block_size=8)
    prints = []
    for asked, expected in ((None, 24), (24, 24), (96, 96)):
        config = WorkerConfig(
            model=path, device="cpu", num_pages=8, page_size=12, kv_unit_tokens=asked
        )
        parts = assemble(config, "life-1", "decode", None, Pulse())
        _, cache = parts.make_pool()
        prints.append(parts.fingerprint)
        assert cache.unit_size == parts.unit_tokens == expected
    assert prints[0] == prints[1]
    found = mismatch(*prints[1:])
    text = "fingerprint field 'kv_unit_tokens' differs: ours is '(absent)', theirs is '96'"
    assert str(found) == text
    with pytest.raises(ValueError, match=r"--kv-unit-tokens: expected a multiple of 24 .* got 36"):
        assemble(replace(config, kv_unit_tokens=36), "life-1", "decode", None, Pulse())
