"""Checkpoint directories: shards, dtypes, and every tensor accounted for by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    Architecture,
    TinySizes,
    write_tensors,
    write_tiny_checkpoint,
)
from expert_checkpoints import write_expert_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from effuse.models import weights
from effuse.models.config_keys import CheckpointError
from effuse.models.preflight import check_checkpoint
from effuse.models.transformer import ModelWeights
from effuse.models.weights import load_model, select_dtype, weights_digest

Tensors = dict[str, Tensor]


def all_tensors(weights: ModelWeights) -> list[Tensor]:
    layers = [
        tensor
        for layer in weights.layers
        for tensor in (layer.attn_norm, layer.qkv, layer.attn_out, layer.gate_up, layer.down)
    ]
    return [weights.embedding, weights.norm, weights.head, *layers]


def every_tensor(weights: ModelWeights) -> list[Tensor]:
    layers = [getattr(layer, one.name) for layer in weights.layers for one in fields(layer)]
    found = [weights.embedding, weights.norm, weights.head, *layers]
    return [tensor for tensor in found if tensor is not None]


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = path / "model.safetensors"
    write_tensors(path, change(load_file(file)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shards_hold_the_same_model(tmp_path: Path, architecture: Architecture) -> None:
    whole = load_model(write_tiny_checkpoint(tmp_path / "one", architecture))
    parts = load_model(write_tiny_checkpoint(tmp_path / "three", architecture, shards=3))
    pairs = zip(all_tensors(whole.weights), all_tensors(parts.weights), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_products_are_merged_in_order(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "dream")
    raw, layer = load_file(path / "model.safetensors"), load_model(path).weights.layers[1]
    at = "model.layers.1"
    qkv = [raw[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv"]
    bias = [raw[f"{at}.self_attn.{name}_proj.bias"] for name in "qkv"]
    gate_up = [raw[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert layer.qkv_bias is not None and torch.equal(layer.qkv_bias, torch.cat(bias))
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert torch.equal(layer.gate_up, torch.cat(gate_up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_chosen_at_load(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path, "sdar"), dtype=dtype)
    assert model.dtype is dtype
    assert {tensor.dtype for tensor in all_tensors(model.weights)} == {dtype}


def test_dtype_by_name(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", dtype=torch.bfloat16)
    assert select_dtype("auto", path) is torch.bfloat16
    assert select_dtype("float16", path) is torch.float16
    with pytest.raises(CheckpointError, match="'int8' is not supported; accepted: auto, float32"):
        select_dtype("int8", path)


def test_a_dtype_that_is_not_stated_is_that_of_the_weights(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "llada", dtype=torch.bfloat16, shards=2)
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert select_dtype("auto", path) is torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("sdar", "model.layers.2.self_attn.k_norm.weight"),
        ("dream", "model.layers.0.self_attn.v_proj.bias"),
        ("llada", "model.transformer.blocks.1.ff_out.weight"),
        ("llada", "model.transformer.ff_out.weight"),
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, architecture: Architecture, name: str) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture)
    rewrite(path, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(CheckpointError, match=f"tensor {name} of shape .* is missing"):
        load_model(path)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("sdar", "model.layers.0.self_attn.q_proj.bias"),
        ("sdar", "model.layers.3.mlp.up_proj.weight"),
        ("llada", "model.transformer.wpe.weight"),
    ],
)
def test_surplus_tensor_is_named(tmp_path: Path, architecture: Architecture, name: str) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture)
    rewrite(path, lambda tensors: tensors | {name: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} of shape \[3\] is not part"):
        load_model(path)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("architecture", "at"),
    [("sdar", "model.layers.{}.self_attn"), ("llada", "model.transformer.blocks.{}"),
     ("dream", "model")],
)  # fmt: skip
def test_rotary_buffers_of_old_releases_change_nothing(
    tmp_path: Path, architecture: Architecture, at: str, shards: int
) -> None:
    plain = load_model(write_tiny_checkpoint(tmp_path / "plain", architecture))
    path = write_tiny_checkpoint(tmp_path / "old", architecture)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    for layer in range(3):
        tensors[f"{at.format(layer)}.rotary_emb.inv_freq"] = torch.full((4,), 7.0).double()
        tensors[f"{at.format(layer)}.rotary_emb.cos_cached"] = torch.ones(9, 8)
    write_tensors(path, tensors, shards)
    check_checkpoint(path)
    loaded = load_model(path)
    assert torch.equal(loaded.weights.head, plain.weights.head)
    assert all(
        torch.equal(one.qkv, other.qkv)
        for one, other in zip(loaded.weights.layers, plain.weights.layers, strict=True)
    )


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_a_pointer_of_git_lfs_is_called_that(tmp_path: Path, name: str) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", shards=2 if name.endswith("index.json") else 1)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 162944\n"
    (path / name).write_text(pointer)
    for read in (check_checkpoint, load_model):
        with pytest.raises(CheckpointError) as refused:
            read(path)
        said = f"{path / name}: a Git LFS pointer instead of the file; run `git lfs pull` in {path}"
        assert str(refused.value) == said


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(path, lambda tensors: tensors | {name: tensors[name].T.contiguous()})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[48, 32\], expected \[32, 48\]"):
        load_model(path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    rewrite(path, lambda tensors: tensors | {"model.norm.weight": torch.ones(32).int()})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I32"):
        load_model(path)


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", tied=True)
    embedding = "model.embed_tokens.weight"
    rewrite(path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})
    assert load_model(path).config.tie_embeddings
    rewrite(path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_model(path)
    # As safetensors' save_model leaves two names of one tensor.
    rewrite(path, lambda tensors: {k: v for k, v in tensors.items() if k != embedding})
    with pytest.raises(CheckpointError, match=rf"tensor {embedding} of shape .* is missing"):
        load_model(path)


@pytest.mark.parametrize("has_experts", [False, True])
def test_what_was_loaded_does_not_change_with_its_file(tmp_path: Path, has_experts: bool) -> None:
    """A process that rewrites a checkpoint in its directory would change the served model, or end
    it.
    """
    if has_experts:
        write_expert_checkpoint(tmp_path, "llada2_moe")
    else:
        write_tiny_checkpoint(tmp_path, "sdar")
    weights = load_model(tmp_path).weights
    kept = every_tensor(weights)
    before = [tensor.clone() for tensor in kept]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert len(kept) > 20 and all(map(torch.equal, before, kept))


def test_no_weights_at_all(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"a pickle is not looked at")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors"):
        load_model(path)


def test_file_that_is_no_safetensors(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    (path / "model.safetensors").write_bytes(b"\x80\x04pickle, or garbage")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        load_model(path)


def change_index(path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))


def test_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", shards=2)
    second = "model-00002-of-00002.safetensors"
    change_index(path, lambda entries: entries | {"model.norm.weight": second})
    change_index(path, lambda entries: entries | {"lm_head.weight": second})
    with pytest.raises(CheckpointError, match=f"tensor .* expected in {second}, found in model-00"):
        load_model(path)


def test_shards_stay_beside_their_index(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", shards=2)
    change_index(path, lambda entries: entries | {"lm_head.weight": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="is not the name of a file in its directory"):
        load_model(path)


def test_a_name_that_is_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", shards=2)
    change_index(path, lambda entries: entries | {"lm_head.weight": "a" * 300})
    for read in (check_checkpoint, load_model):
        # Python 3.14 takes it for a missing file.
        with pytest.raises(CheckpointError, match=r"aaa: (File name too long|no such file)$"):
            read(path)


def test_missing_and_doubled_shards(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", shards=2)
    first, second = (path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        load_model(path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is in both model-00001-of-00002"):
        load_model(path)
    second.write_bytes(content)
    assert load_model(path).config.num_layers == 3


def test_the_rotary_table_must_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=TinySizes(max_positions=2**31 - 1))
    monkeypatch.setattr(weights, "free_bytes", lambda _: 1 << 30)
    with pytest.raises(
        CheckpointError, match=r"the table of 2147483647 positions 68\.7 GB, cpu has"
    ):
        load_model(path)
    assert load_model(path, most_positions=100).config.max_position_embeddings == 100
    path = write_tiny_checkpoint(tmp_path, "sdar", sizes=TinySizes(max_positions=90))
    assert load_model(path, most_positions=100).config.max_position_embeddings == 90


def test_digest_covers_weights_configuration_and_adapter(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "a", "sdar")
    same = write_tiny_checkpoint(tmp_path / "b", "sdar")
    digest = weights_digest(path)
    assert digest == weights_digest(same) and len(digest) == 32
    assert digest != weights_digest(write_tiny_checkpoint(tmp_path / "c", "sdar", seed=1))
    config = (same / "config.json").read_text()
    (same / "config.json").write_text(config.replace("1e-06", "1e-05"))
    assert digest != weights_digest(same)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: no such file"):
        weights_digest(path, adapter)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: no such file"):
        weights_digest(path, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"factors")
    assert weights_digest(path, adapter) != digest


@pytest.mark.parametrize("shards", [1, 2])
def test_the_digest_leaves_out_files_that_are_not_loaded(tmp_path: Path, shards: int) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "sdar", shards=shards)
    (adapter := tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    digest = weights_digest(path, adapter)
    for directory in (path, adapter):
        (directory / "copy.safetensors").write_bytes(b"other weights")
        (directory / "old.safetensors").symlink_to(tmp_path / "gone")
        (directory / "folder.safetensors").mkdir()
    assert weights_digest(path, adapter) == digest
