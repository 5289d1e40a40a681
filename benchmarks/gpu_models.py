"""Published model shapes with random weights, made on the device; only their speed is realistic.

Weights are normal with deviation 0.02, norms are 1, and the head's rows of mask and end ids are
zero so that neither is ever drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from effuse.kernels.experts_routing import Routing
from effuse.models.config import ModelConfig
from effuse.models.family import ExpertConfig
from effuse.models.group import ALL, RankPlace
from effuse.models.transformer import LayerWeights, ModelWeights, Transformer

DREAM_7B = ModelConfig(
    architecture="dream",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
    max_position_embeddings=16384,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    block_size=32,
)
LLADA_8B = ModelConfig(
    architecture="llada",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=126464,
    max_position_embeddings=16384,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    block_size=32,
)
SDAR_8B = ModelConfig(
    architecture="sdar",
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=1 << 20,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tie_embeddings=False,
    mask_token_id=151669,
    eos_token_ids=(151643,),
    block_size=32,
)
FAST_DLLM_1_5B = replace(
    DREAM_7B,
    hidden_size=1536,
    num_heads=12,
    num_kv_heads=2,
    intermediate_size=8960,
    vocab_size=151936,
    max_position_embeddings=1 << 17,
    mask_token_id=151665,
)
"""Of Fast-dLLM v2, whose layers are those of Dream."""
# For trying the benchmarks without a GPU.
TINY = ModelConfig(
    architecture="dream",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=96,
    max_position_embeddings=4096,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=90,
    eos_token_ids=(91,),
    block_size=32,
)
MODELS = {
    "dream-7b": DREAM_7B,
    "llada-8b": LLADA_8B,
    "sdar-8b": SDAR_8B,
    "fast-dllm-1.5b": FAST_DLLM_1_5B,
    "tiny": TINY,
}

_MINI_EXPERTS = ExpertConfig(
    routing=Routing(
        num_experts=256,
        top_k=8,
        scores="sigmoid",
        renormalises=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        num_shared=1,
    ),
    intermediate_size=512,
    num_dense_layers=1,
    has_bias=True,
)
LLADA2_MINI = ModelConfig(
    architecture="llada2_moe",
    num_layers=20,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=5120,
    vocab_size=157184,
    max_position_embeddings=32768,
    rope_theta=6e5,
    rms_norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tie_embeddings=False,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    block_size=32,
    rotary_dim=64,
    experts=_MINI_EXPERTS,
)
LLADA2_FLASH = replace(
    LLADA2_MINI,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    intermediate_size=9216,
    experts=replace(_MINI_EXPERTS, intermediate_size=1024),
)
TINY_EXPERTS = replace(
    TINY,
    architecture="llada2_moe",
    num_layers=3,
    qkv_bias=False,
    qk_norm=True,
    rotary_dim=4,
    experts=ExpertConfig(
        routing=Routing(num_experts=8, top_k=2, scores="sigmoid", renormalises=True, num_shared=1),
        intermediate_size=16,
        num_dense_layers=1,
        has_bias=True,
    ),
)
# Those with experts; the others' products are the same for every row.
EXPERT_MODELS = {
    "llada2-mini": LLADA2_MINI,
    "llada2-flash": LLADA2_FLASH,
    "tiny-experts": TINY_EXPERTS,
}


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, place: RankPlace = ALL
) -> Transformer:
    """A transformer of this shape, or a rank's part of one; equal calls give equal weights on one
    kind of device.
    """
    generator = torch.Generator(device).manual_seed(1)
    shard = place.shard(config)

    def normal(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0, 0.02, generator=generator)

    def ones(size: int = config.hidden_size) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def layer(number: int) -> LayerWeights:
        width, q_dim = config.hidden_size, len(shard.heads) * config.head_dim
        qkv_dim = (len(shard.queries) + 2 * len(shard.kv_heads)) * config.head_dim
        experts = config.experts_of(number)
        inner = config.intermediate_size if experts is None else experts.intermediate_size
        if experts is None or shard.experts is None:
            inner //= shard.size
        count: tuple[int, ...] = ()
        if experts is not None:
            routed = experts.routing.num_experts if shard.experts is None else len(shard.experts)
            count = (routed + experts.routing.num_shared,)
        return LayerWeights(
            attn_norm=ones(),
            qkv=normal(qkv_dim, width),
            qkv_bias=normal(qkv_dim) if config.qkv_bias else None,
            q_norm=ones(config.head_dim) if config.qk_norm else None,
            k_norm=ones(config.head_dim) if config.qk_norm else None,
            attn_out=normal(width, q_dim),
            mlp_norm=ones(),
            gate_up=normal(*count, 2 * inner, width),
            down=normal(*count, width, inner),
            router=None if experts is None else normal(experts.routing.num_experts, width),
            router_bias=(
                normal(experts.routing.num_experts).float()
                if experts is not None and experts.has_bias
                else None
            ),
        )

    head = normal(len(shard.vocabulary), config.hidden_size)
    never = {config.mask_token_id, *config.eos_token_ids}.intersection(shard.vocabulary)
    head[[token_id - shard.vocabulary.start for token_id in never]] = 0
    weights = ModelWeights(
        embedding=normal(len(shard.vocabulary), config.hidden_size),
        layers=tuple(layer(number) for number in range(config.num_layers)),
        norm=ones(),
        head=head,
    )
    return Transformer(config, weights, shard=shard, group=place.group, context=place.context)
