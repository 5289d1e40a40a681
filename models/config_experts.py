"""The experts in a configuration, for each family that has some.

`config.py` reads the rest of the configuration; `kernels/experts.py` applies the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effuse.kernels.experts_routing import Routing
from effuse.models.config_keys import CheckpointError, ConfigKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The layers that have experts instead of an MLP, and their sizes."""

    routing: Routing
    intermediate_size: int  # of one expert
    num_dense_layers: int  # this many first layers have none
    has_bias: bool  # of the choice, with one number for each expert


def llada2_experts(keys: ConfigKeys) -> ExpertConfig:
    """Sigmoid scores with a bias, best groups first, a shared expert, the first layers dense."""
    keys.only("score_function", (None, "sigmoid"))
    keys.only("norm_topk_prob", (None, True))
    keys.only("moe_router_enable_expert_bias", (None, True))
    keys.only("num_shared_experts", (None, 0, 1))
    top_k = keys.integer("num_experts_per_tok")
    routing = _routing(
        keys,
        num_experts=keys.integer("num_experts"),
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


def qwen_experts(keys: ConfigKeys) -> ExpertConfig:
    """Softmax scores, in every layer."""
    keys.only("decoder_sparse_step", (None, 1))
    keys.only("mlp_only_layers", (None, []))
    newer = "num_local_experts"  # as saved by transformers 5
    routing = _routing(
        keys,
        num_experts=keys.integer("num_experts" if keys.values.get(newer) is None else newer),
        top_k=keys.integer("num_experts_per_tok"),
        scores="softmax",
        renormalises=keys.flag("norm_topk_prob"),
    )
    return ExpertConfig(
        routing=routing,
        intermediate_size=keys.integer("moe_intermediate_size"),
        num_dense_layers=0,
        has_bias=False,
    )


def llada_experts(keys: ConfigKeys) -> ExpertConfig:
    """Softmax scores that are never divided by their sum, for any `norm_topk_prob`."""
    keys.only("moe_router_enable_expert_bias", (None, False))
    for ignored in ("norm_topk_prob", "dense_intermediate_size"):
        keys.stated(ignored)
    keys.only("shared_expert_intermediate_size", (None,))
    num_layers = keys.num_layers()
    pattern = keys.stated("moe_layer_freq")
    if pattern is None:
        pattern = [1] * num_layers
    num_dense = pattern.count(0) if isinstance(pattern, list) else 0
    if pattern != [0] * num_dense + [1] * (num_layers - num_dense):
        wanted = f"{num_layers} numbers, 0 for the first layers and 1 for the rest"
        raise keys.error("moe_layer_freq", f"{pattern!r} is not supported; accepted: {wanted}")
    routing = _routing(
        keys,
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        scores="softmax",
        renormalises=False,
    )
    return ExpertConfig(
        routing=routing,
        intermediate_size=keys.integer("expert_intermediate_size"),
        num_dense_layers=num_dense,
        has_bias=False,
    )


def _routing(keys: ConfigKeys, **numbers: Any) -> Routing:
    try:
        return Routing(**numbers)
    except ValueError as error:
        raise CheckpointError(f"{keys.path}: {error}") from None
