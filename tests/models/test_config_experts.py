"""config.json of the releases with experts, and refusals with the key's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expert_checkpoints import ExpertFamily, write_expert_checkpoint

from effuse.kernels.experts_routing import Routing
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError

# The published configurations, shortened to the keys that matter and some that must not.
LLADA2_MINI: dict[str, object] = {
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 157184,
}
SDAR_30B: dict[str, object] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLADA_MOE_7B: dict[str, object] = {
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 8192,
    "eos_token_id": 156892,
    "expert_intermediate_size": 1024,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "model_type": "llada",
    "moe_layer_freq": [1] * 16,
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
    "vocab_size": 157184,
}


def read(path: Path, config: dict[str, object]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_dir(path)


def test_llada2_mini_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LLADA2_MINI)
    assert config.architecture == "llada2_moe"
    assert config.prompt_attention == "causal_blocks" and config.block_origin(13) == 0
    assert (config.block_size, config.mask_token_id, config.eos_token_ids) == (
        32,
        156895,
        (156892,),
    )
    assert (config.rotary_dim, config.qk_norm, config.shift_logits) == (64, True, False)
    assert config.intermediate_size == 5120
    assert config.experts_of(0) is None
    experts = config.experts_of(1)
    assert experts is not None and experts.has_bias and experts.intermediate_size == 512
    assert experts.routing == Routing(
        num_experts=256,
        top_k=8,
        scores="sigmoid",
        renormalises=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        num_shared=1,
    )


def test_sdar_30b_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, SDAR_30B)
    assert config.architecture == "sdar_moe" and config.prompt_attention == "causal_blocks"
    assert (config.block_size, config.mask_token_id, config.eos_token_ids) == (4, 151669, (151643,))
    experts = config.experts_of(0)
    assert experts is not None and not experts.has_bias and experts.intermediate_size == 768
    assert experts.routing == Routing(num_experts=128, top_k=8, scores="softmax", renormalises=True)


def test_llada_moe_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LLADA_MOE_7B)
    assert config.architecture == "llada_moe" and config.prompt_attention == "bidirectional"
    assert (config.block_size, config.mask_token_id, config.eos_token_ids) == (
        32,
        156895,
        (156892,),
    )
    experts = config.experts_of(0)
    assert experts is not None and experts.intermediate_size == 1024
    assert experts.routing == Routing(num_experts=64, top_k=8, scores="softmax", renormalises=False)
    dense = LLADA_MOE_7B | {"moe_layer_freq": [0, 0] + [1] * 14}
    config = read(tmp_path, dense)
    assert config.experts_of(1) is None and config.experts_of(2) is not None
    assert config.intermediate_size == 8192


@pytest.mark.parametrize("stated", [{}, {"moe_layer_freq": None}], ids=["missing", "null"])
def test_without_a_word_every_layer_of_llada_moe_has_experts(
    tmp_path: Path, stated: dict[str, object]
) -> None:
    unsaid = {key: value for key, value in LLADA_MOE_7B.items() if key != "moe_layer_freq"}
    assert read(tmp_path, unsaid | stated).experts_of(0) is not None


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("llada2_moe", {"score_function": "softmax"}, "score_function"),
        ("llada2_moe", {"num_shared_experts": 2}, "num_shared_experts"),
        ("llada2_moe", {"use_bias": True}, "use_bias"),
        ("llada2_moe", {"n_group": 3}, "cannot form 3 equal groups"),
        ("llada2_moe", {"partial_rotary_factor": 0.25}, "2 of head_dim 8 dimensions are rotated"),
        ("sdar_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("sdar_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("llada_moe", {"moe_layer_freq": [1, 0, 1]}, "moe_layer_freq"),
        ("llada_moe", {"moe_layer_freq": 1}, "moe_layer_freq"),
        ("llada_moe", {"num_hidden_layers": 5000}, "expected at most 4096 layers, found 5000"),
        ("llada_moe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ("llada2_moe", {"num_experts": 10**6}, "num_experts: expected at most 43690 experts in"),
        ("llada_moe", {"num_experts": 10**6}, "num_experts: expected at most 43690 experts in"),
        ("sdar_moe", {"num_local_experts": 10**6}, "num_local_experts: expected at most 43690"),
        ("sdar_moe", {"num_hidden_layers": 4096, "num_experts": 33}, "most 32 .* 4096 .* found 33"),
    ],
)
def test_what_would_give_another_model_is_refused(
    tmp_path: Path, family: ExpertFamily, change: dict[str, object], says: str
) -> None:
    path = write_expert_checkpoint(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    assert read(tmp_path, config).architecture == family
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, config | change)
