"""LoRA directories: merge parity with the factors' own arithmetic, and every refusal by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint
from expert_checkpoints import write_expert_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from effuse.models.config_keys import CheckpointError
from effuse.models.weights import load_model

# Targets of the published D2F adapters of Dream and LLaDA, with rank and alpha 32.
D2F_TARGETS = {
    "dream": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "llada": ("q_proj", "k_proj", "v_proj", "attn_out"),
}


RANK = 3


def write_adapter(
    path: Path,
    base: dict[str, Tensor],
    targets: tuple[str, ...],
    **options: object,
) -> dict[str, Tensor]:
    """A random adapter in PEFT's form for all modules that end in a target's name."""
    path.mkdir()
    config = {
        "alpha_pattern": {},
        "base_model_name_or_path": "somewhere/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "rank_pattern": {},
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": False,
    }
    (path / "adapter_config.json").write_text(json.dumps(config | options))
    generator = torch.Generator().manual_seed(9)
    factors: dict[str, Tensor] = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rsplit(".", 1)[-1] in targets:
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            a = torch.randn(RANK, columns, generator=generator)
            b = torch.randn(rows, RANK, generator=generator)
            factors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(factors, path / "adapter_model.safetensors")
    return factors


def merged_by_rank_one_sums(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A as a sum of outer products in fp64."""
    total = weight.double().clone()
    for row in range(len(a)):
        total += scale * torch.outer(b[:, row].double(), a[row].double())
    return total


@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("architecture", ["dream", "llada"])
def test_merge_is_the_sum_of_rank_one_updates(
    tmp_path: Path, architecture: Architecture, stabilised: bool
) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", architecture)
    base = load_file(path / "model.safetensors")
    targets = D2F_TARGETS[architecture]
    factors = write_adapter(tmp_path / "lora", base, targets, use_rslora=stabilised)
    scale = 6 / math.sqrt(3) if stabilised else 6 / 3
    model = load_model(path, adapter=tmp_path / "lora")
    plain = load_model(path)
    for index, layer in enumerate(model.weights.layers):
        at = f"model.transformer.blocks.{index}"
        if architecture == "dream":
            at = f"model.layers.{index}.self_attn"
        expected = [
            merged_by_rank_one_sums(
                base[f"{at}.{name}.weight"],
                factors[f"base_model.model.{at}.{name}.lora_A.weight"],
                factors[f"base_model.model.{at}.{name}.lora_B.weight"],
                scale,
            )
            for name in targets
        ]
        torch.testing.assert_close(layer.qkv.double(), torch.cat(expected[:3]), rtol=0, atol=1e-5)
        torch.testing.assert_close(layer.attn_out.double(), expected[3], rtol=0, atol=1e-5)
        assert torch.equal(layer.gate_up, plain.weights.layers[index].gate_up)
        assert not torch.equal(layer.qkv, plain.weights.layers[index].qkv)


def test_merge_happens_before_rounding(tmp_path: Path) -> None:
    """Updates far below bf16's resolution of the base add up in fp32, and round once."""
    path = write_tiny_checkpoint(tmp_path / "base", "dream", dtype=torch.bfloat16)
    base = load_file(path / "model.safetensors")
    factors = write_adapter(tmp_path / "lora", base, ("o_proj",))
    model = load_model(path, adapter=tmp_path / "lora", dtype=torch.bfloat16)
    module = "model.layers.0.self_attn.o_proj"
    a, b = (factors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
    expected = (base[f"{module}.weight"].float() + 2.0 * (b @ a)).bfloat16()
    assert torch.equal(model.weights.layers[0].attn_out, expected)


def test_head_and_block_output_of_llada_share_a_name(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", "llada")
    base = load_file(path / "model.safetensors")
    write_adapter(tmp_path / "lora", base, ("ff_out",))
    model, plain = load_model(path, adapter=tmp_path / "lora"), load_model(path)
    assert not torch.equal(model.weights.head, plain.weights.head)
    assert not torch.equal(model.weights.layers[0].down, plain.weights.layers[0].down)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("use_dora", True, "true is not supported; accepted: missing or false"),
        ("bias", "lora_only", 'accepted: missing or "none"'),
        ("modules_to_save", ["lm_head"], "is not supported"),
        ("rank_pattern", {"q_proj": 4}, "is not supported"),
        ("fan_in_fan_out", True, "is not supported"),
        ("layers_to_transform", [0], "is not supported"),
        ("init_lora_weights", "pissa", 'or "gaussian"'),
        ("peft_type", "IA3", 'accepted: "LORA"'),
        ("r", 0, "expected an integer of at least 1, found 0"),
        ("lora_alpha", None, "missing; expected a number"),
        ("target_modules", "all-linear", "expected a list of strings"),
        ("target_modules", ["q_proj", "query"], "the model has no module 'query'"),
    ],
)
def test_options_are_refused_by_name(
    tmp_path: Path, option: str, value: object, message: str
) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", "dream")
    base = load_file(path / "model.safetensors")
    write_adapter(tmp_path / "lora", base, ("q_proj",), **{option: value})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, adapter=tmp_path / "lora")
    assert f"adapter_config.json: {option}: " in str(caught.value)
    assert message in str(caught.value)


def test_leftover_missing_and_misshapen_factors_are_named(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", "dream")
    base = load_file(path / "model.safetensors")
    factors = write_adapter(tmp_path / "lora", base, ("q_proj",))
    file = tmp_path / "lora" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

    def message_for(changed: dict[str, Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises(CheckpointError) as caught:
            load_model(path, adapter=tmp_path / "lora")
        return str(caught.value)

    stray = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    assert f"tensor {stray} does not belong to a target" in message_for(
        factors | {stray: torch.ones(1)}
    )
    missing = {key: value for key, value in factors.items() if key != name}
    assert f"tensor {name} is missing, expected [32, 3]" in message_for(missing)
    misshapen = message_for(factors | {name: torch.ones(32, 4)})
    assert f"tensor {name} has shape [32, 4], expected [32, 3]" in misshapen


def test_no_adapter_there(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "base", "dream")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: no such file"):
        load_model(path, adapter=tmp_path)


def test_experts_are_merged_one_by_one(tmp_path: Path) -> None:
    """An adapter of every expert's and the router's modules, by PEFT's names."""
    path = write_expert_checkpoint(tmp_path / "base", "llada2_moe")
    base = load_file(path / "model.safetensors")
    targets = ("gate", "up_proj", "query_key_value")
    factors = write_adapter(tmp_path / "adapter", base, targets)
    model = load_model(path, adapter=tmp_path / "adapter")
    layer, at = model.weights.layers[1], "model.layers.1"
    found = {
        f"{at}.mlp.gate": layer.router,
        f"{at}.mlp.experts.7.up_proj": layer.gate_up[7, 16:],
        f"{at}.mlp.shared_experts.up_proj": layer.gate_up[16, 16:],
        f"{at}.attention.query_key_value": layer.qkv,
    }
    for module, merged in found.items():
        prefix = f"base_model.model.{module}"
        a, b = (factors[f"{prefix}.lora_{which}.weight"] for which in "AB")
        expected = merged_by_rank_one_sums(base[f"{module}.weight"], a, b, 6 / RANK)
        assert merged is not None
        torch.testing.assert_close(merged.double(), expected, rtol=0, atol=1e-5)
    untouched = base[f"{at}.mlp.experts.7.gate_proj.weight"]
    assert torch.equal(layer.gate_up[7, :16], untouched)
