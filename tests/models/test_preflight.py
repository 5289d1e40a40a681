"""By its headers a checkpoint is refused in the very words in which loading it would be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_tiny_checkpoint
from safetensors.torch import load_file, save_file

from effuse.models.config_keys import CheckpointError
from effuse.models.preflight import check_checkpoint
from effuse.models.weights import load_model, select_dtype
from effuse.router.tokenizer import bundled_directory

Break = Callable[[Path], None]
NORM = "model.norm.weight"


def _rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


def _edited(name: str, **changes: object) -> Break:
    def edit(path: Path) -> None:
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | changes))

    return edit


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def _filled(name: str, content: bytes) -> Break:
    def fill(path: Path) -> None:
        (path / name).write_bytes(content)

    return fill


BREAKS: dict[str, Break] = {
    "no config": lambda path: (path / "config.json").unlink(),
    "config is no JSON": _filled("config.json", b"{"),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "weights are no safetensors": _filled("model.safetensors", b"no weights" * 9),
    "weights end early": _cut,
    "a tensor is missing": _rewritten(lambda tensors: tensors.pop(NORM)),
    "a tensor too many": _rewritten(lambda tensors: tensors.update(other=torch.zeros(3))),
    "another shape": _rewritten(lambda tensors: tensors.update({NORM: torch.zeros(33)})),
    "another dtype": _rewritten(lambda tensors: tensors.update({NORM: torch.zeros(32).int()})),
    "another size": _edited("config.json", hidden_size=64, head_dim=16),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_it_is_refused_in_the_words_of_loading(tmp_path: Path, broken: str) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "sdar")
    check_checkpoint(path)
    BREAKS[broken](path)
    with pytest.raises(CheckpointError) as early:
        check_checkpoint(path)
    with pytest.raises(CheckpointError) as late:
        load_model(path)
    assert str(early.value) == str(late.value)


def test_shards_are_held_to_their_index(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "llada", shards=3)
    check_checkpoint(path)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tensor more: expected in .*, found in no shard"):
        check_checkpoint(path)


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "sdar", tied=True)
    check_checkpoint(path)
    _rewritten(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        )
    )(path)
    check_checkpoint(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.zeros(3, 3), r"lm_head\.weight has shape \[3, 3\], expected \[272, 32\]"),
        (
            torch.zeros(272, 32).bfloat16(),
            r"lm_head\.weight has dtype BF16, expected F32 like model\.embed_tokens\.weight",
        ),
        (torch.zeros(272, 32).char(), "has dtype I8, expected F32"),
    ],
)
def test_a_tied_head_that_cannot_be_the_embedding_is_named(
    tmp_path: Path, head: torch.Tensor, message: str
) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "sdar", tied=True)
    _rewritten(lambda tensors: tensors.update({"lm_head.weight": head}))(path)
    for read in (check_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=message):
            read(path)


def test_a_dtype_that_workers_do_not_compute_in(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", "sdar")
    _edited("config.json", dtype="float64")(path)
    check_checkpoint(path, dtype="float32")  # as on a CPU
    with pytest.raises(CheckpointError) as early:
        check_checkpoint(path, dtype="auto")
    with pytest.raises(CheckpointError) as late:
        select_dtype("auto", path)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("fits", [True, False])
def test_an_adapter_is_looked_at_too(tmp_path: Path, fits: bool) -> None:
    path, adapter = write_tiny_checkpoint(tmp_path / "model", "sdar"), tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["0.mlp.up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    factors = {f"{prefix}.lora_A.weight": torch.ones(2, 32 if fits else 31),
               f"{prefix}.lora_B.weight": torch.ones(48, 2)}  # fmt: skip
    save_file(factors, adapter / "adapter_model.safetensors")
    if fits:
        check_checkpoint(path, adapter=adapter)
        load_model(path, adapter=adapter)
        return
    with pytest.raises(CheckpointError, match=r"has shape \[2, 31\], expected \[2, 32\]") as early:
        check_checkpoint(path, adapter=adapter)
    with pytest.raises(CheckpointError) as late:
        load_model(path, adapter=adapter)
    assert str(early.value) == str(late.value)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from effuse.models.preflight import check_checkpoint\n"
        "check_checkpoint(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code, str(bundled_directory())]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "False\n"
