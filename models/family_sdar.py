"""SDAR: Qwen3's layers, the prompt in blocks; the larger release has experts instead of the MLP."""

from dataclasses import replace
from typing import Final

from effuse.kernels.experts_routing import Routing
from effuse.models.config_keys import ConfigKeys
from effuse.models.family import ExpertConfig, Family, Form

SDAR: Final = Family(
    architecture="sdar",
    model_types=("sdar",),
    classes=("SDARForCausalLM",),
    form=Form(
        # The head's width of its configuration class, for any hidden size, and its tokenizer's mask
        defaults={"head_dim": 128, "mask_token_id": 151669},
        qk_norm=True,
    ),
    is_block_causal=True,
    # generate.py of github.com/JetAstra/SDAR
    block_size=4,
    algorithm="block_diffusion",
    confidence_threshold=0.85,
    top_k_first=True,
    origin="SDAR's generate.py",
)


def _experts(keys: ConfigKeys) -> ExpertConfig:
    """Softmax scores, in every layer."""
    keys.integer("intermediate_size")  # must be stated, although no layer has such an MLP
    newer = "num_local_experts"  # as saved by transformers 5
    routing = Routing(
        num_experts=keys.num_experts("num_experts" if keys.values.get(newer) is None else newer),
        top_k=keys.integer("num_experts_per_tok"),
        scores="softmax",
        renormalises=keys.flag("norm_topk_prob"),
    )
    return ExpertConfig(routing=routing, intermediate_size=keys.integer("moe_intermediate_size"))


SDAR_MOE: Final = replace(
    SDAR,
    architecture="sdar_moe",
    model_types=("sdar_moe",),
    classes=("SDARMoeForCausalLM",),
    form=replace(SDAR.form, experts=_experts),
)
