"""The same checkpoints in transformers' own implementations, run under explicit dense masks.

sdar is its Qwen3, sdar_moe its Qwen3Moe, dream its Qwen2, llada its Llama with the released names
mapped over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

_LLADA_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits [T, V] and each layer's rotated K and V [T, Hkv, D] of one sequence."""

    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class HfReference:
    """One checkpoint directory in transformers, eager attention, fp32."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        tensors: dict[str, Tensor] = {}
        for file in sorted(path.glob("model*.safetensors")):
            tensors |= load_file(file)
        self.family = config["model_type"].lower()
        self.model = _build(config)
        if self.family == "llada":
            tensors = {_llama_name(name): tensor for name, tensor in tensors.items()}
        if self.family == "sdar_moe":
            tensors = _stacked(tensors, config["num_hidden_layers"], config["num_experts"])
        tied = config.get("tie_word_embeddings", config.get("weight_tying"))
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert unexpected == [] and missing == (["lm_head.weight"] if tied else [])
        self.model.tie_weights()

    @torch.no_grad()
    def run(self, token_ids: list[int], mask: Tensor) -> Expected:
        """`mask` [T, T] bool: True where the row sees the column."""
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        result = self.model(
            input_ids=torch.tensor([token_ids]),
            attention_mask=additive[None, None],
            use_cache=True,
        )
        layers = result.past_key_values.layers
        return Expected(
            logits=result.logits[0],
            keys=[layer.keys[0].transpose(0, 1) for layer in layers],
            values=[layer.values[0].transpose(0, 1) for layer in layers],
        )


def _build(config: dict[str, Any]) -> transformers.PreTrainedModel:
    if config["model_type"] == "llada":
        llama = transformers.LlamaConfig(
            **_shared(config),
            hidden_size=config["d_model"],
            intermediate_size=config["mlp_hidden_size"],
            max_position_embeddings=config["max_sequence_length"],
            num_attention_heads=config["n_heads"],
            num_hidden_layers=config["n_layers"],
            num_key_value_heads=config["n_kv_heads"],
            tie_word_embeddings=config["weight_tying"],
        )
        return _settled(transformers.LlamaForCausalLM(llama))
    copied = (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
    )
    sizes = {key: config[key] for key in copied}
    if config["model_type"] == "Dream":
        return _settled(
            transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_shared(config), **sizes))
        )
    if config["model_type"] == "sdar_moe":
        keys = ("head_dim", "moe_intermediate_size", "norm_topk_prob", "num_experts")
        own = {key: config[key] for key in (*keys, "num_experts_per_tok")}
        return _settled(
            transformers.Qwen3MoeForCausalLM(
                transformers.Qwen3MoeConfig(**_shared(config), **sizes, **own)
            )
        )
    qwen3 = transformers.Qwen3Config(**_shared(config), **sizes, head_dim=config["head_dim"])
    return _settled(transformers.Qwen3ForCausalLM(qwen3))


def _settled(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_implementation": "eager",
        "dtype": torch.float32,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "vocab_size": config["vocab_size"],
    }


def _stacked(tensors: dict[str, Tensor], num_layers: int, num_experts: int) -> dict[str, Tensor]:
    """Experts side by side in one tensor, as in transformers since version 5."""
    for layer in range(num_layers):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{i}.{name}_proj.weight") for i in range(num_experts)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{at}.gate_up_proj": torch.cat([gate, up], dim=1), f"{at}.down_proj": down}
    return tensors


def _llama_name(name: str) -> str:
    parts = name.split(".")
    if parts[2] == "blocks":
        return f"model.layers.{parts[3]}.{_LLADA_LAYER[parts[4]]}.weight"
    return {
        "wte": "model.embed_tokens.weight",
        "ln_f": "model.norm.weight",
        "ff_out": "lm_head.weight",
    }[parts[2]]
