"""Tiny random checkpoints of the families with experts, written as their releases write them.

Like `checkpoints`, with the same sizes if they have the same meaning. Imports nothing of effuse.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from checkpoints import (
    EOS_TOKEN_ID,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    build_tokenizer,
    write_tensors,
)
from torch import Tensor

ExpertFamily = Literal["sdar_moe", "llada2_moe", "llada_moe"]
EXPERT_FAMILIES: tuple[ExpertFamily, ...] = ("sdar_moe", "llada2_moe", "llada_moe")

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 32, 4, 2, 8
DENSE, INNER, NUM_EXPERTS, TOP_K = 48, 16, 16, 4

_COMMON: dict[str, object] = {
    "eos_token_id": EOS_TOKEN_ID,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "mask_token_id": MASK_TOKEN_ID,
    "max_position_embeddings": 1024,
    "num_attention_heads": NUM_HEADS,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": NUM_KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
}
_OWN: dict[ExpertFamily, dict[str, object]] = {
    "sdar_moe": {
        "architectures": ["SDARMoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "intermediate_size": DENSE,
        "mlp_only_layers": [],
        "model_type": "sdar_moe",
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    },
    "llada2_moe": {
        "architectures": ["LLaDA2MoeModelLM"],
        "first_k_dense_replace": 1,
        "intermediate_size": DENSE,
        "model_type": "llada2_moe",
        "moe_intermediate_size": INNER,
        "moe_router_enable_expert_bias": True,
        "n_group": 4,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "pad_token_id": EOS_TOKEN_ID,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 2,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
    },
    "llada_moe": {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "dense_intermediate_size": DENSE,
        "expert_intermediate_size": INNER,
        "model_type": "llada",
        "moe_layer_freq": [1] * NUM_LAYERS,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "pad_token_id": EOS_TOKEN_ID,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "rope_theta": 50000,
        "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": None,
    },
}


def write_expert_checkpoint(
    path: Path,
    family: ExpertFamily,
    seed: int = 0,
    *,
    head_scale: float = 8.0,
    head_dim: int = HEAD_DIM,
    block_size: int = 4,
    shards: int = 1,
) -> Path:
    """Write a checkpoint directory at `path` and return it. Equal arguments, equal bytes.

    LLaDA-MoE has no `head_dim`. The head's row of the mask is zero: no row ever proposes it, like
    in released models.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = _COMMON | _OWN[family] | {"block_size": block_size, "dtype": "float32"}
    if family == "llada_moe":
        config["num_key_value_heads"] = NUM_HEADS
    else:
        config["head_dim"] = head_dim
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(path, expert_tensors(family, seed, head_scale, head_dim), shards)
    build_tokenizer(VOCAB_SIZE).save(str(path / "tokenizer.json"))
    return path


def expert_tensors(
    family: ExpertFamily, seed: int, head_scale: float, head_dim: int
) -> dict[str, Tensor]:
    """All tensors in fp32 under their released names."""
    draw = _Draw(seed, head_dim)
    is_llada2 = family == "llada2_moe"
    tensors = {
        f"model.{'word_embeddings' if is_llada2 else 'embed_tokens'}.weight": draw.matrix(
            VOCAB_SIZE, HIDDEN, HIDDEN**0.5
        )
    }
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= _llada2_attention(draw, at) if is_llada2 else _attention(draw, at, family)
        tensors[f"{at}.input_layernorm.weight"] = draw.near(1, HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = draw.near(1, HIDDEN)
        if is_llada2 and layer == 0:
            tensors |= _mlp(draw, f"{at}.mlp", DENSE)
        else:
            tensors |= _experts(draw, f"{at}.mlp", family)
    tensors["model.norm.weight"] = draw.near(1, HIDDEN)
    head = draw.matrix(VOCAB_SIZE, HIDDEN, head_scale)
    head[MASK_TOKEN_ID] = 0
    return tensors | {"lm_head.weight": head}


class _Draw:
    """Numbers that follow from the seed and from earlier draws."""

    def __init__(self, seed: int, head_dim: int) -> None:
        self.head_dim = head_dim
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=self._generator)
        drawn *= scale / columns**0.5
        return drawn

    def near(self, value: float, size: int, deviation: float = 0.1) -> Tensor:
        return value + deviation * torch.randn(size, generator=self._generator)


def _llada2_attention(draw: _Draw, at: str) -> dict[str, Tensor]:
    rows = (NUM_HEADS + 2 * NUM_KV_HEADS) * draw.head_dim
    return {
        f"{at}.attention.query_key_value.weight": draw.matrix(rows, HIDDEN, 2.0),
        f"{at}.attention.query_layernorm.weight": draw.near(1.7, draw.head_dim),
        f"{at}.attention.key_layernorm.weight": draw.near(1.7, draw.head_dim),
        f"{at}.attention.dense.weight": draw.matrix(HIDDEN, NUM_HEADS * draw.head_dim, 2.0),
    }


def _attention(draw: _Draw, at: str, family: ExpertFamily) -> dict[str, Tensor]:
    kv_heads = NUM_HEADS if family == "llada_moe" else NUM_KV_HEADS
    tensors = {
        f"{at}.self_attn.{name}_proj.weight": draw.matrix(heads * draw.head_dim, HIDDEN, 2.0)
        for name, heads in (("q", NUM_HEADS), ("k", kv_heads), ("v", kv_heads))
    }
    tensors[f"{at}.self_attn.o_proj.weight"] = draw.matrix(HIDDEN, NUM_HEADS * draw.head_dim, 2.0)
    for name in ("q_norm", "k_norm"):
        tensors[f"{at}.self_attn.{name}.weight"] = draw.near(1.7, draw.head_dim)
    return tensors


def _experts(draw: _Draw, at: str, family: ExpertFamily) -> dict[str, Tensor]:
    tensors = {f"{at}.gate.weight": draw.matrix(NUM_EXPERTS, HIDDEN, 2.0)}
    for expert in range(NUM_EXPERTS):
        tensors |= _mlp(draw, f"{at}.experts.{expert}", INNER)
    if family == "llada2_moe":
        tensors |= _mlp(draw, f"{at}.shared_experts", INNER)
        # As large as the differences of scores: the bias changes many choices.
        tensors[f"{at}.gate.expert_bias"] = draw.near(0, NUM_EXPERTS, 0.2)
    return tensors


def _mlp(draw: _Draw, at: str, inner: int) -> dict[str, Tensor]:
    return {
        f"{at}.gate_proj.weight": draw.matrix(inner, HIDDEN, 1.5),
        f"{at}.up_proj.weight": draw.matrix(inner, HIDDEN, 1.5),
        f"{at}.down_proj.weight": draw.matrix(HIDDEN, inner, 1.5),
    }
