"""The families with the tokenizer of Ling, all with experts.

LLaDA2.0 and 2.1 (arXiv 2512.15745, 2602.08676) have Ling's layers and the prompt in blocks.
LLaDA-MoE (arXiv 2509.24389) has OLMoE's layers and the prompt in both directions.
"""

from typing import Final

from effuse.kernels.experts_routing import Routing
from effuse.models.config_keys import ConfigKeys
from effuse.models.family import ExpertConfig, Family, Form, Layout

_DEFAULTS: Final = {"mask_token_id": 156895, "tie_word_embeddings": False}
_END_IDS: Final = (156892,)


def _llada2_experts(keys: ConfigKeys) -> ExpertConfig:
    """Sigmoid scores with a bias, best groups first, a shared expert, the first layers dense."""
    top_k = keys.integer("num_experts_per_tok")
    routing = Routing(
        num_experts=keys.num_experts("num_experts"),
        top_k=top_k,
        scores="sigmoid",
        renormalises=top_k > 1,
        scale=keys.number("routed_scaling_factor"),
        num_groups=keys.integer("n_group"),
        top_groups=keys.integer("topk_group"),
        num_shared=keys.integer("num_shared_experts", default=0, least=0),
    )
    return ExpertConfig(
        routing=routing,
        intermediate_size=keys.integer("moe_intermediate_size"),
        num_dense_layers=keys.integer("first_k_dense_replace", default=0, least=0),
        has_bias=True,
    )


LLADA2_MOE: Final = Family(
    architecture="llada2_moe",
    model_types=("llada2_moe",),
    classes=("LLaDA2MoeModelLM",),
    form=Form(
        only={"num_shared_experts": (None, 0, 1), "use_bias": (False,)},
        defaults=_DEFAULTS,
        as_many_kv_heads=True,
        rotary_share=0.5,
        qk_norm=True,
        experts=_llada2_experts,
    ),
    layout=Layout(
        embedding="model.word_embeddings",
        qkv=("attention.query_key_value",),
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        attn_out="attention.dense",
    ),
    is_block_causal=True,
    block_size=32,
    algorithm="block_diffusion",
    confidence_threshold=0.95,
    top_k_first=True,
    caps_steps=True,
    end_ids=_END_IDS,
    origin="LLaDA2's generate",
)


def _llada_experts(keys: ConfigKeys) -> ExpertConfig:
    """Softmax scores that are never divided by their sum, for any `norm_topk_prob`."""
    for ignored in ("norm_topk_prob", "dense_intermediate_size"):
        keys.stated(ignored)
    num_layers = keys.num_layers("num_hidden_layers")
    pattern = keys.stated("moe_layer_freq")
    if pattern is None:
        pattern = [1] * num_layers
    num_dense = pattern.count(0) if isinstance(pattern, list) else 0
    if pattern != [0] * num_dense + [1] * (num_layers - num_dense):
        wanted = f"{num_layers} numbers, 0 for the first layers and 1 for the rest"
        raise keys.error("moe_layer_freq", f"{pattern!r} is not supported; accepted: {wanted}")
    routing = Routing(
        num_experts=keys.num_experts("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        scores="softmax",
        renormalises=False,
    )
    return ExpertConfig(
        routing=routing,
        intermediate_size=keys.integer("expert_intermediate_size"),
        num_dense_layers=num_dense,
    )


LLADA_MOE: Final = Family(
    architecture="llada_moe",
    model_types=("llada", "lladamoe"),
    classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    form=Form(
        only={"clip_qkv": (None,), "qk_layernorm": (True,)},
        names={"intermediate_size": "dense_intermediate_size"},
        defaults=_DEFAULTS,
        as_many_kv_heads=True,
        rotary_share=1.0,
        qk_norm=True,
        experts=_llada_experts,
    ),
    block_size=32,
    algorithm="llada",
    is_adapted=True,
    top_k_first=False,
    end_ids=_END_IDS,
    origin="LLaDA's generate.py",
)
