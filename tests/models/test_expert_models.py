"""Models with experts: the logits of the authors' own code, and of transformers' Qwen3Moe.

`expert_logits.safetensors` holds the input and the logits of the code that LLaDA2.0-mini and
LLaDA-MoE-7B-A1B are published with, run in fp32 by transformers 4.57.6 under an explicit mask, on
the checkpoints that `write_expert_checkpoint(.., seed=5, head_scale=1.0)` writes: 13 tokens of a
prompt, then a noisy rest of 9. Blocks are of 4, from 0 on (llada2_moe) or from the prompt's end.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import write_tensors
from expert_checkpoints import EXPERT_FAMILIES, NUM_EXPERTS, ExpertFamily, write_expert_checkpoint
from hf_reference import HfReference
from paged_model import PagedModel
from safetensors.torch import load_file

from effuse.models import weights
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError
from effuse.models.weights import load_model

BLOCK, PROMPT = 4, 13
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[ExpertFamily, Path]:
    home = tmp_path_factory.mktemp("experts")
    return {
        family: write_expert_checkpoint(home / family, family, seed=5, head_scale=1.0)
        for family in EXPERT_FAMILIES
    }


def expected(family: ExpertFamily, path: Path) -> tuple[list[int], torch.Tensor]:
    """Token ids and logits [T, V] of one sequence."""
    known = load_file(Path(__file__).with_name("expert_logits.safetensors"))
    if family != "sdar_moe":
        return known[f"{family}.token_ids"].tolist(), known[f"{family}.logits"]
    ids: list[int] = known["llada2_moe.token_ids"].tolist()
    block = torch.arange(len(ids)) // BLOCK
    return ids, HfReference(path).run(ids, block[:, None] >= block[None, :]).logits


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_are_those_of_the_authors_code(
    checkpoints: dict[ExpertFamily, Path], family: ExpertFamily
) -> None:
    model = PagedModel(checkpoints[family], page_size=4, block_size=BLOCK)
    ids, logits = expected(family, checkpoints[family])
    pages, origin = model.pages(len(ids)), model.model.config.block_origin(PROMPT)
    found = model.model.logits(model.forward(ids, 0, pages, 0, origin))
    torch.testing.assert_close(found, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_over_a_cached_prompt_and_a_cached_block(
    checkpoints: dict[ExpertFamily, Path], family: ExpertFamily
) -> None:
    model = PagedModel(checkpoints[family], page_size=8, block_size=BLOCK)
    ids, logits = expected(family, checkpoints[family])
    pages, origin = model.pages(len(ids)), model.model.config.block_origin(PROMPT)
    cached = PROMPT - (PROMPT - origin) % BLOCK
    model.forward(ids[:cached], 0, pages, cached, origin, torch.empty(0).long())
    for start, stored in ((cached, BLOCK), (cached + BLOCK, 0)):
        found = model.model.logits(model.forward(ids[start:], start, pages, stored, origin))
        torch.testing.assert_close(found, logits[start:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_row_does_not_depend_on_the_batch(
    checkpoints: dict[ExpertFamily, Path], family: ExpertFamily
) -> None:
    """Bitwise: fleets give the answers of one process."""
    model = PagedModel(checkpoints[family], page_size=8, block_size=BLOCK)
    ids, _ = expected(family, checkpoints[family])
    pages, origin = model.pages(len(ids)), model.model.config.block_origin(PROMPT)
    cached = PROMPT - (PROMPT - origin) % BLOCK
    model.forward(ids[:cached], 0, pages, cached, origin, torch.empty(0).long())
    many = model.forward(ids[cached:], cached, pages, 0, origin)
    few = model.forward(ids[cached : cached + BLOCK], cached, pages, 0, origin)
    assert torch.equal(many[:BLOCK], few)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_lie_in_their_order_from_shards_too(
    checkpoints: dict[ExpertFamily, Path], tmp_path: Path, family: ExpertFamily
) -> None:
    parts = write_expert_checkpoint(tmp_path, family, seed=5, head_scale=1.0, shards=3)
    raw = load_file(checkpoints[family] / "model.safetensors")
    layer = load_model(parts).weights.layers[2]
    for expert in range(NUM_EXPERTS):
        at = f"model.layers.2.mlp.experts.{expert}"
        gate_up = torch.cat([raw[f"{at}.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(layer.gate_up[expert], gate_up)
        assert torch.equal(layer.down[expert], raw[f"{at}.down_proj.weight"])
    assert len(layer.gate_up) == NUM_EXPERTS + (family == "llada2_moe")
    assert (layer.router_bias is not None) == (family == "llada2_moe")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.15.up_proj.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.1.mlp.gate.expert_bias",
        "model.layers.0.mlp.gate_proj.weight",
    ],
)
def test_missing_and_surplus_tensors_are_named(tmp_path: Path, name: str) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe")
    tensors = load_file(path / "model.safetensors")
    kept = {other: tensor for other, tensor in tensors.items() if other != name}
    write_tensors(path, kept)
    with pytest.raises(CheckpointError, match=f"tensor {name} of shape .* is missing"):
        load_model(path)
    write_tensors(path, tensors | {f"{name}.more": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=rf"tensor {name}\.more of shape \[3\] is not part"):
        load_model(path)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaDA2.0-flash's shape: nothing but its configuration is there to be read."""
    config = json.loads(
        (write_expert_checkpoint(tmp_path, "llada2_moe") / "config.json").read_text()
    )
    (tmp_path / "model.safetensors").unlink()
    flash = {
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "head_dim": 128,
        "moe_intermediate_size": 1024,
        "n_group": 8,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "topk_group": 4,
        "vocab_size": 157184,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | flash))
    assert ModelConfig.from_dir(tmp_path).num_layers == 32
    monkeypatch.setattr(weights, "free_bytes", lambda _: 140_000_000_000)
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, dtype=torch.bfloat16)
    assert str(refused.value) == (
        f"{tmp_path}: the weights are 205.8 GB in torch.bfloat16, the table of 1024 positions "
        "0.0 GB, cpu has 140.0 GB free; --tensor-parallel-size and --pipeline-parallel-size spread "
        "weights over several devices, --max-model-len limits positions"
    )


def test_free_bytes_of_a_host_are_between_nothing_and_all_of_it() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 0 < weights.free_bytes(torch.device("cpu")) <= total
