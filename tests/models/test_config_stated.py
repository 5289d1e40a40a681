"""Keys that change a forward, in every place that may hold them: obeyed or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers
from expert_checkpoints import write_expert_checkpoint

from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError
from effuse.models.families import FAMILIES

Config = dict[str, Any]
_PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
RELEASES: dict[str, Config] = {
    family.architecture: next(
        one["config"] for one in _PUBLISHED if one["config"]["architectures"][0] in family.classes
    )
    for family in FAMILIES
}
PARTLY_ROTATED = {"llada2_moe": 0.5, "llada_moe": 1.0}
"""Families that may rotate half of a head, and the share that their class has by default."""

ROTARY: Config = {
    "n_rot": 2,
    "rot_dim": 2,
    "theta": 5000.0,
    "partial_rotary_factor": 0.25,
    "rotary_pct": 0.25,
    "rope_pct": 0.25,
    "rotary_dim": 32,
    "rotary_emb_dim": 32,
    "rope_theta": 123.0,
    "rotary_base": 123.0,
    "rope_type": "yarn",
    "type": "linear",
    "factor": 4.0,
    "rope_ratio": 2.0,
    "mrope_section": [16, 24, 24],
    "attention_factor": 0.5,
}
OTHERS: Config = {
    "alibi": True,
    "attention_bias": "other",
    "attention_multiplier": 0.1,
    "attention_out_bias": True,
    "attn_logit_softcapping": 50.0,
    "attention_value_scale": 0.5,
    "clip_qkv": 1.0,
    "decoder_sparse_step": 2,
    "dim_model_base": 256,
    "embedding_multiplier": 12.0,
    "embedding_scale": 3.0,
    "final_logit_softcapping": 30.0,
    "first_k_dense_replace": 2,
    "head_dim": 96,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "is_causal": True,
    "layer_norm_epsilon": 1e-3,
    "layer_types": ["sliding_attention"],
    "lm_head_bias": True,
    "logit_scale": 0.25,
    "logits_scaling": 8.0,
    "mlp_bias": True,
    "mlp_only_layers": [0],
    "moe_layer_freq": [0, 1],
    "n_group": 3,
    "n_shared_experts": 3,
    "no_rope_layers": [0, 1],
    "norm_eps": 1e-3,
    "normalize_before": True,
    "norm_after": True,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
    "num_shared_experts": 3,
    "output_logit_soft_cap": 30.0,
    "output_multiplier": 0.5,
    "parallel_attn": True,
    "qkv_bias": "other",
    "quantization_config": {"quant_method": "fp8"},
    "query_pre_attn_scalar": 224,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-3,
    "route_scale": 1.7,
    "scale_emb": 12,
    "score_function": "softplus",
    "is_neox_style": False,
    "norm_weight_offset": 1.0,
    "num_sink_tokens": 4,
    "pe_type": "alibi",
    "use_swa": True,
    "add_unit_offset": True,
    "sliding_window_pattern": 6,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": "other",
    "topk_group": 3,
    "topk_method": "noaux_tc",
    "use_alibi": True,
    "use_bias": True,
    "use_parallel_residual": True,
    "use_sliding_window": True,
}
TOP: tuple[str, ...] = ()
ROTARY_PLACES = (
    ("rope_parameters",),
    ("rope_scaling",),
    ("rope_parameters", "full_attention"),
    ("rope_parameters", "sliding_attention"),
    ("text_config",),
    ("text_config", "rope_parameters"),
)


def read(path: Path, config: Config) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_dir(path)


def with_key(config: Config, place: tuple[str, ...], key: str, value: object) -> Config:
    """A copy with one more key, in nested objects that are made if they are missing."""
    if not place:
        return config | {key: value}
    inner = config.get(place[0]) or {}
    return config | {place[0]: with_key(inner, place[1:], key, value)}


def other_value(config: ModelConfig, key: str, value: object) -> object:
    if value != "other":
        return value
    return not (config.tie_embeddings if key.startswith("tie") else config.qkv_bias)


@pytest.mark.parametrize(
    ("place", "key"),
    [
        pytest.param(place, key, id=".".join((*place, key)))
        for places, keys in (((TOP, *ROTARY_PLACES), ROTARY), ((TOP, ("text_config",)), OTHERS))
        for place, key in product(places, keys)
        # Two keys mean nothing outside an object about rotation.
        if key not in ("type", "factor") or place[-1:] not in (TOP, ("text_config",))
    ],
)
def test_it_is_refused_by_the_name_of_file_and_key_or_it_changes_the_model(
    tmp_path: Path, place: tuple[str, ...], key: str
) -> None:
    for family, release in RELEASES.items():
        base = read(tmp_path, release)
        value = other_value(base, key, (ROTARY | OTHERS)[key])
        try:
            found = read(tmp_path, with_key(release, place, key, value))
        except CheckpointError as refused:
            assert names(str(refused), tmp_path / "config.json", place, key), (family, refused)
        else:
            assert found != base, (family, "the key is ignored")
            assert place[:1] != ("text_config",), (family, "nested parts are not read")


def names(refusal: str, file: Path, place: tuple[str, ...], key: str) -> bool:
    """The file, and the key or the numbers that it does not fit."""
    is_sum = any(what in refusal for what in ("experts", "attention heads", "head_dim"))
    is_type = "rope type" in refusal and f"{place[0]}: " in refusal
    return str(file) in refusal and (key in refusal or is_sum or is_type)


@pytest.mark.parametrize(("family", "share"), PARTLY_ROTATED.items())
@pytest.mark.parametrize("place", [TOP, *ROTARY_PLACES[:3]], ids=".".join)
@pytest.mark.parametrize("key", ["partial_rotary_factor", "rotary_pct", "rotary_dim"])
def test_halves_and_wholes_are_rotated_wherever_they_are_stated(
    tmp_path: Path, family: str, share: float, place: tuple[str, ...], key: str
) -> None:
    plain = {k: v for k, v in RELEASES[family].items() if k != "partial_rotary_factor"}
    base = read(tmp_path, plain)
    assert base.rotary_dim == base.head_dim * share
    for wanted in (base.head_dim // 2, base.head_dim):
        value = wanted if key == "rotary_dim" else wanted / base.head_dim
        found = read(tmp_path, with_key(plain, place, key, value))
        assert found == replace(base, rotary_dim=wanted)


def test_two_places_that_differ_are_refused(tmp_path: Path) -> None:
    config = RELEASES["llada2_moe"] | {"rope_parameters": {"partial_rotary_factor": 1.0}}
    with pytest.raises(CheckpointError, match=r"config\.json: partial_rotary_factor: 0\.5 is not"):
        read(tmp_path, config)


@pytest.mark.parametrize("place", [TOP, *ROTARY_PLACES[:3]], ids=".".join)
def test_the_rotary_base_is_that_of_transformers(tmp_path: Path, place: tuple[str, ...]) -> None:
    classes = {
        "sdar": transformers.Qwen3Config,
        "dream": transformers.Qwen2Config,
        "sdar_moe": transformers.Qwen3MoeConfig,
        "stable_diffcoder": transformers.LlamaConfig,
        "llada_moe": transformers.OlmoeConfig,
    }
    for family, config_class in classes.items():
        plain = {k: v for k, v in RELEASES[family].items() if k != "rope_theta"}
        config = with_key(plain, place, "rope_theta", 12345.0)
        theirs = config_class(**json.loads(json.dumps(config)) | {"layer_types": None})
        stated = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        assert read(tmp_path, config).rope_theta == stated["rope_theta"] == 12345.0


def test_transformers_saves_what_is_read(tmp_path: Path) -> None:
    """A configuration as transformers 5 writes it, all its keys stated."""
    for family, config_class in (
        ("sdar", transformers.Qwen3Config),
        ("sdar_moe", transformers.Qwen3MoeConfig),
    ):
        config = config_class(**RELEASES[family]).to_dict() | {
            key: RELEASES[family][key] for key in ("model_type", "architectures")
        }
        assert read(tmp_path, config) == read(tmp_path, RELEASES[family])


WITHOUT_EFFECT: Config = {
    "apply_rope_fusion": True,
    "attention_backend": "flash_attention_2",
    "attention_softmax_in_fp32": True,
    "fuse_norm": True,
    "fused_swiglu": True,
    "is_neox_style": True,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "router_bias_update_rate": 0.001,
    "use_flex_attention": True,
    "_name_or_path": "x",
    "attn_implementation": "sdpa",
    "attention_dropout": 0.1,
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "bos_token_id": 1,
    "conversation_template": "chatml",
    "debug": True,
    "denoising_steps": 8,
    "eval_score": 0.9,
    "ep_size": 1,
    "flash_attention": True,
    "fuse_cross_entropy": True,
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "output_router_logits": True,
    "pretraining_tp": 2,
    "router_aux_loss_coef": 0.01,
    "sliding_window": 4096,
    "temperature": 0.7,
    "top_k": 50,
    "transformers_version": "4.52.3",
    "unsloth_version": "2025.1",
    "use_cache": True,
}
REST_OF_RELEASES: dict[str, Config] = {
    "llada": {
        "alibi_bias_max": 8.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "embedding_dropout": 0.0,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
    },
    "llada2_moe": {
        "embedding_dropout": 0.0,
        "moe_shared_expert_intermediate_size": 512,
        "norm_softmax": False,
        "output_dropout": 0.0,
        "rope_scaling": None,
        "rotary_dim": 64,
        "router_dtype": "fp32",
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    },
    "llada_moe": {
        "norm_topk_prob": None,
        "routed_scaling_factor": 1,
        "router_num_group": None,
        "router_topk_group": None,
        "rope_scaling": None,
    },
}


@pytest.mark.parametrize("family", RELEASES)
def test_what_changes_no_forward_is_let_pass(tmp_path: Path, family: str) -> None:
    config = RELEASES[family] | WITHOUT_EFFECT | REST_OF_RELEASES.get(family, {})
    assert read(tmp_path, config) == read(tmp_path, RELEASES[family])


def test_true_spellings_of_the_same_model_are_let_pass(tmp_path: Path) -> None:
    same = {"num_local_experts": 128, "use_qk_norm": True, "qkv_bias": False, "norm_eps": 1e-6}
    base = read(tmp_path, RELEASES["sdar_moe"])
    assert read(tmp_path, RELEASES["sdar_moe"] | same) == base
    nested = {"text_config": RELEASES["sdar_moe"] | same}
    assert read(tmp_path, RELEASES["sdar_moe"] | nested) == base


def test_a_nested_share_answers_as_that_at_the_top(tmp_path: Path) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe")
    tiny = json.loads((path / "config.json").read_text())
    top = read(tmp_path, tiny | {"partial_rotary_factor": 1.0})
    for key in ("partial_rotary_factor", "rope_theta", "rope_scaling"):
        del tiny[key]
    stated = {"rope_theta": 600000, "rope_type": "default", "partial_rotary_factor": 1.0}
    assert read(tmp_path, tiny | {"rope_parameters": stated}) == top
    assert top.rotary_dim == 8
