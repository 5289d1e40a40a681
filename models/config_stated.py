"""Checks that the forward obeys everything that a config.json states about it.

A fact, such as the rotary base, has many spellings and may be at the top, in rope_parameters or in
another nested object. Each spelling in each place must agree with the model. A key that is in no
table is refused if its name concerns the forward and its value switches something on. Other unknown
keys are ignored, because releases keep notes of their training there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from effuse.models.config_keys import ConfigKeys

_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "effective_n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "qk_head_dim", "v_head_dim"),
    "mlp_size": ("intermediate_size", "mlp_hidden_size", "ffn_hidden_size", "n_inner"),
    "rope_theta": (
        "rope_theta", "rope_base", "rotary_base", "rotary_emb_base", "rotary_embedding_base",
        "theta",
    ),
    "rms_norm_eps": (
        "rms_norm_eps", "norm_eps", "norm_epsilon", "rms_norm_epsilon", "layer_norm_eps",
        "layer_norm_epsilon", "layernorm_epsilon",
    ),
    "qkv_bias": ("attention_bias", "qkv_bias", "use_qkv_bias", "include_qkv_bias", "attn_bias"),
    "qk_norm": ("use_qk_norm", "qk_norm", "qk_layernorm", "attention_layer_norm"),
    "tie_embeddings": ("tie_word_embeddings", "weight_tying", "tie_embeddings"),
    "num_experts": (
        "num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts",
        "moe_num_experts",
    ),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    "num_shared": ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"),
    "num_dense_layers": ("first_k_dense_replace",),
    "inner_size": (
        "moe_intermediate_size", "expert_intermediate_size", "moe_hidden_size",
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
    ),
    "renormalises": ("norm_topk_prob",),
    "scale": (
        "routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor",
        "moe_router_topk_scaling_factor", "route_scale",
    ),
    "num_groups": ("n_group", "num_expert_group", "router_num_group"),
    "top_groups": ("topk_group", "limited_topk_group", "router_topk_group"),
    "scores": ("score_function", "scoring_func", "score_func", "moe_router_score_function"),
    "has_router_bias": ("moe_router_enable_expert_bias", "use_expert_bias"),
    "rope_type": ("rope_type",),
    "activation": ("hidden_act", "hidden_activation", "activation_type", "activation_function"),
}  # fmt: skip
_FACT_OF: Final = {name: fact for fact, names in _SPELLINGS.items() for name in names}
_SHARES: Final = (
    "partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent", "rope_percent",
    "rotary_percentage", "rope_percentage", "partial_rotary", "rotary_factor",
)  # fmt: skip
"""Spellings of the share of a head's dimensions that is rotated."""
_COUNTS: Final = (
    "rotary_dim", "rotary_ndims", "rotary_emb_dim", "rope_dim", "rope_head_dim", "qk_rope_head_dim",
    "rot_dim", "n_rot",
)  # fmt: skip
"""Spellings of the number of rotated dimensions."""
_TRUE_OF_ALL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_layer_norm_with_affine": (True,),
    "layer_norm_with_affine": (True,),
    "attention_softmax_in_fp32": (True,),
    "is_neox_style": (True,),
    "moe_router_dtype": ("fp32", "float32"),
    "rope": (True,),
    "rope_full_precision": (True,),
    "router_dtype": ("fp32", "float32"),
    "use_rmsnorm": (True,),
    "use_rope": (True,),
    "use_rotary_embedding": (True,),
    "position_embedding_type": ("rope", "rotary"),
    "layer_norm_type": ("rms", "rmsnorm"),
    "norm_type": ("rms", "rmsnorm"),
    "normalization_type": ("rms", "rmsnorm", "RMSNorm"),
    "use_gated_mlp": (True,),
}
# Keys of training, output, speed, sampling and transformers' internals, and numbers that only have
# an effect through another key, which is refused.
_NO_EFFECT: Final = re.compile(
    r"dropout|pdrop|_drop_rate|loss|entropy|coef|init|checkpoint|_implementation|flash|_std$"
    r"|fused?_|_fusion$|_backend$|flex_attention|grouped_gemm|dispatcher|load_balancing|update_rate"
    r"|auto_map|id2label|label2id|task_specific_params|^pruned_heads$|^mlp_ratio$|^alibi_bias_max$"
    r"|^output_(attentions|hidden_states|router_logits|scores)$|^return_|^use_cache$"
    r"|^context_window$|^sliding_window$|^tie_encoder_decoder$"
    r"|^max_(position_embeddings|sequence_length|window_layers|seq_len)|^(embedding|vocab)_size"
    r"|^(temperature|top_k|top_p|min_p|typical_p|num_beams|num_beam_groups)$|penalty"
    r"|_token_ids?$|^(torch_)?dtype$|^transformers|^tokenizer|^_|^pretraining_tp$|_parallel_size$"
)
_OF_THE_FORWARD: Final = re.compile(
    r"rope|rotary|soft_?cap|logit|multiplier|scal|clip|bias|norm|window|sliding|alibi|expert|moe"
    r"|router|gat(e|ing)|residual|att(n|ention)|layer_?type|sparse|dense|position"
    r"|(^|_)eps(ilon)?$|activation|_act$|softmax|qkv|qk_|kv_|query|mup|temperature|causal|embed"
    r"|emb_|mla|lora_rank|conv(?!ers)|ssm|mamba|tie_|tying|tied|quant|compress|shift|cross_|recurr"
    r"|ntk|yarn|mscale|topk|top_k|scoring|score_f|mlp_|ffn_|share|head|attend|parallel_block"
    r"|block_type|_freq$|_factor$|hybrid|pattern|swiglu|geglu|altup|laurel|loop|dim_model_base"
    r"|neox|unit_offset|sink|(^|_)swa(_|$)|pe_type|pos_emb|rel_pos|prefix_lm|ngpt|per_layer"
)
_ONE_CHANGES_NOTHING: Final = re.compile(
    r"multiplier|scal|factor|temperature|freq|step|group|interval|period"
)
_OFF: Final = ("", "none", "None", "default", "silu", "swiglu", "full", "full_attention", "rope")


def check_stated(keys: ConfigKeys, facts: Mapping[str, object]) -> None:
    """Raises CheckpointError that names file and first key that the forward would not obey.

    `facts` has the model's values by the names of `_SPELLINGS`, and the `rotary_dim` of a head.
    """
    for path, value in _leaves(keys.values, ()):
        name, where = path[-1], ".".join(path)
        fact = facts.get(_FACT_OF.get(name, ""))
        if name in _SHARES + _COUNTS:
            _check_rotated(keys, where, name, value, facts)
        elif path[0] in keys.asked:
            continue
        elif fact is None:
            _check_unknown(keys, path, value)
        elif not _same(value, fact):
            raise keys.error(where, f"{_shown(value)} is not supported; accepted: {_shown(fact)}")


def _check_rotated(
    keys: ConfigKeys, where: str, name: str, value: object, facts: Mapping[str, Any]
) -> None:
    rotated, head_dim = facts["rotary_dim"], facts["head_dim"]
    if _num_rotated(name, value, head_dim) != rotated:
        raise keys.error(
            where,
            f"{_shown(value)} is not supported; accepted: {rotated}, the rotated dimensions out of "
            f"the {head_dim} of a head",
        )


def rotary_dim(keys: ConfigKeys, head_dim: int, share: float) -> int:
    """The rotated dimensions of a head, from the first place that states them, or from `share`.
    Raises CheckpointError if that is neither all nor half.
    """
    for place in keys.rope_places():
        for name in (*_SHARES, *_COUNTS):
            if (value := place.values.get(name)) is not None:
                rotated = _num_rotated(name, value, head_dim)
                if rotated in (head_dim, head_dim // 2):
                    return rotated
                wanted = f"{rotated} of head_dim {head_dim} dimensions are rotated"
                raise keys.error(name, f"{wanted}; accepted: all, or half of them")
    return int(head_dim * share)


def _num_rotated(name: str, value: object, head_dim: int) -> int:
    """The dimensions of a head that a share or a count means; -1 if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return -1
    try:
        return int(head_dim * value) if name in _SHARES else int(value)
    except (OverflowError, ValueError):  # infinite, or not a number
        return -1


def _check_unknown(keys: ConfigKeys, path: tuple[str, ...], value: object) -> None:
    where = ".".join(path)
    if any(_NO_EFFECT.search(part) for part in path) or not _OF_THE_FORWARD.search(where.lower()):
        return
    if not _is_off(path[-1], value):
        why = (
            "not supported, and may change the forward pass; delete it if the model does not use it"
        )
        raise keys.error(where, f"{_shown(value)} is {why}")


def _is_off(name: str, value: object) -> bool:
    """Whether this value of a key that no code obeys leaves the forward unchanged."""
    if isinstance(value, list):
        return all(isinstance(one, str) and one in _OFF for one in value)
    if name in _TRUE_OF_ALL:
        return any(_same(value, one) for one in _TRUE_OF_ALL[name])
    if isinstance(value, str):
        return value in _OFF
    if isinstance(value, bool) or value not in (0, 1):
        return value is False
    return bool(value) == bool(_ONE_CHANGES_NOTHING.search(name.lower()))


def _leaves(
    values: Mapping[str, object], at: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Stated paths and values, including those in nested objects."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*at, name))
        elif value is not None:
            yield (*at, name), value


def _same(value: object, fact: object) -> bool:
    """JSON writes 1.0 and 1 for the same number, but not true."""
    return value == fact and isinstance(value, bool) == isinstance(fact, bool)


def _shown(value: object) -> str:
    return json.dumps(value)
